"""Policy: chooses which waiting jobs run together next, with equal shares of work for all lanes and for callers in a lane.

It does no I/O and reads no clock, so tests use plain values. A caller is an opaque key: an API key, or None without keys.
Invariants: A batch keeps every limit, except that its first job is always taken, so there is always progress. Lanes, and
callers within a lane, get equal shares of work by start-time fair queueing (Goyal, Vin, Cheng 1996): the lane that would start
earliest in virtual time is next. A new lane starts at the current virtual time, or later if it has debt. Jobs of one caller keep
their order within a lane; callers that always have a job waiting get equal work to within one job each.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from service.batching.job import Cost, Work

# Work charged to a caller for every job besides its flops, so that small requests are not free: the loop's own work for a job
# takes as long as 2**24 flops.
JOB_OVERHEAD_FLOPS = 2**24
# Work charged for every batch besides its jobs' flops. One token through a 512-wide layer (2 MFLOP) took 0.17 ms on two
# cores that do 170 GFLOP/s, so a batch costs about 2**24 flops however small it is. Without this charge, a lane of tiny
# jobs would be owed millions of batches for one large batch of another lane.
BATCH_OVERHEAD_FLOPS = 2**24
# A job is light if a batch has room for at least this many jobs of its size.
LIGHT_IN_A_BATCH = 8


class Waiting(Protocol):
    """The attributes of a job that the queue reads. Jobs hash by identity."""

    lane: Hashable
    caller: Hashable
    cost: Cost


J = TypeVar("J", bound=Waiting)


@dataclass(slots=True)
class _Caller(Generic[J]):
    """One caller's jobs with the work to charge for each, and the virtual time at which the first starts.

    A later job starts when those before it have been charged, so a job that leaves unserved delays none.
    """

    start: int
    jobs: OrderedDict[J, int] = field(default_factory=OrderedDict)  # O(1) at the front, the back and in between
    flops: int = 0

    @property
    def by_start(self) -> Iterator[tuple[int, J]]:
        return zip(itertools.accumulate(self.jobs.values(), initial=self.start), self.jobs, strict=False)


class FairQueue(Generic[J]):
    """The jobs of one lane in the order in which they are to be served; `flops` is the work of all of them."""

    def __init__(self, start: int = 0, flops_per_sequence: int = 0) -> None:
        self._flops_per_sequence = flops_per_sequence
        self.start = start
        """The virtual time at which the lane's next batch starts; `Lanes` keeps it."""
        self.flops = 0
        self._num_jobs = 0
        self._virtual_time = 0
        self._callers: dict[Hashable, _Caller[J]] = {}  # those with jobs
        self._debts: dict[Hashable, int] = {}  # start times of callers without jobs, as in `Lanes`

    def __len__(self) -> int:
        return self._num_jobs

    def __iter__(self) -> Iterator[J]:
        if len(self._callers) == 1:
            return iter(next(iter(self._callers.values())).jobs)
        by_start = [caller.by_start for caller in self._callers.values()]
        return (job for _, job in heapq.merge(*by_start, key=lambda entry: entry[0]))

    def fair_share(self, caller: Hashable) -> Work:
        """Return the work that runs before a job which this caller adds now: its own, and as much for each other waiting caller.

        It is at most all of the queue's work, and nothing if the caller has no job here.
        """
        own = self._callers.get(caller)
        if own is None:
            return Work(0, 0)
        num_callers = len(self._callers)
        return Work(min(self.flops, own.flops * num_callers), min(self._num_jobs, len(own.jobs) * num_callers))

    def charge(self, job: J) -> int:
        """Return the work of a job and of its sequences."""
        return job.cost.flops + job.cost.sequences * self._flops_per_sequence

    def append(self, job: J) -> None:
        caller = self._callers.get(job.caller)
        if caller is None:
            caller = self._callers[job.caller] = _Caller(max(self._virtual_time, self._debts.pop(job.caller, 0)))
        caller.jobs[job] = self.charge(job) + JOB_OVERHEAD_FLOPS
        caller.flops += job.cost.flops
        self.flops += job.cost.flops
        self._num_jobs += 1

    def remove(self, job: J, *, is_served: bool = False) -> bool:
        """Remove a job from any position, charged to its caller if it is served; return False if it is not in the queue."""
        caller = self._callers.get(job.caller)
        if caller is None or (charge := caller.jobs.pop(job, None)) is None:
            return False
        caller.flops -= job.cost.flops
        self.flops -= job.cost.flops
        self._num_jobs -= 1
        if is_served:
            self._virtual_time = max(self._virtual_time, caller.start)
            caller.start += charge
        if not caller.jobs:
            del self._callers[job.caller]
            if caller.start > self._virtual_time:
                self._debts[job.caller] = caller.start
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """The most that one batch may contain; a job above a limit runs alone."""

    max_requests: int
    max_tokens: int
    max_cells: int
    max_weights_bytes: int


@dataclass
class Totals:
    """Sums over waiting jobs: of one queue or of all, of every caller or of one."""

    num_jobs: int = 0
    num_bytes: int = 0
    num_cells: int = 0
    num_flops: int = 0

    def __add__(self, other: Totals) -> Totals:
        num_jobs, num_bytes = self.num_jobs + other.num_jobs, self.num_bytes + other.num_bytes
        return Totals(num_jobs, num_bytes, self.num_cells + other.num_cells, self.num_flops + other.num_flops)

    def add(self, cost: Cost, sign: int) -> None:
        """Add one job, or with a `sign` of -1 subtract it."""
        self.num_jobs += sign
        self.num_bytes += sign * cost.input_bytes
        self.num_cells += sign * cost.cells
        self.num_flops += sign * cost.flops


