"""Pace: long work on the event loop is done in turns, and other tasks run between them; in the decoding thread the
interpreter is handed over instead (`decoding_thread.py`).

Laws: work that fits into one turn never yields, so a small body is decoded in one go; of all the paced work of a loop
only one piece runs between two looks at the sockets, however many large bodies arrive at once; a piece that waits for
its turn can be cancelled.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
import weakref
from collections.abc import Callable

TURN_S = 0.002
"""The contract allows 20 ms without a look at the sockets; a turn plus one slice of work stays far below it."""

hand_over: contextvars.ContextVar[Callable[[], None] | None] = contextvars.ContextVar("hand_over", default=None)
"""How work off the loop gives way: set by the thread that runs it, unset on the loop."""

_turns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = weakref.WeakKeyDictionary()


class Pace:
    """Watches how long the work of one request has held the loop; `give_way` is called after each slice of it."""

    __slots__ = ("_clock", "_hand_over", "_turn_ends_s")

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._hand_over = hand_over.get()
        self._turn_ends_s = clock() + TURN_S

    async def give_way(self) -> None:
        """Let others run if the turn is over, else return at once; off the loop always, since no turn is taken there."""
        if self._hand_over is not None:
            self._hand_over()
            return
        if self._clock() < self._turn_ends_s:
            return
        # A bare sleep(0) would let ten large bodies run one after the other in a single round of the loop.
        # The lock is first come, first served: one of them per round, in rotation.
        async with _turns.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            await asyncio.sleep(0)
        self._turn_ends_s = self._clock() + TURN_S
