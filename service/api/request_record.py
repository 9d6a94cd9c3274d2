"""RequestRecord: what is known about one request while it is served; the log line and the metrics come from it.

Laws: one trace a request, counted and logged exactly once, at its end; the caller's request id is taken only if it is sane,
so that it can stand in a header and a log line.
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
    """Times in seconds; `route` is a template of ours; `path` is the caller's and goes nowhere."""

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
    is_document: bool = False  # the answer is one of `docs.py`


def start_record(scope: Scope, now: float) -> RequestRecord:
    asked = fields_of(scope)[b"x-request-id"]
    is_sane = asked and REQUEST_ID.fullmatch(asked[0])
    request_id = asked[0].decode("ascii") if is_sane else f"{getrandbits(96):024x}"
    trace = RequestRecord(request_id, scope["method"], scope["path"], now)
    scope[_KEY] = trace
    return trace


def milliseconds(seconds: float) -> float:
    """To the microsecond, as answers and log lines tell times; `round` to three places would go by way of text."""
    return round(seconds * 1e6) / 1000


def record_of(scope: Scope) -> RequestRecord:
    """The edge starts one for every request."""
    found: RequestRecord = scope[_KEY]
    return found
