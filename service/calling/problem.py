"""Problems: an answer that is a refusal, as the very class of `errors.py` that the service raised.

Laws: the `code` decides the class, and where this client does not know it (or a proxy answered instead of the service) the status
decides the branch, so that `except Refused` also catches what a newer service invents; an error of a library is never
what the caller sees.
"""

from __future__ import annotations

import email.utils
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Self

import orjson

from service import errors
from service.errors import MethodNotAllowed, ServiceError

MAX_PROBLEM_BYTES = 2**16
_OK = 200


class Reply(NamedTuple):
    """A complete answer; the names of `headers` are in lower case."""

    status: int
    headers: Mapping[str, str]
    content: bytes
    request_id: str


class ClientError(ServiceError):
    """What only the caller's side can notice."""

    code = "client_error"

    def of(self, reply: Reply) -> Self:
        self.status, self.request_id = reply.status, reply.request_id
        return self


class ConnectionFailed(ClientError):
    """No answer: refused, cut off, no such host, or a proxy that could not reach the service (`status` 502)."""

    code = "connection_failed"


class BadAnswer(ClientError):
    """An answer, but not one of this service, or a damaged one."""

    code = "bad_answer"


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
        return _made(_branch(reply.status), f"{code}: {detail}")
    return _made(kind, detail, param if isinstance(param, str) else None)


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
    return _made(kind, f"answered {reply.status} with something that is no answer of this service")


def _branch(status: int) -> type[ServiceError]:
    exact = {429: errors.Refused, 502: ConnectionFailed, 503: errors.Refused, 504: errors.DeadlineExceeded}
    if status in exact:
        return exact[status]
    if 400 <= status < 500:  # noqa: PLR2004
        return errors.Rejected
    return errors.Failed if status >= 500 else BadAnswer  # noqa: PLR2004


def _kinds(kind: type[ServiceError]) -> Iterator[type[ServiceError]]:
    """The tree of `errors.py`, and nothing that others hang below it."""
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__:
            yield child
            yield from _kinds(child)


def _made(kind: type[ServiceError], message: str, param: str | None = None) -> ServiceError:
    """An instance by the root's way alone: what the leaves ask for besides is known to the side that raises them."""
    error = kind.__new__(kind, message)
    ServiceError.__init__(error, message, param=param)
    return error
