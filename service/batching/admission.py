"""Admission: what the waiting room takes in, and what it refuses.

Lives here: the limits of the queue and the checks against them; pure, each raises the error its caller gets.
Must not know: asyncio, the engine, the settings that the limits come from.
Laws: nothing is admitted that could never run; each refusal names the value and the limit, a full queue also when to
come back.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from service.batching.job import Cost
from service.batching.policy import J, Lanes
from service.batching.speed import Speed
from service.errors import CostLimit, DeadlineExceeded, QueueFull


@dataclass(frozen=True, slots=True, kw_only=True)
class CostCeilings:
    """The most that one request may cost."""

    max_tokens: int
    max_cells: int
    max_weights_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """What may wait: jobs, bytes of input, how long for company while the engine is idle, and what one may cost.

    An engine that has not answered a batch for `max_compute_s` is stuck.
    """

    capacity: int
    max_bytes: int
    max_wait_s: float
    max_cost: CostCeilings
    max_compute_s: float = 60.0


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


def check_room(cost: Cost, lanes: Lanes[J], limits: QueueLimits, speed: Speed) -> None:
    """Raise QueueFull where the queue has no place or no bytes left for it."""
    if lanes.num_jobs >= limits.capacity:
        reason = f"{lanes.num_jobs} requests wait; the queue takes at most {limits.capacity}"
    elif lanes.num_bytes + cost.input_bytes > limits.max_bytes:
        reason = (
            f"{lanes.num_bytes} bytes wait and this request has {cost.input_bytes}; "
            f"the queue takes at most {limits.max_bytes}"
        )
    else:
        return
    raise QueueFull(reason, retry_after_s=speed.retry_after_s(lanes.num_flops))


def check_time(lane: Hashable, left_s: float, lanes: Lanes[J], speed: Speed) -> None:
    """Raise DeadlineExceeded where the deadline has passed or passes before all that is queued ahead can be done."""
    if left_s <= 0:
        raise DeadlineExceeded("the request's deadline had passed before it was queued")
    least_s = speed.least_s(lanes.flops_ahead(lane))
    if least_s > left_s:
        raise DeadlineExceeded(
            f"the work queued ahead of this request takes at least {least_s:.3f} s; its deadline is in {left_s:.3f} s"
        )
