"""The clock: what time it is, and a call at a later time.

Lives here: the Protocol by which the waiting room knows time, and the real clock over the running event loop.
Must not know: jobs, queues, deadlines' meaning.
Laws: time is monotonic seconds; a call never comes early (at most two milliseconds and the loop's own lag late);
cancelling a call twice, or after it came, is harmless.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Protocol


class Handle(Protocol):
    """A call that was asked for and can be called off."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """Monotonic seconds, and calls at a later time on the same event loop."""

    def now(self) -> float: ...

    def call_at(self, when: float, callback: Callable[[], object]) -> Handle: ...


class LoopClock:
    """The clock of whichever event loop runs when it is asked.

    `now` is `time.monotonic`, not `loop.time`: uvloop's is a cached count of whole milliseconds, too coarse to tell a
    caller how long his batch computed.
    """

    __slots__ = ()

    now = staticmethod(time.monotonic)

    def call_at(self, when: float, callback: Callable[[], object]) -> Handle:
        """Call `callback` on the loop once `now() >= when`; `when` is finite."""
        return _Call(asyncio.get_running_loop(), when, callback)


class _Call:
    """One call of a LoopClock; armed again where the loop makes it early, as uvloop does by up to a millisecond."""

    __slots__ = ("_callback", "_handle", "_loop", "_when")

    def __init__(self, loop: asyncio.AbstractEventLoop, when: float, callback: Callable[[], object]) -> None:
        self._loop = loop
        self._when = when
        self._callback: Callable[[], object] | None = callback
        self._handle = self._arm()

    def cancel(self) -> None:
        self._handle.cancel()
        self._callback = None  # it may hold who holds this

    def _arm(self) -> asyncio.TimerHandle:
        delay_ms = math.ceil((self._when - time.monotonic()) * 1000)  # whole ones: uvloop makes 0.4 ms a spin of zeros
        return self._loop.call_later(max(delay_ms, 0) / 1000, self._fire)

    def _fire(self) -> None:
        if time.monotonic() < self._when:
            self._handle = self._arm()
        elif self._callback is not None:
            callback, self._callback = self._callback, None
            callback()
