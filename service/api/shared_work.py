"""Shared work: what many requests ask for at once is computed once for all of them.

Must not know: HTTP, what is computed.
Invariants: a failure goes to the requests that wait for it and is not kept; a request that is cancelled takes nothing from the
others; one value is kept, never more. What is long to compute runs in one thread for all, so that the event loop shares the
interpreter with one thread and not with as many as there are requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from typing import Generic, TypeVar

from service.batching.clock import Clock

T = TypeVar("T")

PAUSE_S = 0.1


class Memo(Generic[T]):
    """The value for the key that was asked for last; made in `thread`."""

    def __init__(self, thread: Executor) -> None:
        self._thread = thread
        self._key: object = None
        self._value: asyncio.Future[T] | None = None

    async def get(self, key: object, make: Callable[[], T]) -> T:
        """What `make` returns for this key. It runs once a key; after a failure the next `get` runs it again."""
        value = self._value
        if value is None or self._key != key or (value.done() and value.exception() is not None):
            self._key = key
            self._value = value = asyncio.get_running_loop().run_in_executor(self._thread, make)
        return await asyncio.shield(value)


class Throttle(Generic[T]):
    """Runs `make` for all that ask meanwhile: never twice at once, and with a pause of `PAUSE_S` between two runs.

    A request gets the result of a run that begins after it asked, so it sees everything that happened before.
    """

    def __init__(self, make: Callable[[], Awaitable[T]], clock: Clock) -> None:
        self._make = make
        self._clock = clock
        self._free_at = clock.now()
        self._lock = asyncio.Lock()
        self._next: asyncio.Task[T] | None = None  # the run that has not begun

    async def get(self) -> T:
        """Raises what `make` raises."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._run())
        return await asyncio.shield(self._next)

    async def _run(self) -> T:
        async with self._lock:
            if self._clock.now() < self._free_at:
                is_free = asyncio.Event()
                self._clock.call_at(self._free_at, is_free.set)
                await is_free.wait()
            self._next = None
            try:
                return await self._make()
            finally:
                self._free_at = self._clock.now() + PAUSE_S
