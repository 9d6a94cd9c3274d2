"""ASGI's types and the few things every room behind the door reads from a scope.

Laws: header names are lower-case bytes as the server hands them over; the blanks around a value are no part of it
(RFC 9110, section 5.5), which the server leaves behind it; nothing here trusts a value.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

# In the scope of a request that the transport refuses: the ServiceError that is its answer.
REFUSED = "attention.refused"
# In the scope of our own transport's requests: what it says of who asks (`caller.py`).
CALLER = "attention.caller"
# Its header fields by their names, as `headers` gives them.
FIELDS = "attention.fields"
# There where the process has as many connections as it may keep: this one is for what must be answered all the same.
CROWDED = "attention.crowded"


BLANKS = b" \t"


class ClientGone(Exception):
    """The connection closed before the request was answered."""


_NONE: tuple[bytes, ...] = ()


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header of that name, or None."""
    found = headers(scope, name)
    return found[0] if found else None


def headers(scope: Scope, name: bytes) -> Sequence[bytes]:
    """All headers of that name, in their order."""
    fields = scope.get(FIELDS)
    if fields is None:
        fields = scope[FIELDS] = {}
        for key, value in scope["headers"]:
            fields[key] = (*fields.get(key, _NONE), value.strip(BLANKS))
    found: Sequence[bytes] = fields.get(name, _NONE)
    return found
