"""Error examples: the answer to an error of each code, as the OpenAPI document shows it.

Invariants: an error of a body is what its example in `examples.py` raises; the others have a text here that the service uses.
Every code of an answer has one.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from service import errors
from service.api.openapi.examples import attention_examples
from service.api.problems import ErrorRow, render
from service.errors import ServiceError
from service.wire.attend_request import RequestLimits
from service.wire.attention_request import check_attention
from service.wire.json_document import parse

_REQUEST_ID = "2f9c4a7d1e8b5c3f6a0d9e24"
_LIMITS = RequestLimits(2**10, 2**20, 2**20, 2**20, 2**20)
_CHEAPER = "tensors take fewer bytes as safetensors or in base64, or send the sequences in several requests"
_TEXTS: dict[type[ServiceError], str] = {
    errors.BadRequest: "Content-Length must be one number of bytes",
    errors.BadJson: "the body is not valid JSON (byte 1)",
    errors.JsonTooDeep: "the body is nested deeper than 32 levels",
    errors.DuplicateKey: "an object of the body has a duplicate key",
    errors.BadBinary: "the body has 3 bytes, too few for safetensors",
    errors.Unauthorized: "this route needs a key: Authorization: Bearer <key>, or X-API-Key: <key>",
    errors.Forbidden: "this route needs a key with the role admin",
    errors.LayerNotFound: "no layer of that name is served; GET /v1/layers lists them",
    errors.RouteNotFound: "nothing is served at that path; GET /openapi.json lists what is",
    errors.NotAcceptable: "Accept must allow application/json or application/vnd.safetensors",
    errors.ClientTimeout: "the body did not arrive within 30 s",
    errors.LayerChanged: "another change of this layer came first; nothing was changed",
    errors.BodyTooLarge: f"the body has 16,777,217 bytes, expected at most 16,777,216 (ATTENTION_MAX_BODY_BYTES); {_CHEAPER}",
    errors.DecompressedTooLarge: f"the decompressed body has more than 16,777,216 bytes (ATTENTION_MAX_BODY_BYTES); {_CHEAPER}",
    errors.TargetTooLong: "the request target has more than 8,192 bytes (ATTENTION_MAX_TARGET_BYTES); put data into the body",
    errors.HeadersTooLarge: "the header fields of the request have more than 16,384 bytes together (ATTENTION_MAX_HEADER_BYTES)",
    errors.UnsupportedMediaType: "Content-Type must be application/json or application/vnd.safetensors, with text in UTF-8",
    errors.UnsupportedContentEncoding: "a body may be compressed once, with gzip or zstd",
    errors.QueueFull: "256 requests wait; the queue holds at most 256",
    errors.RateLimited: "more than 10 requests a second, in bursts of at most 20",
    errors.EngineFailed: "an internal fault; the log has its traceback under the request id",
    errors.NotReady: "layers are being loaded",
    errors.Draining: "the service is shutting down and accepts no new requests",
    errors.EngineDown: "the engine has stopped; this process computes nothing until it is replaced",
    errors.DeadlineExceeded: "the deadline passed before the request was queued",
}


def error_example(row: ErrorRow, *, as_inference: bool) -> dict[str, Any]:
    """Return OpenAPI's example of the answer to an error; raises KeyError for a code without one."""
    problem = render(_examples()[row.code], _REQUEST_ID, as_inference=as_inference)
    return {"summary": f"{row.code}: {row.cause}", "value": json.loads(problem.body)}


@functools.cache
def _examples() -> dict[str, ServiceError]:
    found = [kind(text) for kind, text in _TEXTS.items()]
    for example in attention_examples().values():
        body = json.dumps(example["value"]).encode()
        try:
            check_attention(parse(body, max_depth=32, max_numbers=1000), _LIMITS)
        except ServiceError as error:
            found.append(error.with_traceback(None))
    return {error.code: error for error in found}
