"""JsonParser: parses large JSON bodies in a helper process, so that they do not block the event loop.

Invariants: each worker has one helper process, started at its first use. The process inherits only its end of a socket pair and
parses one body at a time. If it dies, another replaces it and parses the body once more. If the caller of `parse` is cancelled,
a body that waits is dropped. An exchange with the process that has begun is still completed, so that the socket is ready for the
next body: a new process would take 0.3 s to start.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from service.errors import EngineFailed
from service.wire.json_process import ANSWER, REQUEST, unpack

COMMAND = (sys.executable, "-m", "service.wire.json_process")


class JsonParser:
    """The worker's link to its helper process: one thread, which waits for the process."""

    def __init__(self, max_depth: int, max_numbers: int, command: Sequence[str] = COMMAND) -> None:
        self._limits = max_depth, min(max_numbers, 2**32 - 1)  # no body has more
        self._command = command
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="parsing")
        self._started: tuple[socket.socket, subprocess.Popen[bytes]] | None = None
        self._is_closed = False

    async def parse(
        self, body: bytes | bytearray, on_leave: Callable[[asyncio.Future[Any]], object] = lambda _: None
    ) -> dict[str, Any]:
        """Return the object in `body`; raise the errors of `json_document.parse`, or EngineFailed if the process died twice.

        `on_leave` is called with the exchange if the caller is cancelled while the exchange, and so `body`, is in use.
        """
        work = self._thread.submit(self._exchange, body)
        exchange = asyncio.wrap_future(work)
        try:
            return unpack(*await asyncio.shield(exchange))
        except asyncio.CancelledError:
            if not work.cancel():
                # Look at its error, or the loop logs a traceback.
                exchange.add_done_callback(lambda done: done.cancelled() or done.exception())
                on_leave(exchange)
            raise
        finally:
            # Else a cycle keeps a body that failed: error -> traceback -> frame -> exchange -> error.
            del work, exchange

    def close(self) -> None:
        """End the process; call this when no request uses the parser any more."""
        self._is_closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._end()

    def _exchange(self, body: bytes | bytearray) -> tuple[bytes, memoryview]:
        for _ in range(2):
            try:
                return self._ask(body)
            except (OSError, EOFError, struct.error):  # the process has ended
                self._end()
            if self._is_closed:
                break
        raise EngineFailed("the helper process that parses JSON ended twice on this body")

    def _ask(self, body: bytes | bytearray) -> tuple[bytes, memoryview]:
        if self._started is None:
            ours, theirs = socket.socketpair()
            with theirs:
                nothing = subprocess.DEVNULL
                process = subprocess.Popen(self._command, stdin=theirs.fileno(), stdout=nothing, stderr=nothing)  # noqa: S603
            self._started = ours, process
        line, _ = self._started
        line.sendall(REQUEST.pack(len(body), *self._limits))
        line.sendall(body)
        with line.makefile("rb") as answer:
            num_text_bytes, num_blob_bytes = ANSWER.unpack(answer.read(ANSWER.size))
            text, blobs = answer.read(num_text_bytes), bytearray(num_blob_bytes)
            if len(text) + answer.readinto(blobs) < num_text_bytes + num_blob_bytes:
                raise EOFError
        return text, memoryview(blobs)

    def _end(self) -> None:
        started, self._started = self._started, None
        if started is not None:
            line, process = started
            process.kill()
            process.wait()
            line.close()
