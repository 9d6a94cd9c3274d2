"""JsonParser: parses large JSON bodies in a helper process, so that they do not block the event loop.

Invariants: each worker has one helper process, started at its first use. The process inherits only its end of a socket pair and
parses one body at a time. If it dies, another replaces it and parses the body once more. If the caller of `parse` is cancelled,
a body that waits is dropped. An exchange with the process that has begun is still completed, so that the socket is ready for the
next body: a new process would take 0.3 s to start.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from service.errors import EngineFailed
from service.wire.json_process import ANSWER, REQUEST, unpack

COMMAND = (sys.executable, "-m", "service.wire.json_process")


class JsonParser:
    """The worker's link to its helper process; one for each worker, created inside its event loop."""

    def __init__(self, max_depth: int, max_numbers: int, command: Sequence[str] = COMMAND) -> None:
        self._limits = max_depth, min(max_numbers, 2**32 - 1)  # no body has more
        self._command = command
        self._lock = asyncio.Lock()
        self._started: tuple[socket.socket, subprocess.Popen[bytes]] | None = None
        self._exchange: asyncio.Task[tuple[bytes, memoryview]] | None = None

    async def parse(
        self, body: bytes | bytearray, on_leave: Callable[[asyncio.Future[Any]], object] = lambda _: None
    ) -> dict[str, Any]:
        """Return the object in `body`; raise the errors of `json_document.parse`, or EngineFailed if the process died twice.

        `on_leave` is called with the exchange if the caller is cancelled while the exchange, and so `body`, is in use.
        """
        await self._lock.acquire()
        self._exchange = exchange = asyncio.create_task(self._parse_there(body))
        exchange.add_done_callback(self._ended)
        try:
            return unpack(*await asyncio.shield(exchange))
        except asyncio.CancelledError:
            on_leave(exchange)
            raise
        finally:
            del exchange  # else a cycle keeps a body that failed: error -> traceback -> frame -> exchange -> error

    def _ended(self, _: object) -> None:
        self._exchange = None  # else the last answer would stay until the next body
        self._lock.release()

    def close(self) -> None:
        """End the process; call this when no request uses the parser any more."""
        if self._exchange is not None:
            self._exchange.cancel()
        self._end()

    async def _parse_there(self, body: bytes | bytearray) -> tuple[bytes, memoryview]:
        for _ in range(2):
            try:
                return await self._ask(body)
            except (OSError, EOFError):
                self._end()
        raise EngineFailed("the helper process that parses JSON ended twice on this body")

    async def _ask(self, body: bytes | bytearray) -> tuple[bytes, memoryview]:
        loop = asyncio.get_running_loop()
        if self._started is None:
            self._started = await loop.run_in_executor(None, self._start)
        line, _ = self._started
        await loop.sock_sendall(line, REQUEST.pack(len(body), *self._limits))
        await loop.sock_sendall(line, body)
        num_text_bytes, num_blob_bytes = ANSWER.unpack(await _received(line, ANSWER.size))
        text = bytes(await _received(line, num_text_bytes))
        return text, memoryview(await _received(line, num_blob_bytes))

    def _start(self) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            nothing = subprocess.DEVNULL
            process = subprocess.Popen(self._command, stdin=theirs.fileno(), stdout=nothing, stderr=nothing)  # noqa: S603
        return ours, process

    def _end(self) -> None:
        if self._started is not None:
            line, process = self._started
            line.close()
            process.kill()
            process.wait()
        self._started = None


async def _received(line: socket.socket, num_bytes: int) -> bytearray:
    """Return exactly `num_bytes` bytes; raise EOFError if the process has ended."""
    loop, data = asyncio.get_running_loop(), bytearray(num_bytes)
    view, got = memoryview(data), 0
    while got < num_bytes:
        count = await loop.sock_recv_into(line, view[got:])
        if not count:
            raise EOFError
        got += count
    return data
