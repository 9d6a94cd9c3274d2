"""Echo: a bare ASGI application that answers with as many bytes as asked, which under uvicorn is the cost of HTTP itself."""

from __future__ import annotations

import functools
from typing import Any

# Asks for an answer of so many bytes.
SIZE_HEADER = "X-Answer-Bytes"
_NAME = SIZE_HEADER.lower().encode()
# Zeros of a size are made once: to make them again would cost more than to send them.
_zeros = functools.cache(bytes)


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Read the body and answer with zeros; without the header, with none."""
    parts, more = [], True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    b"".join(parts)  # as every server does
    size = next((int(value) for name, value in scope["headers"] if name == _NAME), 0)
    headers = [(b"content-type", b"application/octet-stream"), (b"content-length", str(size).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": _zeros(size)})
