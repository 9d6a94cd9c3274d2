"""ClientOptions: address, timeouts and limits of a client, and the checks of options that a call may set.

Invariant: a value that is not valid raises InvalidInput before anything is sent.
"""

from __future__ import annotations

import dataclasses
import numbers
import re
from typing import Any

import httpx2

from attention_client.errors import InvalidInput

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_FOR_EVER_S = 1e9
# Paths that callers copy together with the address.
_ROUTE = re.compile(
    r"(?i)(?<![:/])/+(v[12](/+(layers|attention|models|health)\b.*)?|docs(/errors)?|explore|openapi\.json|healthz|readyz|metrics)/*$"
)
_API_KEY = re.compile(r"[\x21-\x7e]+")


@dataclasses.dataclass(frozen=True, eq=False)
class ClientOptions:
    """Options of a client, which are also its read-only attributes.

    `timeout_s` limits a call with all its attempts, in seconds; None means no limit, and a call may set its own. A call makes
    at most `attempts` attempts. One whose connection takes and brings no byte for `read_timeout_s` is ended and retried; None
    leaves it to the timeout of the call. `api_key` is sent as a bearer token. An answer of more than `max_answer_bytes` raises
    BadAnswer; the default has room for the most weights that a service returns by default (64 MiB), even as JSON. `transport`
    replaces the network (tests, a proxy, private certificates); both clients take an asynchronous one.
    """

    url: str = dataclasses.field(default="http://127.0.0.1:8000", repr=False)
    _: dataclasses.KW_ONLY
    timeout_s: float | None = 30.0
    max_connections: int = 16
    attempts: int = 5
    read_timeout_s: float | None = None
    api_key: str | None = dataclasses.field(default=None, repr=False)
    max_answer_bytes: int = 512 * 2**20
    transport: httpx2.AsyncBaseTransport | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not _is_address(self.url):
            given = without_password(str(self.url))
            raise InvalidInput(f"url must be like http://127.0.0.1:8000, without a query, not {given!r}")
        if found := _ROUTE.search(self.url):
            address = without_password(self.url[: found.start()])
            raise InvalidInput(f"url: give the address without /{found[0].strip('/')}, like {address}")
        checked_timeout(self.timeout_s)
        checked_timeout(self.read_timeout_s, "read_timeout_s")
        for name in ("max_connections", "attempts", "max_answer_bytes"):
            check_count(getattr(self, name), name)
        if self.api_key is not None and not _is_like(_API_KEY, self.api_key):
            raise InvalidInput("api_key must be printable ASCII without spaces")
        if self.api_key is not None and httpx2.URL(self.url).userinfo:
            raise InvalidInput("api_key and a user name in url exclude each other: both need the header Authorization")
        # A synchronous transport is easily mistaken for an asynchronous one.
        if self.transport is not None and not isinstance(self.transport, httpx2.AsyncBaseTransport):
            raise InvalidInput("transport must be an httpx2.AsyncBaseTransport, for Client too")


def without_password(url: str) -> str:
    """Return the URL for a message, without user name and password: what precedes the last @, as a password may hold a slash."""
    return re.sub(r"(?s)^([\w+.-]*://)?.*@", r"\1", url)


def checked_timeout(timeout_s: Any, name: str = "timeout_s") -> float | None:
    """Return the timeout, None for one of decades. Raises InvalidInput unless it is None or a number above 0."""
    is_number = isinstance(timeout_s, numbers.Real)
    if timeout_s is not None and not (is_number and timeout_s > 0):
        raise InvalidInput(f"{name} must be a number above 0")
    return None if timeout_s is None or timeout_s > _FOR_EVER_S else float(timeout_s)


def checked_request_id(request_id: str | None) -> str | None:
    if request_id is not None and not _is_like(_REQUEST_ID, request_id):
        raise InvalidInput(f"request_id must be {_REQUEST_ID.pattern}")
    return request_id


def check_count(count: object, name: str) -> None:
    """Raise InvalidInput unless it is a whole number of at least 1; integers of NumPy are accepted."""
    if not isinstance(count, numbers.Integral) or int(count) < 1:
        raise InvalidInput(f"{name} must be a whole number and at least 1")


def _is_address(text: object) -> bool:
    try:
        url = httpx2.URL(text if isinstance(text, str) else "")
    except httpx2.InvalidURL:
        return False
    return url.scheme in ("http", "https") and bool(url.host) and not url.query and not url.fragment


def _is_like(pattern: re.Pattern[str], text: object) -> bool:
    return isinstance(text, str) and pattern.fullmatch(text) is not None
