"""Problems: an answer that is a refusal, as the very class of `errors.py` that the service raised.

Laws: the `code` decides the class, and where this client does not know it (or a proxy answered instead of the service) the status
decides the branch, so that `except Refused` also catches what a newer service invents; an error of a library is never
what the caller sees.
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
    """A complete answer; the names of `headers` are in lower case."""

    status: int
    headers: Mapping[str, str]
    content: bytes
    request_id: str


def check(reply: Reply) -> Reply:
    """The reply if it is a 200; else raises the error that it tells."""
    if reply.status == _OK:
        return reply
    error = _told(reply) or _guessed(reply)
    error.status, error.request_id = reply.status, reply.request_id
    error.retry_after_s = retry_after_s(reply.headers)
    if isinstance(error, MethodNotAllowed):
        error.allow = reply.headers.get("allow", "")
    raise error


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait, from either form of Retry-After (RFC 9110, 10.2.3); None where it is absent or nonsense."""
    value = headers.get("retry-after", "").strip()
    if value.isascii() and value.isdigit():
        return float(value[:9])
    until = _http_date(value)
    if until is None:
        return None
    # The other end's own clock, if it tells it: ours may differ by more than the wait.
    return max(0.0, until - (_http_date(headers.get("date", "")) or time.time()))


def _http_date(text: str) -> float | None:
    try:
        return email.utils.parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError):
        return None


def _told(reply: Reply) -> ServiceError | None:
    """The error of a problem body (RFC 9457); None where the body is no problem of ours."""
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
    """By the status alone, which is all there is."""
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
    """The service's part of the tree in `errors.py`, without classes that a caller derives from it."""
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__ and child is not ClientError:
            yield child
            yield from _kinds(child)
