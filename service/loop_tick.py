"""LoopTick: work that many events ask for and that is done once, at the end of the event loop's turn.

Laws: what was asked for is done before anything that is begun after it; without a loop it is done at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class LoopTick:
    """`work` is called once for all the `ask`s of one turn; it raises nothing."""

    __slots__ = ("_loop", "_work")

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._loop: asyncio.AbstractEventLoop | None = None  # the one that will call

    def ask(self) -> None:
        # A loop that was closed never called. Which one runs is asked once a turn: for that Python 3.11 calls the kernel.
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
