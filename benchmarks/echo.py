"""Echo: a bare ASGI application under uvicorn that answers with as many bytes as asked, which is the cost of HTTP itself.

python -m benchmarks.echo PORT PROCESSES
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import uvicorn

# Asks for an answer of so many bytes.
SIZE_HEADER = "X-Answer-Bytes"
_NAME = SIZE_HEADER.lower().encode()


@functools.cache
def _answer(size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    headers = [(b"content-type", b"application/octet-stream"), (b"content-length", str(size).encode())]
    start = {"type": "http.response.start", "status": 200, "headers": headers}
    return start, {"type": "http.response.body", "body": bytes(size)}


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Read the body and answer with zeros; without the header, with none."""
    parts = []
    while (message := await receive())["type"] == "http.request":
        parts.append(message["body"])
        if not message["more_body"]:
            break
    b"".join(parts)
    for message in _answer(next((int(value) for name, value in scope["headers"] if name == _NAME), 0)):
        await send(message)


if __name__ == "__main__":
    port, workers = map(int, sys.argv[1:])
    uvicorn.run(
        "benchmarks.echo:application",
        port=port,
        workers=workers,
        loop="uvloop",
        http="httptools",
        lifespan="off",
        access_log=False,
        log_level="warning",
    )
