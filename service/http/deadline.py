"""Deadline: calls back once if it is not moved in time; it is moved often and needs one timer."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable


class Deadline:
    """Calls `passed` once for each `set` that is neither cleared nor set again in time.

    It has at most one timer on the loop, set again if it fires too early, because every request of a connection moves it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, passed: Callable[[], None]) -> None:
        self._loop = loop
        self._passed = passed
        self._due = math.inf
        self._fires_at = math.inf
        self._timer: asyncio.TimerHandle | None = None

    def set(self, seconds: float) -> None:
        """Move the deadline to `seconds` from now."""
        self._due = self._loop.time() + seconds
        if self._due < self._fires_at:
            self._arm()

    def clear(self) -> None:
        self._due = math.inf

    def stop(self) -> None:
        """Cancel the timer, at the end of the connection."""
        self._due = self._fires_at = math.inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._fires_at = self._due
        self._timer = self._loop.call_at(self._due, self._fire)

    def _fire(self) -> None:
        self._timer, self._fires_at = None, math.inf
        if self._loop.time() >= self._due:
            self._due = math.inf
            self._passed()
        elif self._due < math.inf:
            self._arm()
