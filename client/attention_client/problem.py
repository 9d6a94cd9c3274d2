"""Problems: converts an error response to the class of `errors.py` that the service raised.

Invariants: the `code` decides the class. If the client does not know the code, or a proxy answered instead of the service, the
status decides the base class, so `except Refused` also catches the new errors of a newer service. A library's error never
reaches the caller.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

from attention_client import errors
from attention_client.errors import BadAnswer, ClientError, ConnectionFailed, MethodNotAllowed, ServiceError

OK = 200
_KINDS = {
    kind.code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type)
    and issubclass(kind, ServiceError)
    and kind is not ServiceError
    and not issubclass(kind, ClientError)
}
_BY_STATUS = {429: errors.Refused, 502: ConnectionFailed, 503: errors.Refused, 504: errors.DeadlineExceeded}
_BY_HUNDRED = {4: errors.Rejected, 5: errors.Failed}


class Reply(NamedTuple):
    """A complete HTTP response; the names of `headers` are in lower case."""

    status: int
    headers: Mapping[str, str]
    content: bytes
    request_id: str


def check(reply: Reply) -> Reply:
    """Return the reply if it is a 200; otherwise raise the error that it reports."""
    if reply.status == OK:
        return reply
    error = _error(reply)
    error.status, error.request_id = reply.status, reply.request_id
    error.retry_after_s = retry_after_s(reply.headers)
    if isinstance(error, MethodNotAllowed):
        error.allow = reply.headers.get("allow", "")
    raise error


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of Retry-After, or None if it is absent or no number; the service never sends a date."""
    value = headers.get("retry-after", "").strip()
    return float(value[:9]) if value.isascii() and value.isdigit() else None


def _error(reply: Reply) -> ServiceError:
    """Return the error of a problem body (RFC 9457), or one by the status if the body lacks the service's fields."""
    branch = _BY_STATUS.get(reply.status) or _BY_HUNDRED.get(reply.status // 100, BadAnswer)
    try:
        match json.loads(reply.content):
            case {"code": str(code), "detail": str(detail), **others}:
                kind, param = _KINDS.get(code), others.get("param")
                if kind is None:
                    return branch(f"{code}: {detail}")
                return kind(detail, param=param if isinstance(param, str) else None)
    except (ValueError, RecursionError):
        pass
    return branch(f"answered {reply.status} with something that is no answer of this service; perhaps a proxy's")
