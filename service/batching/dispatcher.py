"""Dispatcher: takes the batches of one queue, one at a time, and has them run on the engine's thread of that queue.

Independent of callers and of admission: the batcher appends the jobs.
Invariants: One batch of the queue is in flight at a time. Nothing polls. Before an inline batch blocks the loop, arrived requests
are taken in, as far as they fit.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic

from service.batching.admission import Admission, Queue
from service.batching.job import Job, P, R
from service.batching.policy import BatchLimits, FairQueue, full_batch
from service.batching.runner import Runner
from service.loop_time import Clock


@dataclass(eq=False, repr=False)
class Dispatcher(Generic[P, R]):
    """Serves one queue. `report` is called after jobs have left the queue to run."""

    queue: Queue
    runner: Runner[P, R]
    admission: Admission
    batch_limits: BatchLimits
    max_wait_s: float
    clock: Clock
    report: Callable[[], object]
    running: list[Job[P, R]] = field(default_factory=list)
    """The batch in flight, settled jobs included."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)  # a job arrived, left or finished, or a drain began
    _is_draining: bool = False

    @property
    def num_running(self) -> int:
        """Number of unsettled jobs in the batch in flight."""
        return sum(not job.is_settled for job in self.running)

    @property
    def num_overloaded(self) -> int:
        """Number of lanes in sustained overload; 0 while no job waits and no batch runs."""
        return self.queue.congestion.num_overloaded if self.queue.lanes.num_jobs or self.running else 0

    def append(self, job: Job[P, R]) -> None:
        self.queue.lanes.append(job)
        self.notify()

    def notify(self) -> None:
        """Look again whether a batch is due."""
        self._changed.set()

    def forget(self, job: Job[P, R]) -> bool:
        """Remove a settled job that waits, or stop the batch if the job was the last one; return whether it waited here."""
        is_waiting = self.queue.lanes.remove(job)
        if not is_waiting:
            self.runner.stop_if_unwanted()
        elif not self.queue.flops(job.lane):
            self.queue.congestion.emptied(job.lane, self.clock.now())
        self._changed.set()
        return is_waiting

    def clear(self) -> list[Job[P, R]]:
        """Remove all waiting jobs; return them and those of the batch in flight."""
        self._changed.set()
        return [*self.running, *self.queue.lanes.clear()]

    def begin_drain(self) -> None:
        """From now on dispatch waiting jobs without waiting for others to join them."""
        self._is_draining = True
        self._changed.set()

    async def serve(self) -> None:
        """Run batches until cancelled; raise EngineDown if the engine is down."""
        while True:
            await self._gather()
            async with self.runner.turn():
                await self._execute()
            # Under overload a loop tick takes longer than a full batch, so several full batches run in one tick.
            full = self._full_batch(self.queue.lanes.next_jobs)
            if not (full and self.runner.is_inline(full)):
                await self.runner.yield_to_loop()

    async def wait(self, until: float) -> None:
        """Wait for the next change or until a time, which may be infinite."""
        self._changed.clear()
        timer = self.clock.call_at(until, self._changed.set) if math.isfinite(until) else None
        try:
            await self._changed.wait()
        finally:
            if timer is not None:
                timer.cancel()

    async def _gather(self) -> None:
        """Return when a batch is due; this queue's thread is idle meanwhile."""
        lanes = self.queue.lanes
        if not lanes.num_jobs:
            lanes.reset_shares()
        if self.queue.is_empty:
            self.queue.congestion.idle(self.clock.now())
        # Any due lane counts: the next one may still wait for jobs, but the thread would be idle.
        while (due_at := lanes.first_due_at(self._due_at)) > self.clock.now():
            if lanes.num_jobs and self.admission.is_full:
                break
            await self.wait(due_at)
        # Before an inline batch that can grow blocks the loop, take in arrived requests until a pass over the sockets adds none.
        num_jobs = 0
        while (
            len(jobs := lanes.next_jobs) > num_jobs
            and not self.admission.is_full
            and not self._full_batch(jobs)
            and self.runner.is_inline(jobs)
        ):
            num_jobs = len(jobs)
            await self.runner.take_in_arrivals()

    def _due_at(self, jobs: FairQueue[Job[P, R]]) -> float:
        """Return when the next batch of this lane is due: at once unless it waits for more jobs."""
        if self.max_wait_s <= 0 or self._is_draining or self._full_batch(jobs):
            return -math.inf
        return min(job.due_at(self.max_wait_s) for job in jobs)

    def _full_batch(self, jobs: FairQueue[Job[P, R]]) -> list[Job[P, R]]:
        """Return the next batch of one lane's jobs if it is full, else an empty list."""
        return full_batch(jobs, self.batch_limits, self._max_flops(jobs))

    def _max_flops(self, jobs: FairQueue[Job[P, R]]) -> float:
        return self.runner.max_flops(next(iter(jobs)).lane) if jobs else math.inf

    async def _execute(self) -> None:
        """Take a batch, fail its jobs whose deadline has passed although their timers have not fired yet, and run the others."""
        lanes = self.queue.lanes
        batch, now = lanes.take(self.batch_limits, self._max_flops(lanes.next_jobs)), self.clock.now()
        if batch:
            lane, flops = batch[0].lane, sum([job.cost.flops for job in batch])
            self.queue.congestion.dispatched(lane, flops, self.queue.flops(lane), self.queue.speed.rate, now)
        for job in batch:
            if job.deadline <= now:
                job.expire()
        self.running = [job for job in batch if not job.is_settled]
        del batch
        self.report()
        await self.runner.run(self.running)
        self.running = []
        self._changed.set()
