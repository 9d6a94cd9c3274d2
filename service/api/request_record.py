"""RequestRecord: the facts of one request while it is served; its log line and its metrics come from it.

Invariants: each request has one record, counted and logged exactly once, at its end. The caller's request id is taken only if it
matches REQUEST_ID, so that it is safe in a header and a log line.
"""

from __future__ import annotations

import dataclasses
import re
from random import getrandbits

from service.batching.job import BatchInfo
from service.http.asgi import Scope, fields_of

REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
_KEY = "attention.trace"


@dataclasses.dataclass(slots=True)
class RequestRecord:
    """Times in seconds. `route` is one of our path templates; `path` is the caller's and is never logged or a label."""

    request_id: str
    method: str
    path: str
    started: float
    route: str = "unmatched"
    status: int = 0
    code: str | None = None
    layer: str | None = None
    stage: str = "receiving"
    bytes_in: int = 0
    bytes_out: int = 0
    tokens: int | None = None
    masked_rows: int = 0
    batch_requests: int | None = None
    receive_s: float | None = None
    decode_s: float | None = None
    queue_s: float | None = None
    compute_s: float | None = None
    encode_s: float | None = None
    batch: BatchInfo | None = None
    is_document: bool = False  # the answer is one of `openapi/pages.py`


def start_record(scope: Scope, now: float) -> RequestRecord:
    asked = fields_of(scope)[b"x-request-id"]
    is_sane = asked and REQUEST_ID.fullmatch(asked[0])
    request_id = asked[0].decode("ascii") if is_sane else f"{getrandbits(96):024x}"
    record = RequestRecord(request_id, scope["method"], scope["path"], now)
    scope[_KEY] = record
    return record


def milliseconds(seconds: float) -> float:
    """Return milliseconds to the microsecond, as in answers and log lines; `round` to three places would go through text."""
    return round(seconds * 1e6) / 1000


def record_of(scope: Scope) -> RequestRecord:
    """Return the record that the outer middleware started for this request."""
    found: RequestRecord = scope[_KEY]
    return found
