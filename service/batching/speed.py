"""The speed: how fast the engine has been lately, in flops per second.

Lives here: the rate of the last batches, and what follows from it for a caller who must wait.
Must not know: clocks, jobs, lanes.
Laws: before the first batch nothing is claimed; Retry-After follows the mean rate, a refusal for want of time the best
one, so that a single stall (a page fault, a paused machine) never turns anybody away.
"""

from __future__ import annotations

import math
from collections import deque

WINDOW = 16  # batches: long enough for a mixture of sizes, short enough to follow a change of load
SHORTEST_S = 1e-6  # a coarse clock may measure nothing at all
LONGEST_RETRY_S = 60


class Speed:
    """The rate of the last batches."""

    __slots__ = ("_batches",)

    def __init__(self) -> None:
        self._batches: deque[tuple[int, float]] = deque(maxlen=WINDOW)

    def note(self, flops: int, seconds: float) -> None:
        """A batch of so much work took so long."""
        self._batches.append((max(flops, 1), max(seconds, SHORTEST_S)))

    @property
    def rate(self) -> float:
        """Flops per second over the last batches; 0 before the first."""
        return sum(work for work, _ in self._batches) / sum(s for _, s in self._batches) if self._batches else 0.0

    def retry_after_s(self, flops: int) -> int:
        """Whole seconds until so much queued work is likely done, at least 1 and at most 60."""
        if not self._batches:
            return 1
        return max(1, math.ceil(min(flops / self.rate, LONGEST_RETRY_S)))

    def least_s(self, flops: int) -> float:
        """Seconds that so much work takes at the best rate lately seen."""
        return flops / max(work / seconds for work, seconds in self._batches) if self._batches else 0.0
