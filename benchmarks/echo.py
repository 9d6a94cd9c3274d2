"""Echo: a bare ASGI application that answers with as many bytes as asked, which under uvicorn is the cost of HTTP itself."""

from __future__ import annotations

from typing import Any

# Asks for an answer of so many bytes.
SIZE_HEADER = "X-Answer-Bytes"
_NAME = SIZE_HEADER.lower().encode()


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Read the body and answer with zeros; without the header, with none."""
    parts, more = [], True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    b"".join(parts)
    size = next((int(value) for name, value in scope["headers"] if name == _NAME), 0)
    headers = [(b"content-type", b"application/octet-stream"), (b"content-length", str(size).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": bytes(size)})
