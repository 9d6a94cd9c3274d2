"""ASGI's types and the few things every room behind the door reads from a scope.

Law: header names are lower-case bytes as the server hands them over; nothing here trusts a value.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

# In the scope of a request that the transport refuses: the ServiceError that is its answer.
REFUSED = "attention.refused"


class ClientGone(Exception):
    """The connection closed before the request was answered."""


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header of that name, or None."""
    return next((value for key, value in scope["headers"] if key == name), None)


def headers(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key == name]
