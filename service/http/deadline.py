"""Deadline: calls back at a time that every request of a connection may move, and rarely costs a timer.

Invariants: The loop has at most one timer for a deadline; a timer that fires too early is set again. `passed` is called once for
each `set` that is neither cleared nor set again in time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable


class Deadline:
    def __init__(self, loop: asyncio.AbstractEventLoop, passed: Callable[[], None]) -> None:
        self._loop = loop
        self._passed = passed
        self._due = math.inf
        self._rings_at = math.inf
        self._timer: asyncio.TimerHandle | None = None

    def set(self, seconds: float) -> None:
        """Move the deadline to `seconds` from now, whatever it was before."""
        self._due = self._loop.time() + seconds
        if self._due < self._rings_at:
            self._arm()

    def clear(self) -> None:
        self._due = math.inf

    def stop(self) -> None:
        """Cancel the timer, at the end of the connection."""
        self._due = self._rings_at = math.inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._rings_at = self._due
        self._timer = self._loop.call_at(self._due, self._ring)

    def _ring(self) -> None:
        self._timer, self._rings_at = None, math.inf
        if self._due == math.inf:
            return
        if self._loop.time() < self._due:
            self._arm()
            return
        self._due = math.inf
        self._passed()
