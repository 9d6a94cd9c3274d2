"""Shared work: computes a result once for all requests that ask for it at the same time.

Invariants: a failure goes to the requests that wait for it and is not kept. A cancelled request does not affect the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from typing import Generic, TypeVar

from service.loop_time import Clock

T = TypeVar("T")

THROTTLE_S = 0.1


class Memo(Generic[T]):
    """Caches one value: the one for the key of the last request.

    It is computed in `thread`, one for all requests, so that at most one such computation competes for the interpreter.
    """

    def __init__(self, thread: Executor) -> None:
        self._thread = thread
        self._key: object = None
        self._value: asyncio.Future[T] | None = None

    async def get(self, key: object, make: Callable[[], T]) -> T:
        """Return the result of `make`, which runs once while the key stays the same, and again after a failure."""
        value = self._value
        if value is None or self._key != key or (value.done() and (value.cancelled() or value.exception() is not None)):
            self._value = value = asyncio.get_running_loop().run_in_executor(self._thread, make)
            self._key = key  # set last: the line above raises if the thread has ended
        return await asyncio.shield(value)


class Throttle(Generic[T]):
    """Runs `make` once for all waiting requests: never twice at once, and with a pause of `THROTTLE_S` between two runs.

    A request gets the result of a run that begins after it asked, so the result covers everything that happened before.
    """

    def __init__(self, make: Callable[[], Awaitable[T]], clock: Clock) -> None:
        self._make = make
        self._clock = clock
        self._free_at = clock.now()
        self._lock = asyncio.Lock()
        self._next: asyncio.Task[T] | None = None  # the run that has not begun yet

    async def get(self) -> T:
        """Return the result of the next run; raise what `make` raises."""
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
                self._free_at = self._clock.now() + THROTTLE_S
