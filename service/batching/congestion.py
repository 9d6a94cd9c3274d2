"""Congestion: detects lanes in sustained overload, whose queue outlives every burst.

Source: CoDel's "standing queue" (Nichols and Jacobson 2012, RFC 8289). A burst makes a long queue and drains it again. If much
stays behind every batch for a while and never gets less, more arrives than is done. Then a longer queue adds latency, not
throughput.
Independent of jobs, the engine and clocks.
Invariants: Only a dispatch detects overload, so a stalled engine refuses nothing. A queue is long by the batches and by the time
it takes, so one rule fits any layer and machine. Overload ends when the queue falls to half its limit.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

STANDING_S = 0.1
"""Seconds after which a long queue is not a burst."""
MAX_BATCHES = 2
"""Batches that an overloaded lane keeps queued: enough to fill every batch, and few enough that the wait stays within
three times that of a busy service without a queue (docs/reliability.md has the figures)."""


class _Long(NamedTuple):
    """A lane that holds more than `most` flops: since when, how much it held then, and whether the overload is sustained."""

    most: float
    since: float
    left_flops: int
    stands: bool


class Congestion:
    """Tracks lanes that hold too much for too long: more than `MAX_BATCHES` of their batches and more than `wait_s` of work. With
    a `wait_s` of 0 no lane is overloaded.
    """

    __slots__ = ("_long", "_wait_s")

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._long: dict[Hashable, _Long] = {}

    @property
    def is_any(self) -> bool:
        """Whether any lane holds too much."""
        return bool(self._long)

    @property
    def num_standing(self) -> int:
        """Number of lanes in sustained overload: they refuse requests while too much waits."""
        return sum(found.stands for found in self._long.values())

    def dispatched(self, lane: Hashable, batch_flops: int, left_flops: int, rate: float, now: float) -> None:
        """Record that a batch of `lane` was taken and `left_flops` stay; `rate` is recent flops per second, 0 if unknown."""
        most = max(MAX_BATCHES * batch_flops, self._wait_s * rate)
        before = self._long.get(lane)
        stood = before is not None and before.stands
        if self._wait_s == 0 or left_flops <= (most / 2 if stood else most):
            self._long.pop(lane, None)
        elif before is None or (left_flops < before.left_flops and not stood):
            # The queue shrinks, as it does after a stall under a sustainable load: measure again from here.
            self._long[lane] = _Long(most, now, left_flops, stands=False)
        else:
            stands = stood or now - before.since >= STANDING_S
            self._long[lane] = before._replace(most=most, stands=stands)

    def withdrew(self, lane: Hashable, left_flops: int) -> None:
        """Record that a job left the lane unanswered and `left_flops` stay; an empty lane is not overloaded."""
        if not left_flops:
            self._long.pop(lane, None)

    def rest(self) -> None:
        """Forget all lanes: nothing waits anywhere."""
        self._long.clear()

    def standing_s(self, lane: Hashable, queued_flops: int, now: float) -> float | None:
        """Return how long the lane has been overloaded; None if it is not, or if little enough waits now."""
        found = self._long.get(lane)
        return now - found.since if found is not None and found.stands and queued_flops > found.most else None
