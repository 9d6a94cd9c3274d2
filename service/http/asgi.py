"""ASGI's types and the few things every room behind the door reads from a scope."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from service.http.header_fields import HeaderFields

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

# In the scope of a request that the transport refuses: the ServiceError that is its answer.
REFUSED = "attention.refused"
# In the scope of our own transport's requests: what it says of who asks (`caller.py`).
CALLER = "attention.caller"
# Its header fields, as `fields_of` gives them.
FIELDS = "attention.fields"
# There where the process has as many connections as it may keep: this one is for what must be answered all the same.
CROWDED = "attention.crowded"
# In the scope of a request with a key: the digest of that key, by which callers are told apart.
KEY_DIGEST = "attention.key_digest"


class ClientGone(Exception):
    """The connection closed before the request was answered."""


def fields_of(scope: Scope) -> HeaderFields:
    """The header fields, by lower-case names."""
    found: HeaderFields | None = scope.get(FIELDS)
    if found is None:
        found = scope[FIELDS] = HeaderFields(scope["headers"])
    return found
