"""InFlight: tracks the calls that wait for an answer, limits their time and ends them on close.

Invariants: the limit of a call covers all its attempts and waits. `end` ends every call with ConnectionFailed and returns when
none is left, so no call uses the pool while it is closed. A call on another event loop than the first call's is refused, because
the pool's sockets wake only the loop that opened them.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator

from attention_client.errors import ConnectionFailed


class InFlight:
    """Any thread may call it; on another event loop than the first one it raises RuntimeError."""

    def __init__(self) -> None:
        self._claiming = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._limits: set[asyncio.Timeout] = set()
        self._one_left = asyncio.Event()
        self._is_ended = False

    @contextlib.asynccontextmanager
    async def within(self, timeout_s: float | None) -> AsyncIterator[None]:
        """Limit the block to `timeout_s`.

        Raises TimeoutError, ConnectionFailed if `end` runs meanwhile, RuntimeError if it ran before.
        """
        self._claim()
        if self._is_ended:
            raise RuntimeError("the client is closed")
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                self._limits.add(limit)
                yield
        except TimeoutError:
            if self._is_ended:
                raise ConnectionFailed("the client was closed before the answer came") from None
            raise
        finally:
            self._limits.discard(limit)
            self._one_left.set()

    async def end(self) -> None:
        """End all calls and wait until none is left; a second call does nothing."""
        if self._is_ended and not self._limits:
            return
        self._claim()
        self._is_ended = True
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(0)
        while self._limits:
            self._one_left.clear()
            await self._one_left.wait()

    def _claim(self) -> None:
        loop = asyncio.get_running_loop()
        with self._claiming:
            self._loop = self._loop or loop
        if self._loop is not loop:
            raise RuntimeError("a client belongs to the event loop that it was first used in; make one for each loop")
