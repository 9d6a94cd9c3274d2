"""Inline policy: decides which batches are short enough to compute on the event loop's thread.

Independent of jobs, the engine and clocks.
Invariants: A batch is judged by the rates of its own lane's last batches, because their times include what flops do not show of a
layer or a dtype. A lane has no inline batch before its first batch has run. Flops predict many small sequences worst, so such
batches never run inline. At most one batch in seventeen is misjudged: after a wait far too long, or a failed batch, the next
sixteen batches of that lane do not run inline.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Hashable

from service.batching.speed import WINDOW

MAX_SEQUENCES = 64
# A paused machine doubles the time of one batch in a hundred; a misjudged batch took ten times as long and more.
FAR_TOO_LONG = 3
# Layers come and go, and each has few lanes; above this number all records are dropped, doubts too.
MAX_LANES = 1024


class _Pace:
    """The rates of the last batches of one lane."""

    __slots__ = ("doubts", "rate", "rates")

    def __init__(self) -> None:
        self.rates: deque[float] = deque(maxlen=WINDOW)
        self.rate = 0.0
        self.doubts = 0


class InlinePolicy:
    """A batch runs inline if it likely ends in `inline_s`; with 0 none does."""

    __slots__ = ("_brief_s", "_lanes")

    def __init__(self, inline_s: float) -> None:
        self._brief_s = inline_s
        self._lanes: dict[Hashable, _Pace] = {}

    def is_inline(self, lane: Hashable, flops: int, sequences: int) -> bool:
        """Whether a batch of this lane, with that much work in that many sequences, runs inline."""
        pace = self._lanes.get(lane)
        if pace is None or pace.doubts or sequences > MAX_SEQUENCES:
            return False
        return flops <= pace.rate * self._brief_s

    def note(self, lane: Hashable, flops: int, seconds: float, *, waited_s: float) -> None:
        """Record how long a batch of this lane took, and for how much of that the loop waited."""
        if not self._brief_s:
            return
        pace = self._lanes.get(lane) or self._begin(lane)
        if waited_s > FAR_TOO_LONG * self._brief_s:
            pace.doubts = WINDOW  # so many batches run off the loop before one runs inline again
        elif pace.doubts:
            pace.doubts -= 1
        pace.rates.append(flops / seconds if seconds else 0.0)
        pace.rate = statistics.median_low(pace.rates)

    def failed(self, lane: Hashable) -> None:
        """Record that a batch of this lane failed: how long the loop waited for it is unknown."""
        if (pace := self._lanes.get(lane)) is not None:
            pace.doubts = WINDOW

    def _begin(self, lane: Hashable) -> _Pace:
        if len(self._lanes) >= MAX_LANES:
            self._lanes.clear()
        pace = self._lanes[lane] = _Pace()
        return pace
