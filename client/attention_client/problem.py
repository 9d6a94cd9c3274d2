"""Problems: converts an error response to the class of `errors.py` that the service raised.

Invariants: the `code` decides the class. If the client does not know the code, or a proxy answered instead of the service, the
status decides the base class, so `except Refused` also catches the new errors of a newer service. A library's error never
reaches the caller.
"""

from __future__ import annotations

import email.utils
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import orjson

from attention_client import errors
from attention_client.errors import BadAnswer, ClientError, ConnectionFailed, MethodNotAllowed, ServiceError

MAX_PROBLEM_BYTES = 2**16
_OK = 200


class Reply(NamedTuple):
    """A complete HTTP response; the names of `headers` are in lower case."""

    status: int
    headers: Mapping[str, str]
    content: bytes
    request_id: str


def check(reply: Reply) -> Reply:
    """Return the reply if it is a 200; otherwise raise the error that it reports."""
    if reply.status == _OK:
        return reply
    error = _told(reply) or _guessed(reply)
    error.status, error.request_id = reply.status, reply.request_id
    error.retry_after_s = retry_after_s(reply.headers)
    if isinstance(error, MethodNotAllowed):
        error.allow = reply.headers.get("allow", "")
    raise error


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return seconds to wait, from either form of Retry-After (RFC 9110, 10.2.3); None if it is absent or malformed."""
    value = headers.get("retry-after", "").strip()
    if value.isascii() and value.isdigit():
        return float(value[:9])
    until = _http_date(value)
    if until is None:
        return None
    # Use the service's clock from the Date header if present: the local one may differ by more than the wait.
    return max(0.0, until - (_http_date(headers.get("date", "")) or time.time()))


def _http_date(text: str) -> float | None:
    try:
        return email.utils.parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError):
        return None


def _told(reply: Reply) -> ServiceError | None:
    """Return the error of a problem body (RFC 9457), or None if the body lacks the service's fields."""
    fields = _fields(reply)
    code, detail, param = fields.get("code"), fields.get("detail"), fields.get("param")
    if not isinstance(code, str) or not isinstance(detail, str):
        return None
    kind = next((kind for kind in _kinds(ServiceError) if kind.code == code), None)
    if kind is None:
        return _branch(reply.status)(f"{code}: {detail}")
    return kind(detail, param=param if isinstance(param, str) else None)


def _fields(reply: Reply) -> dict[str, Any]:
    if len(reply.content) > MAX_PROBLEM_BYTES:
        return {}
    try:
        found = orjson.loads(reply.content)
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _guessed(reply: Reply) -> ServiceError:
    """Return an error by the status alone, because the body has no usable code."""
    kind = _branch(reply.status)
    if kind is ConnectionFailed:
        return kind("a proxy answered 502: it could not reach the service")
    return kind(f"answered {reply.status} with something that is no answer of this service")


def _branch(status: int) -> type[ServiceError]:
    exact = {429: errors.Refused, 502: ConnectionFailed, 503: errors.Refused, 504: errors.DeadlineExceeded}
    if status in exact:
        return exact[status]
    if 400 <= status < 500:  # noqa: PLR2004
        return errors.Rejected
    return errors.Failed if status >= 500 else BadAnswer  # noqa: PLR2004


def _kinds(kind: type[ServiceError]) -> Iterator[type[ServiceError]]:
    """Yield the service's classes of the tree in `errors.py`, without subclasses that a caller defines."""
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__ and child is not ClientError:
            yield child
            yield from _kinds(child)
