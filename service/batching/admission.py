"""Admission: refuses what cannot run or would be late; Speed forecasts answers, Congestion detects sustained overload.

Independent of asyncio, the engine, clocks and the settings.
Invariants: A request that could never run is not admitted. A refusal for cost or for lack of room names the value and the limit,
unless the limit is a key's share. Every QueueFull carries a retry time. Limits and shares hold for all queues together. Forecasts
beyond the service's own deadline are a QueueFull, those beyond the caller's a DeadlineExceeded.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from service.batching.job import Cost, Job, Work
from service.batching.policy import BATCH_OVERHEAD_FLOPS, Lanes, Totals
from service.errors import CostLimit, DeadlineExceeded, QueueFull

# Seconds after which a long queue is not a burst.
BURST_S = 0.1
# An overload ends when its lane is empty and has refused nothing for this time. Large requests are few in each batch, so even at
# three times the capacity some batches pass without a refusal. A shorter time would end the overload there, and admit a burst.
CALM_S = 4 * BURST_S
# A queue with more batches than this is long. Fewer would make three callers, each with requests that fill a batch, an overload.
MAX_BATCHES = 2
# A lane's own rate counts for at least this part of the engine's: a lane with few jobs drains slowly, and its own rate alone
# would lower its limit at every batch.
LEAST_RATE = 0.5
# With each batch, a lane's rate forgets this part of the earlier batches.
FORGET = 0.1
# Batches that `Speed` remembers: enough for a mixture of sizes, few enough to follow a change of load.
WINDOW = 16
# A coarse clock may measure 0.
SHORTEST_S = 1e-6
LONGEST_RETRY_S = 60
# Beside short batches that keep its worker's core busy a long batch gets half of that core.
SLOWDOWN = 2.0
# A caller that has jobs waiting may hold at most four times what stays free for others: alone, at most four fifths of the queue.
SHARE = 4


class _Long(NamedTuple):
    """A lane with a long queue: the flops it may keep, since when it is long, the flops it held then, whether it is overloaded,
    and when it last refused a request.
    """

    most: float
    since: float
    left_flops: int
    is_overloaded: bool = False
    refused_at: float = -math.inf


class _Drain(NamedTuple):
    """How fast a lane drains: flops of its batches, seconds of those before the latest, and when that was taken."""

    flops: float
    seconds: float
    at: float


class Congestion:
    """Detects lanes that hold too much for too long: more than `MAX_BATCHES` of their batches and more than `wait_s` of work.

    An overloaded lane keeps the whole batches that fit into `wait_s`, at least one; more adds latency, not throughput.
    With a `wait_s` of 0 no lane is overloaded. Source: CoDel's "standing queue" (Nichols and Jacobson 2012, RFC 8289). A burst
    makes a long queue, which drains again. If much work stays after every batch and never shrinks, more arrives than is done.
    Invariants: Only a dispatch detects overload, so a stalled engine refuses nothing. A queue is long only if it exceeds both a
    number of batches and a time, so one rule fits any layer and machine. The time is estimated from the rate at which the lane
    drains: between two batches the loop has other work, which takes longer than the batches under overload.
    """

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._long: dict[Hashable, _Long] = {}
        self._drains: dict[Hashable, _Drain] = {}

    @property
    def has_long_queue(self) -> bool:
        """Whether any lane holds too much now, overloaded or not."""
        return bool(self._long)

    @property
    def num_overloaded(self) -> int:
        """Number of lanes in sustained overload: they refuse requests while too much waits."""
        return sum(lane.is_overloaded for lane in self._long.values())

    def dispatched(self, lane: Hashable, batch_flops: int, left_flops: int, rate: float, now: float) -> None:
        """Record that a batch of `lane` was taken and `left_flops` stay; `rate` is recent flops per second, 0 if unknown."""
        if self._wait_s == 0:
            return
        lane_rate = self._lane_rate(lane, batch_flops, left_flops, now)
        in_time = self._wait_s * min(rate, max(lane_rate, LEAST_RATE * rate))
        most = batch_flops * max(1, in_time // max(batch_flops, 1))
        before = self._long.get(lane)
        if before is not None and before.is_overloaded:
            self._long[lane] = before._replace(most=most)
            if not left_flops:
                self.emptied(lane, now)
        elif left_flops <= max(MAX_BATCHES * batch_flops, in_time):
            self._long.pop(lane, None)
        elif before is None or left_flops < before.left_flops:
            # The queue shrinks, as it does after a stall under a sustainable load: measure again from here.
            self._long[lane] = _Long(most, now, left_flops)
        else:
            self._long[lane] = before._replace(most=most, is_overloaded=now - before.since >= BURST_S)

    def _lane_rate(self, lane: Hashable, batch_flops: int, left_flops: int, now: float) -> float:
        """Return the flops per second at which the lane has drained since it was last empty; infinite if unknown."""
        flops = seconds = 0.0
        if (before := self._drains.pop(lane, None)) is not None:
            flops = (1 - FORGET) * before.flops
            seconds = (1 - FORGET) * (before.seconds + now - before.at)
        if left_flops:
            self._drains[lane] = _Drain(flops + batch_flops, seconds, now)
        return flops / seconds if seconds else math.inf

    def idle(self, now: float) -> None:
        """Record that nothing waits in the queue."""
        for lane in [*self._long]:
            self.emptied(lane, now)
        self._drains.clear()

    def emptied(self, lane: Hashable, now: float) -> None:
        """End what lasted until the lane was empty; an overload in which a request was refused lately outlasts this."""
        self._drains.pop(lane, None)
        before = self._long.get(lane)
        if before is not None and now - before.refused_at >= CALM_S:
            del self._long[lane]

    def refuse(self, lane: Hashable, queued_flops: int, now: float) -> float | None:
        """Return how long the lane has been overloaded if it refuses a request now; None if it does not."""
        if lane not in self._drains:  # no batch has left work since the lane was empty
            self.emptied(lane, now)
        found = self._long.get(lane)
        if found is None or not found.is_overloaded or queued_flops < found.most:
            return None
        self._long[lane] = found._replace(refused_at=now)
        return now - found.since


class Speed:
    """The rates of the last batches, and the batch that runs: forecasts when a job will be answered.

    Invariants: Before the first batch forecasts follow the rate of a self-check, and there are none without. Retry-After follows
    the mean rate. A refusal for lack of time follows the median rate, so that a single stall (a page fault, a paused machine)
    refuses nothing. Small batches predict large ones badly, and large ones small ones, so a forecast is the shorter of two: by
    work and by number of jobs. If nothing is ahead there is no forecast either, so that a guess alone refuses no request.
    """

    def __init__(self) -> None:
        self.rate = 0.0
        """Flops per second of the median batch; 0 if unknown."""
        self._batches: deque[tuple[Work, float]] = deque(maxlen=WINDOW)
        self._rates: deque[float] = deque(maxlen=WINDOW)
        self._s_per_job = math.inf
        self._batch_s = 0.0
        self._running = Work(0, 0)
        self._began = 0.0

    def seed(self, rate: float) -> None:
        """Begin with this rate of a self-check, if nothing is known yet; it counts as half of the batches that are remembered.

        The first batches of a process take many times as long as later ones.
        """
        if rate and not self._rates:
            self._rates.extend([rate] * (WINDOW // 2))
            self.rate = rate

    def begin(self, work: Work, now: float) -> None:
        """Record that a batch begins."""
        self._running, self._began = work, now

    def end(self) -> None:
        """Record that nothing runs."""
        self._running = Work(0, 0)

    def note(self, work: Work, seconds: float) -> None:
        """Record how long a batch took."""
        self._batches.append((Work(max(work.flops, 1), max(work.num_jobs, 1)), max(seconds, SHORTEST_S)))
        latest, took = self._batches[-1]
        self._rates.append(latest.flops / took)
        self.rate = statistics.median_low(self._rates)
        # Lists, not generators: those would cost a call for each item, after every batch.
        self._s_per_job = statistics.median_low([took / work.num_jobs for work, took in self._batches])
        self._batch_s = statistics.median_low([took for _, took in self._batches])

    def retry_after_s(self, flops: int) -> int:
        """Return whole seconds until `flops` of queued work are likely done, at least 1 and at most 60."""
        if not self.rate:
            return 1
        rate = self.rate
        if self._batches:
            rate = sum(work.flops for work, _ in self._batches) / sum(seconds for _, seconds in self._batches)
        return max(1, math.ceil(min(flops / rate, LONGEST_RETRY_S)))

    def finish_s(self, flops: int, ahead: Work, same_lane: Work, now: float) -> float:
        """Return seconds until a job of `flops` is likely answered, with `ahead` to be done before it and `same_lane` waiting.

        The sum of what is left of the running batch, the work ahead, and the job's own batch. Jobs of the same lane fill that
        batch up to the usual length. 0 if nothing is known or nothing is ahead.
        """
        if not self.rate or not (ahead.num_jobs or self._running.num_jobs):
            return 0.0

        def likely_s(seconds: Callable[[Work], float]) -> float:
            left_s = max(0.0, seconds(self._running) - (now - self._began)) if self._running.num_jobs else 0.0
            own_s = seconds(Work(flops, 1))
            batch_s = min(self._batch_s, own_s + seconds(same_lane)) if same_lane.num_jobs else 0.0
            return left_s + (seconds(ahead) if ahead.num_jobs else 0.0) + max(own_s, batch_s)

        return min(
            likely_s(lambda work: work.flops / self.rate), likely_s(lambda work: work.num_jobs * self._s_per_job)
        )


@dataclass(slots=True)
class Queue:
    """What waits for one compute thread. It alone owns the speed of that thread and the congestion of its lanes."""

    is_long: bool
    lanes: Lanes[Any]
    speed: Speed
    congestion: Congestion
    _arrived: dict[Hashable, dict[Hashable, int]] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether no job waits, and no request that becomes one."""
        return not (self.lanes.num_jobs or self._arrived)

    def flops(self, lane: Hashable) -> int:
        """Return the work of the lane's jobs and of the requests that have arrived and will become jobs."""
        return self.lanes.jobs(lane).flops + sum(self._arrived.get(lane, {}).values())

    def fair_share(self, lane: Hashable, caller: Hashable) -> int:
        """Return the part of `flops` that runs before a request which this caller sends now (`FairQueue.fair_share`)."""
        arrived = self._arrived.get(lane, {})
        own = arrived.get(caller, 0) * len(arrived)
        return self.lanes.jobs(lane).fair_share(caller).flops + min(own, sum(arrived.values()))

    def note_arrival(self, lane: Hashable, caller: Hashable, flops: int) -> None:
        """Count a request of this much work, whose body waits to be parsed; a negative number no longer counts it."""
        callers = self._arrived.setdefault(lane, {})
        callers[caller] = callers.get(caller, 0) + flops
        if not callers[caller]:
            del callers[caller]
        if not callers:
            del self._arrived[lane]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """What may wait and for how long, and how long batches may take; all times in seconds."""

    capacity: int  # jobs
    max_bytes: int  # of input
    max_cells: int  # attention scores; a job that waits alone may have more
    max_wait_s: float  # how long a batch waits for more jobs while the engine is idle (`Job.due_at`)
    standing_wait_s: float  # the queueing delay allowed in sustained overload; 0: only the other limits hold
    stuck_s: float  # a batch that makes no progress for this long is stuck
    inline_s: float  # a batch that likely ends within this time runs inline; 0: none does
    long_s: float  # a request that likely takes longer is long, and a short batch ends within this time; infinite: none is long
    overhead_flops: int = BATCH_OVERHEAD_FLOPS  # work for which a batch counts besides its flops
    flops_per_sequence: int = 0  # work charged to lanes and callers for every sequence besides its flops