class Lanes(Totals, Generic[J]):
    """The ordered waiting jobs of each lane. Empty lanes are deleted; their debts stay until virtual time reaches them.

    `flops_per_sequence` is the work charged for every sequence besides its flops.
    """

    def __init__(self, flops_per_sequence: int = 0) -> None:
        super().__init__()
        self._flops_per_sequence = flops_per_sequence
        self._lanes: dict[Hashable, FairQueue[J]] = {}
        self._debts: dict[Hashable, int] = {}  # start times of emptied lanes that are ahead of virtual time
        self._virtual_time = 0
        self._held: dict[Hashable, Totals] = {}

    @property
    def next_jobs(self) -> FairQueue[J]:
        """The jobs of the lane that starts earliest in virtual time (of equals, the first created); empty if nothing waits."""
        return min(self._lanes.values(), key=lambda lane: lane.start, default=None) or FairQueue()

    def first_due_at(self, due_at: Callable[[FairQueue[J]], float]) -> float:
        """Return the earliest time that `due_at` gives for a lane; infinite if nothing waits."""
        return min(map(due_at, self._lanes.values()), default=math.inf)

    def jobs(self, name: Hashable) -> FairQueue[J]:
        """Return the jobs of a lane; empty if there is no such lane."""
        return self._lanes.get(name) or FairQueue()

    def held(self, caller: Hashable) -> Totals:
        """Return the totals of this caller's waiting jobs; zeros if none waits."""
        return self._held.get(caller) or Totals()

    def ahead(self, name: Hashable, caller: Hashable = None) -> Work:
        """Return the work that runs before a job which this caller adds to this lane now: at most all that waits.

        It is the caller's fair share of the lane (`FairQueue.fair_share`), and as much for each other lane.
        """
        own, num_lanes = self.jobs(name).fair_share(caller), len(self._lanes)
        return Work(min(self.num_flops, own.flops * num_lanes), min(self.num_jobs, own.num_jobs * num_lanes))

    def append(self, job: J) -> None:
        lane = self._lanes.get(job.lane)
        if lane is None:
            start = max(self._virtual_time, self._debts.pop(job.lane, 0))
            lane = self._lanes[job.lane] = FairQueue(start, self._flops_per_sequence)
        lane.append(job)
        self._count(1, job)

    def remove(self, job: J, *, is_served: bool = False) -> bool:
        """Remove a job from any position; return False if it does not wait here."""
        lane = self._lanes.get(job.lane)
        if lane is None or not lane.remove(job, is_served=is_served):
            return False
        self._count(-1, job)
        if not lane:
            del self._lanes[job.lane]
            if lane.start > self._virtual_time:
                self._debts[job.lane] = lane.start
        return True

    def take(self, limits: BatchLimits, max_flops: float = math.inf) -> list[J]:
        """Take and charge the next batch; empty only if nothing waits."""
        if not self._lanes:
            return []
        batch, _ = _fitting(self.next_jobs, limits, max_flops)
        lane = self._lanes[batch[0].lane]
        self._virtual_time = max(self._virtual_time, lane.start)
        lane.start += sum([lane.charge(job) for job in batch]) + BATCH_OVERHEAD_FLOPS
        for job in batch:
            self.remove(job, is_served=True)
        self._debts = {debtor: start for debtor, start in self._debts.items() if start > self._virtual_time}
        return batch

    def clear(self) -> list[J]:
        """Remove all jobs and return them."""
        jobs = [job for lane in self._lanes.values() for job in lane]
        for job in jobs:
            self.remove(job)
        return jobs

    def reset_shares(self) -> None:
        """Clear debts and reset virtual time if no job waits. Call it only while no batch runs."""
        if not self._lanes:
            self._debts.clear()
            self._virtual_time = 0

    def _count(self, sign: int, job: J) -> None:
        self.add(job.cost, sign)
        if job.caller is not None:
            held = self._held.setdefault(job.caller, Totals())
            held.add(job.cost, sign)
            if not held.num_jobs:
                del self._held[job.caller]


def size_class(cost: Cost, limits: BatchLimits) -> int:
    """Return the job's size class. Each class waits in its own lane, so that light jobs do not wait for heavy ones.

    0 if eight or more fit into a batch, 1 for larger ones that may share a batch, 2 for one that runs alone.
    """
    fill = max(
        cost.tokens / limits.max_tokens,
        cost.cells / limits.max_cells,
        cost.weights_bytes / limits.max_weights_bytes,
    )
    return 2 if fill > 1 else int(fill > 1 / LIGHT_IN_A_BATCH)


def full_batch(jobs: Iterable[J], limits: BatchLimits, max_flops: float = math.inf) -> list[J]:
    """Return the next batch of these jobs if it is full, else an empty list."""
    batch, is_full = _fitting(jobs, limits, max_flops)
    return batch if is_full else []


def _fitting(jobs: Iterable[J], limits: BatchLimits, max_flops: float) -> tuple[list[J], bool]:
    """Return the first jobs that keep all limits together, and whether they are a full batch: no other job may join.

    It is full if its rows, scores or requests are at their limit, or the next job does not fit: skipping one would reorder the
    lane. At the limit of weights or flops a job with less of them may still join.
    """
    batch: list[J] = []
    tokens = cells = weights_bytes = flops = 0
    for job in jobs:
        tokens += job.cost.tokens
        cells += job.cost.cells
        weights_bytes += job.cost.weights_bytes
        flops += job.cost.flops
        fits = (
            len(batch) < limits.max_requests
            and tokens <= limits.max_tokens
            and cells <= limits.max_cells
            and weights_bytes <= limits.max_weights_bytes
            and flops <= max_flops
        )
        if batch and not fits:
            return batch, True
        batch.append(job)
    return batch, len(batch) >= limits.max_requests or tokens >= limits.max_tokens or cells >= limits.max_cells
