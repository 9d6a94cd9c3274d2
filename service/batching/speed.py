"""The speed: how fast the engine has been lately, in flops per second, and what follows for whoever must wait.

Must not know: clocks, jobs, lanes.
Laws: before the first batch nothing is claimed; Retry-After follows the mean rate, a refusal for want of time the median
one, so that a single stall (a page fault, a paused machine) turns nobody away; where nothing is ahead nothing is claimed
either, so a request that could only be late by a guess is tried.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

WINDOW = 16  # batches: long enough for a mixture of sizes, short enough to follow a change of load
SHORTEST_S = 1e-6  # a coarse clock may measure nothing at all
LONGEST_RETRY_S = 60


class Speed:
    """The rate of the last batches, and the batch that runs."""

    __slots__ = ("_batch_s", "_batches", "_began", "_rate", "_running_flops")

    def __init__(self) -> None:
        self._batches: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._rate = self._batch_s = 0.0
        self._running_flops = 0
        self._began = 0.0

    @property
    def rate(self) -> float:
        """Flops per second of the median batch; 0 before the first."""
        return self._rate

    def begin(self, flops: int, now: float) -> None:
        """A batch of so much work begins."""
        self._running_flops, self._began = flops, now

    def rest(self) -> None:
        """Nothing runs."""
        self._running_flops = 0

    def note(self, flops: int, seconds: float) -> None:
        """A batch of so much work took so long."""
        self._batches.append((max(flops, 1), max(seconds, SHORTEST_S)))
        self._rate = statistics.median_low(work / took for work, took in self._batches)
        self._batch_s = statistics.median_low(took for _, took in self._batches)

    def retry_after_s(self, flops: int) -> int:
        """Whole seconds until so much queued work is likely done, at least 1 and at most 60."""
        if not self._batches:
            return 1
        rate = sum(work for work, _ in self._batches) / sum(seconds for _, seconds in self._batches)
        return max(1, math.ceil(min(flops / rate, LONGEST_RETRY_S)))

    def finish_s(self, flops: int, ahead: int, beside: int, now: float) -> float:
        """Seconds until a job of `flops` is likely answered, with `ahead` to be done before it and `beside` in its lane.

        What is left of the batch that runs, the work ahead, and the job's own batch, which others fill up to the usual
        length where others wait. 0 where nothing is known or nothing is ahead.
        """
        if not self._rate or not (ahead or self._running_flops):
            return 0.0
        running_s = max(0.0, self._running_flops / self._rate - (now - self._began))
        own_s = max(flops / self._rate, min(self._batch_s, (flops + beside) / self._rate))
        return running_s + ahead / self._rate + own_s