class Admission:
    """Checks what may join one of the two queues, and says what a refused request may expect."""

    def __init__(self, limits: QueueLimits, short: Queue, long: Queue) -> None:
        self._limits = limits
        self._short = short
        self._long = long

    @property
    def waiting(self) -> Totals:
        """The totals of all waiting jobs."""
        return self._short.lanes + self._long.lanes

    @property
    def is_full(self) -> bool:
        """Whether the number of jobs alone lets no other one in."""
        return self._short.lanes.num_jobs + self._long.lanes.num_jobs >= self._limits.capacity

    def check(self, queue: Queue, job: Job[Any, Any], own_deadline: float) -> None:
        """Check a job before it joins `queue`; raise CostLimit, QueueFull or DeadlineExceeded.

        `own_deadline` is the service's, which the caller's may precede.
        """
        self._check_bytes(job.cost.input_bytes)
        self.check_room(job.cost, job.caller)
        lane, caller = job.lane, job.caller
        self._check_congestion(queue, lane, caller, queue.lanes.jobs(lane).fair_share(caller).flops, job.accepted_at)
        self._check_time(queue, job, own_deadline)

    def _check_bytes(self, num_bytes: int) -> None:
        """Raise CostLimit for a request that would not fit into an empty queue; `wire/` checks the other limits of a request."""
        if num_bytes > (most := self._limits.max_bytes):
            raise CostLimit(
                f"the request needs {num_bytes:,} bytes of decoded tensors (ATTENTION_QUEUE_BYTES), expected at most {most:,}; "
                "send fewer sequences"
            )

    def check_room(self, cost: Cost, caller: Hashable) -> None:
        """Raise QueueFull if the queue has no room for this cost (jobs, bytes or scores), or none for this caller."""
        waiting, limits = self.waiting, self._limits
        if waiting.num_jobs >= limits.capacity:
            reason = f"{waiting.num_jobs} requests wait; the queue holds at most {limits.capacity}"
        elif waiting.num_cells + cost.cells > limits.max_cells and waiting.num_jobs:
            reason = (
                f"{waiting.num_cells} attention scores wait and this request has {cost.cells}; "
                f"the queue holds at most {limits.max_cells}"
            )
        elif waiting.num_bytes + cost.input_bytes > limits.max_bytes:
            reason = (
                f"{waiting.num_bytes} bytes wait and this request has {cost.input_bytes}; "
                f"the queue holds at most {limits.max_bytes}"
            )
        elif caller is not None and self._exceeds_its_share(cost, waiting, caller):
            reason = "this key's waiting requests fill the part of the queue that one key may use"
        else:
            return
        each_s = [queue.speed.retry_after_s(queue.lanes.num_flops) for queue in (self._short, self._long)]
        raise QueueFull(reason, retry_after_s=max(each_s))

    def _exceeds_its_share(self, cost: Cost, waiting: Totals, caller: Hashable) -> bool:
        """Return whether a caller with waiting jobs would hold more than SHARE times the room left for others.

        Source: dynamic thresholds (Choudhury and Hahne 1998).
        """
        limits, held = self._limits, self._short.lanes.held(caller) + self._long.lanes.held(caller)
        return held.num_jobs > 0 and any(
            own + new > SHARE * (limit - num_waiting - new)
            for own, new, num_waiting, limit in (
                (held.num_jobs, 1, waiting.num_jobs, limits.capacity),
                (held.num_bytes, cost.input_bytes, waiting.num_bytes, limits.max_bytes),
                (held.num_cells, cost.cells, waiting.num_cells, limits.max_cells),
            )
        )

    def check_lane(self, queue: Queue, lane: Hashable, caller: Hashable, now: float) -> None:
        """Raise what `check` would raise because of congestion, for a request whose body is still to come and to be parsed."""
        self._check_congestion(queue, lane, caller, queue.fair_share(lane, caller), now)

    def _check_congestion(self, queue: Queue, lane: Hashable, caller: Hashable, ahead_flops: int, now: float) -> None:
        """Raise QueueFull if the lane is in sustained overload, where waiting adds only latency.

        With several callers, only those above their fair share are refused.
        """
        if not queue.congestion.has_long_queue:
            return
        overloaded_s = queue.congestion.refuse(lane, ahead_flops, now)
        if overloaded_s is not None:
            raise QueueFull(
                f"for {overloaded_s:.1f} s requests of this kind have arrived faster than they can be computed",
                retry_after_s=queue.speed.retry_after_s(queue.lanes.ahead(lane, caller).flops),
            )

    def _check_time(self, queue: Queue, job: Job[Any, Any], own_deadline: float) -> None:
        """Raise QueueFull if the answer would likely come after the service's own deadline, which waits for a shorter queue.

        Raise DeadlineExceeded if the caller's deadline has passed or decides. An overloaded service that admits such requests
        spends its time on answers that come too late.
        """
        now, left_s = job.accepted_at, job.deadline - job.accepted_at
        if left_s <= 0:
            raise DeadlineExceeded("the deadline passed before the request was queued")
        # A long batch has half of a saturated worker's core.
        slowdown = SLOWDOWN if queue.is_long and self._short.lanes.num_jobs else 1.0
        speed, waiting, ahead = queue.speed, queue.lanes.jobs(job.lane), queue.lanes.ahead(job.lane, job.caller)
        likely_s = slowdown * speed.finish_s(job.cost.flops, ahead, Work(waiting.flops, len(waiting)), now)
        if likely_s > own_deadline - now:
            raise QueueFull(
                f"with the work queued ahead the answer would take {likely_s:.3f} s, longer than any request may",
                retry_after_s=speed.retry_after_s(int(slowdown * ahead.flops)),
            )
        if likely_s > left_s:
            raise DeadlineExceeded(
                f"with the work queued ahead the answer would take {likely_s:.3f} s; the deadline is in {left_s:.3f} s"
            )
