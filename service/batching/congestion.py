"""Congestion: which lanes have a standing queue, one that outlives every burst.

Lives here: what the queue behind each dispatched batch tells, after CoDel (Nichols and Jacobson 2012, RFC 8289): a burst
makes a long queue and drains it again; where much is left behind every batch, for a while on end and never less, more comes in
than goes out, and a longer queue makes everyone later and nobody's answer possible that would not be anyway.
Must not know: jobs, the engine, clocks.
Laws: only dispatching tells that a queue stands, so an engine that stands still turns nobody away; a queue is long by the
batches and the time that it takes, so one rule fits any layer and machine; once it stands, it does so until half of it is gone.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

STANDING_S = 0.1
"""A queue that has been long for this time is no burst."""
MAX_BATCHES = 2
"""The standing queue that is left to a lane: enough to fill every batch, and few enough that the wait stays within
three times that of a busy service without a queue (docs/reliability.md has the figures)."""


class _Long(NamedTuple):
    """A lane that holds more than `most`: since when, how much it held then, and whether that is for good."""

    most: float
    since: float
    left_flops: int
    stands: bool


class Congestion:
    """Which lanes have held too much for too long: more than `MAX_BATCHES` of their batches and more than takes
    `wait_s`; a `wait_s` of 0 claims nothing ever.
    """

    __slots__ = ("_long", "_wait_s")

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._long: dict[Hashable, _Long] = {}

    @property
    def is_any(self) -> bool:
        """Whether there is a lane that holds too much."""
        return bool(self._long)

    @property
    def num_standing(self) -> int:
        """Lanes whose queue stands: what comes for them is refused while too much waits."""
        return sum(found.stands for found in self._long.values())

    def dispatched(self, lane: Hashable, batch_flops: int, left_flops: int, rate: float, now: float) -> None:
        """A batch of `lane` was taken and so much stayed behind; `rate` is flops per second lately, 0 if unknown."""
        most = max(MAX_BATCHES * batch_flops, self._wait_s * rate)
        before = self._long.get(lane)
        stood = before is not None and before.stands
        if self._wait_s == 0 or left_flops <= (most / 2 if stood else most):
            self._long.pop(lane, None)
        elif before is None or (left_flops < before.left_flops and not stood):
            # It shrinks, as what a stall has left behind does where the load is one that can be borne.
            self._long[lane] = _Long(most, now, left_flops, stands=False)
        else:
            stands = stood or now - before.since >= STANDING_S
            self._long[lane] = before._replace(most=most, stands=stands)

    def withdrew(self, lane: Hashable, left_flops: int) -> None:
        """Somebody left the lane unanswered, and so much stays; an empty one has no queue that could stand."""
        if not left_flops:
            self._long.pop(lane, None)

    def rest(self) -> None:
        """Nothing waits anywhere."""
        self._long.clear()

    def standing_s(self, lane: Hashable, queued_flops: int, now: float) -> float | None:
        """For how long the lane's queue has stood, where it has and what waits now is still too much; else None."""
        found = self._long.get(lane)
        return now - found.since if found is not None and found.stands and queued_flops > found.most else None
