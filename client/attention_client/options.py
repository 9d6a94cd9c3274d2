"""ClientOptions: address, timeouts and limits of a client, and the checks of options that a call may set.

Invariants: a value that is not valid raises InvalidInput before anything is sent. Types are checked too: a boolean is not a
number, even though Python compares it as one.
"""

from __future__ import annotations

import dataclasses
import numbers
import operator
import re
from typing import Any

import httpx2

from attention_client.errors import InvalidInput

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_TIMEOUT_S = 30.0
FOR_EVER_S = 1e9
"""A timeout from this value on, about thirty years, counts as no timeout; timers take no larger number."""
MAX_ANSWER_BYTES = 512 * 2**20
"""Room for the most weights that a service returns by default (64 MiB), even as JSON, together with the output."""
MAX_PORT = 65535
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_API_KEY = re.compile(r"[\x21-\x7e]+")


@dataclasses.dataclass(frozen=True, slots=True)
class ClientOptions:
    """Options of a client. `timeout_s` None is no limit; `max_answer_bytes` limits 200 answers. Raises InvalidInput."""

    url: str = dataclasses.field(repr=False)
    timeout_s: float | None
    max_connections: int
    attempts: int
    api_key: str | None = dataclasses.field(repr=False)
    max_answer_bytes: int = MAX_ANSWER_BYTES

    def __post_init__(self) -> None:
        _check_url(self.url)
        checked_timeout(self.timeout_s)
        for name in ("max_connections", "attempts", "max_answer_bytes"):
            check_count(getattr(self, name), name)
        if self.api_key is not None and not _is_like(_API_KEY, self.api_key):
            raise InvalidInput("api_key must be printable ASCII without spaces")


def checked_timeout(timeout_s: Any) -> float | None:
    """Return the timeout, or None if it is at least FOR_EVER_S. Raises InvalidInput unless it is a number above 0."""
    if timeout_s is None:
        return None
    is_number = isinstance(timeout_s, numbers.Real) and not isinstance(timeout_s, bool)
    if not is_number or not timeout_s > 0:
        raise InvalidInput("timeout_s must be a number above 0")
    return float(timeout_s) if timeout_s < FOR_EVER_S else None


def checked_request_id(request_id: str | None) -> str | None:
    if request_id is not None and not _is_like(_REQUEST_ID, request_id):
        raise InvalidInput(f"request_id must be {_REQUEST_ID.pattern}")
    return request_id


def check_count(count: object, name: str) -> None:
    """Raise InvalidInput unless it is a whole number of at least 1; integers of NumPy are accepted."""
    try:
        is_count = not isinstance(count, bool) and operator.index(count) >= 1  # type: ignore[arg-type]  # a TypeError
    except TypeError:
        is_count = False
    if not is_count:
        raise InvalidInput(f"{name} must be a whole number and at least 1")


def check_transport(transport: object) -> None:
    """Raise InvalidInput for a synchronous transport, which is easily mistaken for an asynchronous one."""
    if transport is not None and not isinstance(transport, httpx2.AsyncBaseTransport):
        raise InvalidInput("transport must be an httpx2.AsyncBaseTransport, for Client too")


def _check_url(text: object) -> None:
    try:
        url = httpx2.URL(text)  # type: ignore[arg-type]  # a TypeError
    except (httpx2.InvalidURL, TypeError):
        raise _no_url() from None
    if url.scheme not in ("http", "https") or not url.host or url.query or url.fragment:
        raise _no_url()
    if url.port is not None and not 1 <= url.port <= MAX_PORT:
        raise InvalidInput(f"the port of url must be from 1 to {MAX_PORT}")


def _no_url() -> InvalidInput:
    return InvalidInput("url must be like http://127.0.0.1:8000, without a query")


def _is_like(pattern: re.Pattern[str], text: object) -> bool:
    return isinstance(text, str) and pattern.fullmatch(text) is not None
