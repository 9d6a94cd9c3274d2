"""Problems: turn each failure into an HTTP status and an error body; only this module maps errors to statuses.

A body is RFC 9457 problem details, or under `/v2` the `{"error": …}` of the Open Inference Protocol. Invariants: every Rejected,
Refused and Failed error has a status here (a test walks these branches). A body is valid JSON of at most 4 KiB (4,096 bytes),
never with the text of a library. The `type` of problem details is the path of the error's row on the page of errors.
"""

from __future__ import annotations

import http
from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

from service import errors
from service.errors import ServiceError

STATUS: dict[type[ServiceError], int] = {
    errors.Malformed: 400,
    errors.Unauthorized: 401,
    errors.Forbidden: 403,
    errors.LayerNotFound: 404,
    errors.ModelNotFound: 404,
    errors.RouteNotFound: 404,
    errors.MethodNotAllowed: 405,
    errors.NotAcceptable: 406,
    errors.ClientTimeout: 408,
    errors.LayerChanged: 409,
    errors.LayersFixed: 409,
    errors.TooLarge: 413,
    errors.TargetTooLong: 414,
    errors.UnsupportedMediaType: 415,
    errors.UnsupportedContentEncoding: 415,
    errors.InvalidInput: 422,
    errors.QueueFull: 429,
    errors.RateLimited: 429,
    errors.HeadersTooLarge: 431,
    errors.EngineFailed: 500,
    errors.NotReady: 503,
    errors.Draining: 503,
    errors.EngineDown: 503,
    errors.DeadlineExceeded: 504,
}
# What the clients of `/v2` expect: 400 for invalid input, 503 for a full queue.
INFERENCE_STATUS = STATUS | {errors.InvalidInput: 400, errors.QueueFull: 503}
MAX_DETAIL_BYTES = 2000
ERRORS_PAGE = "/docs/errors"
MEDIA_TYPE = b"application/problem+json"
INFERENCE_MEDIA_TYPE = b"application/json"
# After these errors the connection closes: the rest of the request may still arrive, or the process drains.
_CLOSING = (
    errors.BodyTooLarge,
    errors.TargetTooLong,
    errors.HeadersTooLarge,
    errors.ClientTimeout,
    errors.Draining,
    errors.BadRequest,
)


class Problem(NamedTuple):
    """A complete error response: status, header pairs, body."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class ErrorRow(NamedTuple):
    """What a caller reads about one code: its status, its status under `/v2`, why it occurs and what to do."""

    code: str
    status: int
    inference_status: int
    cause: str
    remedy: str


def error_rows() -> list[ErrorRow]:
    """Return a row for each code of an answer, in the order of the tree; the first sentence of a docstring is the cause."""
    rows = []
    for kind in errors.raised_kinds(errors.Rejected, errors.Refused, errors.Failed):
        cause, _, remedy = " ".join((kind.__doc__ or "").split()).partition(". ")
        rows.append(ErrorRow(kind.code, status_of(kind), status_of(kind, INFERENCE_STATUS), f"{cause}.", remedy))
    return rows


def status_of(kind: type[ServiceError], table: dict[type[ServiceError], int] = STATUS) -> int:
    """Return the status of the nearest class in the table, 500 if there is none."""
    return next((table[parent] for parent in kind.__mro__ if parent in table), 500)


def is_inference(path: str) -> bool:
    return path == "/v2" or path.startswith("/v2/")


def render(error: ServiceError, request_id: str, *, as_inference: bool = False) -> Problem:
    """Return the response to an error as problem details, or as the Open Inference Protocol has it."""
    status = status_of(type(error), INFERENCE_STATUS if as_inference else STATUS)
    detail = f"{error.message}{error.shown}"[:MAX_DETAIL_BYTES]
    while len(orjson.dumps(detail)) > len(b'""') + MAX_DETAIL_BYTES:  # as JSON, a character takes up to six bytes
        detail = detail[: len(detail) // 2]
    if as_inference:
        content: dict[str, object] = {"error": f"{detail} ({error.code})"}
    else:
        content = {
            "type": f"{ERRORS_PAGE}#{error.code}",
            "title": http.HTTPStatus(status).phrase,
            "status": status,
            "detail": detail,
            "code": error.code,
            "param": error.param,
            "request_id": request_id,
        }
    body, media_type = orjson.dumps(content), INFERENCE_MEDIA_TYPE if as_inference else MEDIA_TYPE
    headers = [(b"content-type", media_type), (b"content-length", str(len(body)).encode())]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(error.retry_after_s).encode()))
    if isinstance(error, errors.Unauthorized):
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, errors.MethodNotAllowed):
        headers.append((b"allow", error.allow.encode("ascii")))
    if isinstance(error, _CLOSING):
        headers.append((b"connection", b"close"))
    return Problem(status, headers, body)


def problem_responses(meanings: Mapping[int, str], *, as_inference: bool = False) -> dict[int | str, dict[str, Any]]:
    """Return the error responses for OpenAPI: the meaning of each status on a route, and the schema of its body."""
    media_type, schema = (INFERENCE_MEDIA_TYPE, "InferenceError") if as_inference else (MEDIA_TYPE, "Problem")
    content = {media_type.decode("ascii"): {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    return {status: {"description": words, "content": content} for status, words in meanings.items()}
