"""Headers: the header fields of requests and answers, as parameters and headers of the OpenAPI document.

Invariants: Accept, Authorization and Content-Type are no parameters, because OpenAPI ignores such: they are media types and
security schemes. No parameter has a default or an example, or the page would send it with every request.
"""

from __future__ import annotations

from typing import Any

from service.api.attend_route import ATTENTION_ROUTE, BODY_CODINGS, INFER_CODINGS, INFER_ROUTES, ROUTE
from service.api.problems import is_inference

HOT = (ROUTE, ATTENTION_ROUTE, *INFER_ROUTES)
_TEXT, _COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}
_ANY = ("X-Request-ID", "traceparent", "tracestate")
_FRAMED = "Inference-Header-Content-Length"
_ID = "in the answer and the log if it is 1 to 128 of A-Z a-z 0-9 . _ : / + = @ -; default: made"
_DEADLINE = "shortens the deadline, which begins when the body is complete; default: ATTENTION_REQUEST_TIMEOUT_MS"
_CODING = "of the body; default: none"
_READ: dict[str, tuple[str, dict[str, Any]]] = {
    "X-Request-ID": (_ID, _TEXT),
    "traceparent": ("W3C trace context, continued where ATTENTION_TRACES is on; default: a new trace", _TEXT),
    "tracestate": ("of the same trace; default: none", _TEXT),
    "X-Request-Timeout-Ms": (_DEADLINE, {"type": "integer", "minimum": 1}),
    "Accept-Encoding": ("content codings of the answer; default: identity; several are an offer, not a request", _TEXT),
    _FRAMED: ("bytes of the JSON, where the bytes of tensors follow it; default: all is JSON", _COUNT),
    "Content-Encoding-v1": (_CODING, {"type": "string", "enum": [*map(bytes.decode, BODY_CODINGS)]}),
    "Content-Encoding-v2": (_CODING, {"type": "string", "enum": [*map(bytes.decode, INFER_CODINGS)]}),
}
_SENT: dict[str, tuple[str, dict[str, Any]]] = {
    "X-Request-ID": ("that of the request, or a made one; name it when you report a fault", _TEXT),
    "Server": ("attention-service/ and its major version, by which the Python client warns of another", _TEXT),
    "Cache-Control": ("no-store: an answer is about the client's own tensors", _TEXT),
    "Server-Timing": ("decode, queue, compute and total, in milliseconds", _TEXT),
    "Content-Encoding": ("the coding of the answer, if it was requested and is worth it", _TEXT),
    "Retry-After": ("whole seconds after which to send the request again", _COUNT),
    "WWW-Authenticate": ("Bearer", _TEXT),
    _FRAMED: ("bytes of the JSON, where the bytes of tensors follow it", _COUNT),
}
_OF_STATUS = {"401": ("WWW-Authenticate",), "409": ("Retry-After",), "429": ("Retry-After",), "503": ("Retry-After",)}
PARAMETERS = {
    name: {"name": name.removesuffix("-v1").removesuffix("-v2"), "in": "header", "description": words, "schema": schema}
    for name, (words, schema) in _READ.items()
}
HEADERS = {name: {"description": words, "schema": schema} for name, (words, schema) in _SENT.items()}


def headers_read(path: str) -> list[dict[str, str]]:
    """Return the headers that a request to this path may have, as references to PARAMETERS."""
    names = list(_ANY)
    if path in HOT:
        version, framed = ("v2", [_FRAMED]) if is_inference(path) else ("v1", [])
        names = ["X-Request-Timeout-Ms", f"Content-Encoding-{version}", "Accept-Encoding", *framed, *names]
    return [{"$ref": f"#/components/parameters/{name}"} for name in names]


def headers_sent(path: str, status: str) -> dict[str, dict[str, str]]:
    """Return the headers of an answer, as references to HEADERS; `path` may be empty for errors."""
    names = ["X-Request-ID", "Server", "Cache-Control", *_OF_STATUS.get(status, ())]
    if path in HOT and status == "200":
        names += ["Server-Timing", "Content-Encoding", *([_FRAMED] if is_inference(path) else ())]
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}
