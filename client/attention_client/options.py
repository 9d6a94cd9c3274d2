"""ClientOptions: where and how patiently to ask, and how much to take; and the same checks for what one call says of it.

Laws: what cannot be is refused here, in words of our own, before anything is sent; a number is a number and a name a string,
whatever else would happen to compare with one.
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
"""From here on a timeout is none: some thirty years, and the largest number that timers take."""
MAX_ANSWER_BYTES = 512 * 2**20
"""Holds the most weights that a service returns by default (64 MiB), even written as JSON, with the output beside them."""
MAX_PORT = 65535
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_API_KEY = re.compile(r"[\x21-\x7e]+")


@dataclasses.dataclass(frozen=True, slots=True)
class ClientOptions:
    """`timeout_s` None waits for ever; `max_answer_bytes` holds for an answer that is a 200. Raises InvalidInput."""

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
    """None for what is as good as for ever; raises InvalidInput for what is no time to come."""
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
    """Raises InvalidInput for anything but a whole number from 1 on; NumPy's will do."""
    try:
        is_count = not isinstance(count, bool) and operator.index(count) >= 1  # type: ignore[arg-type]  # a TypeError
    except TypeError:
        is_count = False
    if not is_count:
        raise InvalidInput(f"{name} must be a whole number and at least 1")


def check_transport(transport: object) -> None:
    """The two kinds of transport are easily taken for each other."""
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
