"""InlinePolicy: which batches end so soon that the loop may wait for them.

Must not know: jobs, the engine, clocks.
Laws: a batch is judged by the pace of its own lane's last ones, for what flops do not tell of a layer or a dtype is in their
times; of a lane nothing is claimed before its first batch; flops tell least of many small sequences, so those are never
brief; a wrong judgement is made of one batch in seventeen at most: a lane of which the loop waited far too long for one, or of
which one failed, has none for the next sixteen.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Hashable

from service.batching.speed import WINDOW

MAX_SEQUENCES = 64
# A paused machine makes one of a hundred batches take twice as long; a wrong judgement was wrong by ten and more.
FAR_TOO_LONG = 3
# Layers come and go, and requests of one come in few lanes; beyond that all begin again, doubts too.
MAX_LANES = 1024


class _Pace:
    """Of the last batches of one lane."""

    __slots__ = ("doubts", "rate", "rates")

    def __init__(self) -> None:
        self.rates: deque[float] = deque(maxlen=WINDOW)
        self.rate = 0.0
        self.doubts = 0


class InlinePolicy:
    """Brief is what likely ends in `inline_s`; 0: nothing is."""

    __slots__ = ("_brief_s", "_lanes")

    def __init__(self, inline_s: float) -> None:
        self._brief_s = inline_s
        self._lanes: dict[Hashable, _Pace] = {}

    def is_inline(self, lane: Hashable, flops: int, sequences: int) -> bool:
        """Whether a batch of this lane, with so much work in so many sequences, is."""
        pace = self._lanes.get(lane)
        if pace is None or pace.doubts or sequences > MAX_SEQUENCES:
            return False
        return flops <= pace.rate * self._brief_s

    def note(self, lane: Hashable, flops: int, seconds: float, *, waited_s: float) -> None:
        """A batch of this lane took so long, and the loop waited for so much of it."""
        if not self._brief_s:
            return
        pace = self._lanes.get(lane) or self._begin(lane)
        if waited_s > FAR_TOO_LONG * self._brief_s:
            pace.doubts = WINDOW  # as many have to be good before the lane is trusted again
        elif pace.doubts:
            pace.doubts -= 1
        pace.rates.append(flops / seconds if seconds else 0.0)
        pace.rate = statistics.median_low(pace.rates)

    def failed(self, lane: Hashable) -> None:
        """A batch of this lane did: nobody knows how long the loop waited for it."""
        if (pace := self._lanes.get(lane)) is not None:
            pace.doubts = WINDOW

    def _begin(self, lane: Hashable) -> _Pace:
        if len(self._lanes) >= MAX_LANES:
            self._lanes.clear()
        pace = self._lanes[lane] = _Pace()
        return pace
