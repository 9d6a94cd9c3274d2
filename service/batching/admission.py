"""Admission: what the waiting room takes in, and what it refuses.

Lives here: the limits of the queue and the checks against them; pure, each raises the error its caller gets.
Must not know: asyncio, the engine, the settings that the limits come from.
Laws: nothing is admitted that could never run; each refusal names the value and the limit, a full queue also when to
come back.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

from service.batching.congestion import Congestion
from service.batching.engine_protocol import ComputeLimits
from service.batching.job import Cost
from service.batching.policy import MAX_FLOPS_BETWEEN, Lanes
from service.batching.speed import Speed, Work
from service.errors import CostLimit, DeadlineExceeded, QueueFull

# A caller alone gets four fifths of the queue, and what it leaves free is enough for others at any load of its own.
SHARE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CostCeilings:
    """The most that one request may cost."""

    max_tokens: int
    max_cells: int
    max_weights_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """What may wait: jobs, bytes of input, attention scores (one job alone may have more); how long for company while the
    engine is idle, how long in a queue that stands (0: only the other limits bound it), what one may cost, and how long
    batches may take.
    """

    capacity: int
    max_bytes: int
    max_cells: int
    max_wait_s: float
    standing_wait_s: float
    max_cost: CostCeilings
    compute: ComputeLimits


def check_cost(cost: Cost, limits: QueueLimits) -> None:
    """Raise CostLimit for a request that could never run, however empty the queue."""
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
    """What there is to know of the waiting room; its parts change, and it need not be made anew for that."""

    limits: QueueLimits
    lanes: Lanes[Any]
    speed: Speed
    congestion: Congestion


def check_room(cost: Cost, queue: Queue, caller: Hashable = None) -> None:
    """Raise QueueFull where the queue has no place, no bytes or no scores left for it, or not for this caller."""
    lanes, limits = queue.lanes, queue.limits
    if lanes.num_jobs >= limits.capacity:
        reason = f"{lanes.num_jobs} requests wait; the queue takes at most {limits.capacity}"
    elif lanes.num_cells + cost.cells > limits.max_cells and lanes.num_jobs:
        reason = (
            f"{lanes.num_cells} attention scores wait and this request has {cost.cells}; "
            f"the queue takes at most {limits.max_cells}"
        )
    elif lanes.num_bytes + cost.input_bytes > limits.max_bytes:
        reason = (
            f"{lanes.num_bytes} bytes wait and this request has {cost.input_bytes}; "
            f"the queue takes at most {limits.max_bytes}"
        )
    elif caller is not None and _has_its_share(cost, queue, caller):
        reason = "as much of this key waits as the queue takes of one caller while others may come"
    else:
        return
    raise QueueFull(reason, retry_after_s=queue.speed.retry_after_s(lanes.num_flops))


def _has_its_share(cost: Cost, queue: Queue, caller: Hashable) -> bool:
    """Whether a caller that has something waiting would hold more than SHARE times what it leaves free for others (dynamic
    thresholds: Choudhury and Hahne 1998).
    """
    lanes, limits, held = queue.lanes, queue.limits, queue.lanes.held(caller)
    return held.num_jobs > 0 and (
        held.num_jobs >= SHARE * (limits.capacity - lanes.num_jobs)
        or held.num_bytes + cost.input_bytes > SHARE * (limits.max_bytes - lanes.num_bytes - cost.input_bytes)
        or held.num_cells + cost.cells > SHARE * (limits.max_cells - lanes.num_cells - cost.cells)
    )


def check_standing(lane: Hashable, queue: Queue, now: float, caller: Hashable = None) -> None:
    """Raise QueueFull where the lane has more work than it can do for so long that waiting helps nobody; of several callers
    only those are refused that have more than their share of what may wait.
    """
    own_flops = queue.lanes.fair_flops(lane, caller)
    stood_s = queue.congestion.standing_s(lane, own_flops, now)
    if stood_s is not None:
        raise QueueFull(
            f"for {stood_s:.1f} s more requests of this kind have come than can be done; enough of them wait",
            retry_after_s=queue.speed.retry_after_s(queue.lanes.flops_ahead(lane, caller)),
        )


def _most_left_s(lane: Hashable, flops: int, queue: Queue) -> float:
    """How long a job waits at most for the batch that runs: where it may run between two of its steps, one step."""
    may_run_between = lane != queue.lanes.long_lane and flops <= MAX_FLOPS_BETWEEN
    return queue.limits.compute.step_s if may_run_between else math.inf


def check_time(lane: Hashable, flops: int, left_s: float, queue: Queue, now: float, caller: Hashable = None) -> None:
    """Raise DeadlineExceeded where the deadline has passed or likely passes before the answer is there.

    Admitted all the same, such requests are what an overloaded service spends itself on: each is computed, too late.
    """
    if left_s <= 0:
        raise DeadlineExceeded("the request's deadline had passed before it was queued")
    lanes = queue.lanes
    if queue.speed.is_sure_in(left_s, lanes.num_flops + flops):
        return
    ahead = Work(lanes.flops_ahead(lane, caller), lanes.jobs_ahead(lane, caller))
    beside = Work(lanes.flops(lane), len(lanes.jobs(lane)))
    likely_s = queue.speed.finish_s(flops, ahead, beside, now, _most_left_s(lane, flops, queue))
    if likely_s > left_s:
        raise DeadlineExceeded(
            f"with the work queued ahead of this request its answer takes {likely_s:.3f} s; its deadline is in {left_s:.3f} s"
        )
