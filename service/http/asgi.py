"""ASGI vocabulary: types, and the scope keys that the transport and the application share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

# Set if the transport refuses the request: the ServiceError to answer with.
REFUSED = "attention.refused"
# The request's Cycle, which reports the arrival of its body and a disconnect.
CYCLE = "attention.cycle"
# The header fields, which `request_parser.fields_of` returns.
HEADER_FIELDS = "attention.fields"
# Set above max_connections: only health and metrics are served.
CROWDED = "attention.crowded"
# Set if a key admits the request: the key's digest, which identifies the caller.
KEY_DIGEST = "attention.key_digest"
# Set if the request has a valid key, even one whose role is refused here: the key's name, for the log.
KEY_NAME = "attention.key_name"


class ClientGone(Exception):
    """The connection closed before the request was answered."""
