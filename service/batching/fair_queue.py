"""Fair queue: orders the waiting jobs of one lane so that each caller gets its share of compute.

Independent of clocks, asyncio, the engine and what a caller is (an API key; None if there are no keys).
Invariants: With one caller the order is that of arrival. Jobs of one caller keep their order. Callers that always have a job
waiting get equal work, to within one job each (start-time fair queueing over callers: Goyal, Vin, Cheng 1996).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterator
from typing import Generic, Protocol, TypeVar

from service.batching.job import Cost

# Work charged per job besides its flops, so that small requests are not free: the loop's own work for a job takes as long as
# 2**24 flops.
JOB_OVERHEAD_FLOPS = 2**24


class Waiting(Protocol):
    """What the queue reads of a job; jobs are compared by identity."""

    @property
    def lane(self) -> Hashable: ...

    @property
    def caller(self) -> Hashable: ...

    @property
    def cost(self) -> Cost: ...


J = TypeVar("J", bound=Waiting)


class _Caller(Generic[J]):
    """One caller's jobs with their virtual start times, and the virtual start time of its next job."""

    __slots__ = ("flops", "jobs", "next_start")

    def __init__(self, start: int) -> None:
        self.jobs: OrderedDict[J, int] = OrderedDict()  # ordered; O(1) at the front, the back and in between
        self.flops = 0
        self.next_start = start


class FairQueue(Collection[J]):
    """Jobs in the order in which they are to be served; `flops` is the work of all of them."""

    def __init__(self) -> None:
        self.flops = 0
        self._num_jobs = 0
        self._virtual_time = 0
        self._callers: dict[Hashable, _Caller[J]] = {}

    def __len__(self) -> int:
        return self._num_jobs

    def __contains__(self, job: object) -> bool:
        return any(job in caller.jobs for caller in self._callers.values())

    def __iter__(self) -> Iterator[J]:
        if len(self._callers) == 1:
            return iter(next(iter(self._callers.values())).jobs)
        by_start = ([(start, job) for job, start in caller.jobs.items()] for caller in self._callers.values())
        return (job for _, job in heapq.merge(*by_start, key=lambda entry: entry[0]))

    @property
    def heads(self) -> Iterator[J]:
        """The oldest job of each caller."""
        return (next(iter(caller.jobs)) for caller in self._callers.values() if caller.jobs)

    def num_callers(self, with_caller: Hashable) -> int:
        """Return the number of callers with a waiting job, `with_caller` included."""
        return len({with_caller} | {name for name, caller in self._callers.items() if caller.jobs})

    def num_of(self, caller: Hashable) -> int:
        return len(self._callers[caller].jobs) if caller in self._callers else 0

    def flops_of(self, caller: Hashable) -> int:
        return self._callers[caller].flops if caller in self._callers else 0

    def append(self, job: J) -> None:
        caller = self._callers.get(job.caller)
        if caller is None:
            caller = self._callers[job.caller] = _Caller(self._virtual_time)
        start = max(caller.next_start, self._virtual_time)
        caller.jobs[job] = start
        caller.next_start = start + job.cost.flops + JOB_OVERHEAD_FLOPS
        caller.flops += job.cost.flops
        self.flops += job.cost.flops
        self._num_jobs += 1

    def remove(self, job: J, *, is_served: bool = False) -> bool:
        """Remove a job from any position; return False if it is not in the queue."""
        caller = self._callers.get(job.caller)
        start = None if caller is None else caller.jobs.pop(job, None)
        if caller is None or start is None:
            return False
        caller.flops -= job.cost.flops
        self.flops -= job.cost.flops
        self._num_jobs -= 1
        if is_served:
            self._virtual_time = max(self._virtual_time, start)
        if not caller.jobs and caller.next_start <= self._virtual_time:
            del self._callers[job.caller]
        return True
