"""Congestion: which lanes have a standing queue, one that outlives every burst.

Lives here: what the queue behind each dispatched batch tells, after CoDel (Nichols and Jacobson 2012, RFC 8289): a burst
makes a long queue and drains it again; where much is left behind every batch, for a while on end, more comes in than goes
out, and a longer queue makes everyone later and nobody's answer possible that would not be anyway.
Must not know: jobs, the engine, clocks.
Laws: only dispatching tells, so an engine that stands still turns nobody away; a queue is long by the batches and the time
that it takes, so one rule fits any layer and machine; once it stands, it does so until half of it is gone.
"""

from __future__ import annotations

from collections.abc import Hashable

STANDING_S = 0.1
"""A queue that has been long for this time is no burst."""
MAX_BATCHES = 2
"""The standing queue that is left to a lane: enough to fill every batch, and few enough that the wait stays within
three times that of a busy service without a queue (docs/reliability.md has the figures)."""


class Congestion:
    """Since when each lane has held too much, and how much that is: more than `MAX_BATCHES` of its batches and more
    than takes `wait_s`; a `wait_s` of 0 claims nothing ever.
    """

    __slots__ = ("_long", "_wait_s")

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._long: dict[Hashable, tuple[float, float]] = {}

    def dispatched(self, lane: Hashable, batch_flops: int, left_flops: int, rate: float, now: float) -> None:
        """A batch of `lane` was taken and so much stayed behind; `rate` is flops per second lately, 0 if unknown."""
        most = max(MAX_BATCHES * batch_flops, self._wait_s * rate)
        since, _ = self._long.get(lane, (now, most))
        if left_flops > (most / 2 if lane in self._long else most) and self._wait_s > 0:
            self._long[lane] = since, most
        else:
            self._long.pop(lane, None)

    def rest(self) -> None:
        """Nothing waits anywhere."""
        self._long.clear()

    def standing_s(self, lane: Hashable, queued_flops: int, now: float) -> float | None:
        """For how long the lane's queue has stood, where it has and what waits now is still too much; else None."""
        if lane not in self._long:
            return None
        since, most = self._long[lane]
        stood_s = now - since
        return stood_s if stood_s >= STANDING_S and queued_flops > most else None
