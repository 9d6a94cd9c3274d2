"""InFlight: the calls that wait for their answers, on the one event loop that they belong to.

Laws: a call is within its limit with all its attempts and waits; ending ends each of them as ConnectionFailed and returns when
none is left, so that the pool can be closed under nobody; another loop than that of the first call is refused, because
its sockets would wake nobody there.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator

from attention_client.errors import ConnectionFailed


class InFlight:
    """Any thread may ask; all but those of the first loop are told so."""

    def __init__(self) -> None:
        self._claiming = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._limits: set[asyncio.Timeout] = set()
        self._one_left = asyncio.Event()
        self._is_ended = False

    @contextlib.asynccontextmanager
    async def within(self, timeout_s: float | None) -> AsyncIterator[None]:
        """Raises TimeoutError, ConnectionFailed when all are ended meanwhile, RuntimeError when they were before."""
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
        """Twice is fine."""
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
