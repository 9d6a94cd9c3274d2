"""LoopTick: runs work once at the end of an event-loop tick, for all events of the tick that ask for it.

Invariants: The work runs before anything that is scheduled after the request for it. Without a loop it runs at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class LoopTick:
    """Calls `work` once for all `ask` calls of one tick; `work` raises nothing."""

    __slots__ = ("_loop", "_work")

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._loop: asyncio.AbstractEventLoop | None = None  # the loop that will call `_end`

    def ask(self) -> None:
        # A closed loop never called `_end`. Look up the running loop once a tick: Python 3.11 makes a system call for it.
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
