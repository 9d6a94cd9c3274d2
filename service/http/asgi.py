"""ASGI vocabulary: types, and the scope keys that the transport and the application share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

# Set if the transport refuses the request: the ServiceError to answer with.
REFUSED = "attention.refused"
# The request's RequestCycle; absent under servers that know only ASGI (`receive_cycle.py`).
CYCLE = "attention.cycle"
# The header fields, which `request_parser.fields_of` returns.
FIELDS = "attention.fields"
# Set above max_connections: only health and metrics are served.
CROWDED = "attention.crowded"
# Set if a key admits the request: the key's digest, which identifies the caller.
KEY_DIGEST = "attention.key_digest"
# Set if the request has a valid key, even one whose role is refused here: the key's name, for the log.
KEY_NAME = "attention.key_name"


class ClientGone(Exception):
    """The connection closed before the request was answered."""


class RequestCycle(Protocol):
    """What the transport offers a request beside ASGI: the arrival of its body and a disconnect, without a task or a timer."""

    def take_body(self) -> list[bytes | bytearray | memoryview] | None:
        """Return the whole body in parts if it is complete and unread, else None; then `receive` gives only the disconnect."""

    def on_bytes(self, callback: Callable[[int], object] | None) -> None:
        """Call `callback` with the number of body bytes so far, and with that of each later part; None cancels this.

        If it raises a ServiceError, `receive` raises it, or this method does.
        """

    def on_disconnect(self, callback: Callable[[], object] | None) -> None:
        """Call `callback` when the client disconnects before its complete answer, at once if it already has; None cancels it."""

    async def receive(self) -> Message:
        """Return the next message, as ASGI's `receive`."""
