"""Admission: refuses what cannot run or would be late; Congestion detects lanes in sustained overload.

The checks are pure; each raises the error that its caller receives. Independent of asyncio, the engine and the settings.
Invariants: A request that could never run is not admitted. A refusal for cost or for a full queue names the value and the limit.
Every QueueFull carries a retry time.

Congestion: detects lanes in sustained overload, whose queue outlives every burst.
Source: CoDel's "standing queue" (Nichols and Jacobson 2012, RFC 8289). A burst makes a long queue and drains it again. If much
stays behind every batch for a while and never gets less, more arrives than is done. Then a longer queue adds latency, not
throughput.
Independent of jobs, the engine and clocks.
Invariants: Only a dispatch detects overload, so a stalled engine refuses nothing. A queue is long by the batches and by the time
it takes, so one rule fits any layer and machine. Overload ends when the queue falls to half its limit.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

from service.batching.engine_protocol import ComputeLimits
from service.batching.job import Cost
from service.batching.policy import MAX_FLOPS_BETWEEN, Lanes
from service.batching.speed import Speed, Work
from service.errors import CostLimit, DeadlineExceeded, QueueFull

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


# A caller alone gets at most four fifths of the queue, whatever its load; the rest stays free for others.
SHARE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CostCeilings:
    """The most that one request may cost."""

    max_tokens: int
    max_cells: int
    max_weights_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """What may wait: `capacity` jobs, `max_bytes` of input, `max_cells` attention scores (a job that waits alone may have more).
    `max_wait_s` is how long a batch waits for more jobs while the engine is idle. `standing_wait_s` is the queueing delay allowed
    in sustained overload (0: only the other limits hold). `max_cost` limits one request, `compute` the time of batches.
    """

    capacity: int
    max_bytes: int
    max_cells: int
    max_wait_s: float
    standing_wait_s: float
    max_cost: CostCeilings
    compute: ComputeLimits


def check_cost(cost: Cost, limits: QueueLimits) -> None:
    """Raise CostLimit for a request that could never run, even with an empty queue."""
    ceilings = limits.max_cost
    for field, value, ceiling in (
        ("tokens", cost.tokens, ceilings.max_tokens),
        ("cells", cost.cells, ceilings.max_cells),
        ("weights_bytes", cost.weights_bytes, ceilings.max_weights_bytes),
        ("input_bytes", cost.input_bytes, limits.max_bytes),
    ):
        if value > ceiling:
            raise CostLimit(f"this request's cost in {field} is {value}; one request may have at most {ceiling}")


class Queue(NamedTuple):
    """The limits of the queue and its mutable parts; made once, because the parts change in place."""

    limits: QueueLimits
    lanes: Lanes[Any]
    speed: Speed
    congestion: Congestion


def check_room(cost: Cost, queue: Queue, caller: Hashable = None) -> None:
    """Raise QueueFull if the queue has no room for this cost (jobs, bytes or scores), or none for this caller."""
    lanes, limits = queue.lanes, queue.limits
    if lanes.num_jobs >= limits.capacity:
        reason = f"{lanes.num_jobs} requests wait; the queue holds at most {limits.capacity}"
    elif lanes.num_cells + cost.cells > limits.max_cells and lanes.num_jobs:
        reason = (
            f"{lanes.num_cells} attention scores wait and this request has {cost.cells}; "
            f"the queue holds at most {limits.max_cells}"
        )
    elif lanes.num_bytes + cost.input_bytes > limits.max_bytes:
        reason = (
            f"{lanes.num_bytes} bytes wait and this request has {cost.input_bytes}; "
            f"the queue holds at most {limits.max_bytes}"
        )
    elif caller is not None and _has_its_share(cost, queue, caller):
        reason = "this key's waiting requests fill the part of the queue that one key may use"
    else:
        return
    raise QueueFull(reason, retry_after_s=queue.speed.retry_after_s(lanes.num_flops))


def _has_its_share(cost: Cost, queue: Queue, caller: Hashable) -> bool:
    """Return whether a caller with waiting jobs would hold more than SHARE times the room left for others (dynamic thresholds:
    Choudhury and Hahne 1998).
    """
    lanes, limits, held = queue.lanes, queue.limits, queue.lanes.held(caller)
    return held.num_jobs > 0 and (
        held.num_jobs >= SHARE * (limits.capacity - lanes.num_jobs)
        or held.num_bytes + cost.input_bytes > SHARE * (limits.max_bytes - lanes.num_bytes - cost.input_bytes)
        or held.num_cells + cost.cells > SHARE * (limits.max_cells - lanes.num_cells - cost.cells)
    )


def check_standing(lane: Hashable, queue: Queue, now: float, caller: Hashable = None) -> None:
    """Raise QueueFull if the lane is in sustained overload, where waiting adds only latency. With several callers, only those
    above their fair share are refused.
    """
    own_flops = queue.lanes.fair_flops(lane, caller)
    stood_s = queue.congestion.standing_s(lane, own_flops, now)
    if stood_s is not None:
        raise QueueFull(
            f"for {stood_s:.1f} s requests of this kind have arrived faster than they can be computed",
            retry_after_s=queue.speed.retry_after_s(queue.lanes.flops_ahead(lane, caller)),
        )


def _most_left_s(lane: Hashable, flops: int, queue: Queue) -> float:
    """Return the longest wait for the running batch: one step if the job may run between two steps, else infinity."""
    may_run_between = lane != queue.lanes.long_lane and flops <= MAX_FLOPS_BETWEEN
    return queue.limits.compute.step_s if may_run_between else math.inf


def check_time(lane: Hashable, flops: int, left_s: float, queue: Queue, now: float, caller: Hashable = None) -> None:
    """Raise DeadlineExceeded if the deadline has passed or the answer would likely come after it.

    An overloaded service that admits such requests spends its time on answers that come too late.
    """
    if left_s <= 0:
        raise DeadlineExceeded("the deadline passed before the request was queued")
    lanes = queue.lanes
    if queue.speed.is_sure_in(left_s, lanes.num_flops + flops):
        return
    ahead = Work(lanes.flops_ahead(lane, caller), lanes.jobs_ahead(lane, caller))
    beside = Work(lanes.flops(lane), len(lanes.jobs(lane)))
    likely_s = queue.speed.finish_s(flops, ahead, beside, now, _most_left_s(lane, flops, queue))
    if likely_s > left_s:
        raise DeadlineExceeded(
            f"with the work queued ahead the answer would take {likely_s:.3f} s; the deadline is in {left_s:.3f} s"
        )
