"""The cost of HTTP itself: a bare ASGI program under uvicorn that reads a body and answers with as many bytes as it is told.

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
    """Answers as many zeros as the header says; without it, none."""
    if scope["type"] != "http":
        return
    parts = []
    while (message := await receive())["type"] == "http.request":
        parts.append(message["body"])
        if not message["more_body"]:
            break
    b"".join(parts)
    size = next((int(value) for name, value in scope["headers"] if name == _NAME), 0)
    for told in _answer(size):
        await send(told)


if __name__ == "__main__":
    uvicorn.run(
        "benchmarks.echo:application",
        host="127.0.0.1",
        port=int(sys.argv[1]),
        workers=int(sys.argv[2]),
        loop="uvloop",
        http="httptools",
        lifespan="off",
        access_log=False,
        log_level="warning",
    )
