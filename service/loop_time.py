"""Loop time: LoopClock calls back at a time on the event loop; LoopTick runs work once at the end of a tick.

Invariants of a clock: time is in monotonic seconds. A call never comes early; it is late by at most 2 ms and the loop's own lag.
Cancelling a call twice, or after it ran, is harmless. Invariants of a tick: all events of the tick that ask for the work share
one run. It runs before anything that is scheduled after the request for it. Without a loop it runs at once.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Protocol


class Handle(Protocol):
    """A scheduled call that can be cancelled."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """Monotonic seconds, and calls at a later time on the same event loop."""

    def now(self) -> float: ...
    def call_at(self, when: float, callback: Callable[[], object]) -> Handle: ...


class LoopClock:
    """The clock of the event loop that is running when it is used.

    `now` is `time.monotonic`, not `loop.time`: uvloop's is a cached count of whole milliseconds, too coarse to report a batch's
    compute time.
    """

    __slots__ = ()

    now = staticmethod(time.monotonic)

    def call_at(self, when: float, callback: Callable[[], object]) -> Handle:
        """Call `callback` on the loop once `now() >= when`; `when` is finite."""
        # Whole milliseconds, because uvloop spins on 0.4 ms as on 0, and one more, because its calls are early by up to one.
        delay_ms = math.ceil((when - time.monotonic()) * 1000) + 1
        return asyncio.get_running_loop().call_later(max(delay_ms, 0) / 1000, callback)


class LoopTick:
    """Calls `work` once for all `ask` calls of one tick; `work` raises nothing."""

    __slots__ = ("_loop", "_work")

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._loop: asyncio.AbstractEventLoop | None = None  # the loop that will call `_end`

    def ask(self) -> None:
        # Look the loop up once a tick: that costs Python 3.11 a system call. A loop that is closed will not call `_end` any more.
        if self._loop is not None and not self._loop.is_closed():
            return
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            self._work()
            return
        self._loop.call_soon(self._end)

    def _end(self) -> None:
        self._loop = None
        self._work()
