"""Batcher: admits jobs, dispatches them to the engine in batches, and settles each with a result or an error.

Independent of tensors, HTTP and metrics. The policy chooses batches, admission refuses jobs, the runner retries failed batches.
Invariants: Every admitted job is settled exactly once. Check and append happen without an await in between. All state changes are
synchronous methods on the loop, so there are no locks. One batch is in flight at a time. At most one more is preempted between
two of its steps, while due batches of other lanes get their share. Nothing polls. Before an inline batch blocks the loop, arrived
requests are taken in, as far as they fit. If the task dies or a step does not end, every job fails. Draining admits nothing.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Hashable
from functools import partial
from typing import Generic

from service.batching.admission import Admission, QueueLimits
from service.batching.engine_protocol import Engine, Observer
from service.batching.job import NOTHING, Cost, Job, Outcome, P, R
from service.batching.policy import MAX_FLOPS_BETWEEN, BatchLimits, FairQueue, Lanes, full_batch
from service.batching.runner import Runner
from service.errors import Draining, EngineDown, NotReady, ServiceError
from service.loop_time import Clock

DOWN = "the engine has stopped; this process computes nothing until it is replaced"


class Batcher(Generic[P, R]):
    """The queue of one engine, on one event loop."""

    def __init__(
        self,
        engine: Engine[P, R],
        batch_limits: BatchLimits,
        queue_limits: QueueLimits,
        clock: Clock,
        observer: Observer,
    ) -> None:
        self._batch_limits = batch_limits
        self._queue_limits = queue_limits
        self._clock = clock
        self._observer = observer
        self._lanes: Lanes[Job[P, R]] = Lanes()
        self._admission = Admission(queue_limits, self._lanes)
        self._speed, self._congestion = self._admission.speed, self._admission.congestion
        self._running: list[Job[P, R]] = []  # the batch in flight, settled members included
        self._preempted: list[Job[P, R]] = []  # the long batch that is preempted between two steps, likewise
        self._runner = Runner(engine, clock, observer, self._speed, queue_limits, self._give_way)
        self._changed = asyncio.Event()  # a job arrived, left or finished, or a drain began: wakes the task and `drain`
        self._task: asyncio.Task[None] | None = None
        self.is_draining = False
        self._is_stopping = False
        self._failure: EngineDown | None = None

    @property
    def is_alive(self) -> bool:
        return self._task is not None and not self._task.done()

    async def ended_within(self, seconds: float) -> bool:
        """Wait until the batcher's task ends, at most that long; return whether it has ended."""
        assert self._task is not None, "the batcher was not started. This is a bug."
        await asyncio.wait([self._task], timeout=seconds)
        return self._task.done()

    @property
    def num_queued(self) -> int:
        return self._lanes.num_jobs

    @property
    def num_running(self) -> int:
        """Number of unsettled jobs in the batch in flight and in the preempted one."""
        return sum(not job.is_settled for job in (*self._running, *self._preempted))

    def start(self) -> None:
        if self._task is not None:
            raise RuntimeError("the batcher was started twice. This is a bug.")
        self._task = asyncio.get_running_loop().create_task(self._serve(), name="batcher")
        self._task.add_done_callback(self._end)

    async def submit(
        self, payload: P, lane: Hashable, cost: Cost, deadline: float, caller: Hashable = None
    ) -> Outcome[R]:
        """Return the answer to a payload by a finite deadline on the clock; distinct callers get fair shares.

        Raises CostLimit, QueueFull or NotReady before admission, Draining, DeadlineExceeded or EngineDown before or after it,
        EngineFailed or the engine's own ServiceError after it. Cancelling it at any moment leaves nothing behind.
        """
        job = self.admit(payload, lane, cost, deadline, caller)
        try:
            return await job.promise
        finally:
            self._withdraw(job)
            # Else a cycle keeps the tensors until a garbage collection: error -> traceback -> frame -> job -> promise -> error.
            del job, payload

    def admit(self, payload: P, lane: Hashable, cost: Cost, deadline: float, caller: Hashable = None) -> Job[P, R]:
        """Check a job and append it in one synchronous step."""
        self._check_open()
        now = self._clock.now()
        self._admission.check(lane, cost, deadline - now, now, caller)
        job: Job[P, R] = Job(payload, lane, cost, deadline=deadline, clock=self._clock, caller=caller)
        job.timer = self._clock.call_at(deadline, partial(self._expire, job))
        self._lanes.append(job)
        self._changed.set()
        self._report_queue()
        return job

    def check_open(self, caller: Hashable = None) -> None:
        """Raise the error that even the smallest job of any lane would get now; call it before a job is made."""
        self._check_open()
        if self._lanes.num_jobs:
            self._admission.check_room(NOTHING, caller)

    @property
    def is_congested(self) -> bool:
        """Whether any lane has a long queue, so that `check_lane` may raise."""
        return self._congestion.has_long_queue

    @property
    def num_overloaded(self) -> int:
        """Number of lanes in sustained overload; 0 while no job waits and no batch runs (a preempted one does not run)."""
        return self._congestion.num_overloaded if self._lanes.num_jobs or self._running else 0

    def check_lane(self, lane: Hashable, caller: Hashable = None, coming_flops: int = 0) -> None:
        """Raise QueueFull if this lane sheds load (`Admission.check_congestion`); `check_open` raises for the other reasons."""
        self._admission.check_congestion(lane, self._clock.now(), caller, coming_flops)

    def begin_drain(self) -> None:
        """Admit nothing more; dispatch waiting jobs without waiting for others to join them."""
        self.is_draining = True
        self._changed.set()

    async def drain(self, timeout_s: float) -> int:
        """Admit nothing more and finish admitted jobs; after `timeout_s` fail the rest with Draining and return how many."""
        self.begin_drain()
        until = self._clock.now() + timeout_s
        while self.num_queued + self.num_running and self._clock.now() < until:
            await self._wait(until)
        return self.give_up()

    def give_up(self) -> int:
        """Admit nothing more and fail every waiting or running job at once; return how many."""
        self.begin_drain()
        return self._fail_all(partial(Draining, "the service shut down before the request finished"))

    async def stop(self) -> None:
        """End the task; jobs that still wait fail with Draining."""
        self._is_stopping = True
        self.give_up()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _serve(self) -> None:
        while True:
            await self._gather()
            await self._execute()
            # Under overload a loop tick takes longer than a full batch, so several full batches run in one tick.
            full = full_batch(self._lanes.next_jobs, self._batch_limits)
            if not (full and self._runner.is_inline(full)):
                await self._runner.yield_to_loop()

    async def _gather(self) -> None:
        """Return when a batch is due; the engine is idle meanwhile."""
        lanes, capacity = self._lanes, self._queue_limits.capacity
        if not lanes.num_jobs:
            lanes.reset_shares()
            self._congestion.idle(self._clock.now())
        # Any due lane counts: the next one may still wait for jobs, but the engine would be idle.
        while lanes.num_jobs < capacity and (due_at := lanes.first_due_at(self._due_at)) > self._clock.now():
            await self._wait(due_at)
        # Before an inline batch that can grow blocks the loop, take in arrived requests until a pass over the sockets adds none.
        num_jobs = 0
        while (
            len(jobs := lanes.next_jobs) > num_jobs
            and lanes.num_jobs < capacity
            and not full_batch(jobs, self._batch_limits)
            and self._runner.is_inline(jobs)
        ):
            num_jobs = len(jobs)
            await self._runner.take_in_arrivals()

    async def _wait(self, until: float) -> None:
        """Wait for the next change or until a time, which may be infinite."""
        self._changed.clear()
        timer = self._clock.call_at(until, self._changed.set) if math.isfinite(until) else None
        try:
            await self._changed.wait()
        finally:
            if timer is not None:
                timer.cancel()

    def _due_at(self, jobs: FairQueue[Job[P, R]]) -> float:
        """Return when the next batch of this lane is due: at once unless it waits for more jobs."""
        max_wait_s = self._queue_limits.max_wait_s
        if max_wait_s <= 0 or self.is_draining or full_batch(jobs, self._batch_limits):
            return -math.inf
        return min(job.due_at(max_wait_s) for job in jobs)

    async def _give_way(self, lane: Hashable, seconds: float, is_last: bool) -> None:
        """Charge this lane for a step of `seconds`; if its batch is now preempted, run due batches of others, up to their share.

        A long batch waits until the preempted one has ended: at most one is preempted, so the memory held is bounded.
        """
        charge = self._speed.charge_rate * seconds
        if is_last:
            self._lanes.charge_last_step(lane, charge)
            return
        self._lanes.preempt(lane, charge)
        self._preempted, self._running = self._running, []
        while self._lanes.num_jobs and (name := self._lanes.next_between(self._may_run_between)) is not None:
            await self._execute(name)
            await self._runner.take_in_arrivals()
        self._running, self._preempted = self._preempted, []

    def _may_run_between(self, jobs: FairQueue[Job[P, R]]) -> bool:
        """Whether a lane's next batch, made of these jobs, is due and short."""
        return next(iter(jobs)).cost.flops <= MAX_FLOPS_BETWEEN and self._due_at(jobs) <= self._clock.now()

    async def _execute(self, name: Hashable = None) -> None:
        """Take a batch (of lane `name`, if given), drop jobs that are over by now (`_is_over`), and run the rest."""
        batch = self._lanes.take(self._batch_limits, name)
        if batch:
            lane, flops = batch[0].lane, sum([job.cost.flops for job in batch])
            self._congestion.dispatched(lane, flops, self._lanes.jobs(lane).flops, self._speed.rate, self._clock.now())
        self._running = [job for job in batch if not self._is_over(job)]
        del batch
        self._report_queue()
        await self._runner.run(self._running)
        self._running = []
        self._changed.set()

    def _is_over(self, job: Job[P, R]) -> bool:
        """Whether no caller waits any more; fail a job whose deadline has passed although its timer has not fired yet."""
        if job.deadline <= self._clock.now():
            job.expire()
        return job.is_settled

    def _expire(self, job: Job[P, R]) -> None:
        """Fail the job at its deadline: if it waits it will not run, and if it runs its result will be discarded."""
        job.expire()
        self._forget(job)

    def _withdraw(self, job: Job[P, R]) -> None:
        """Cancel and remove a job whose caller leaves before the job is settled; do nothing for a settled job."""
        if job.settled_at is None:  # a settled job has left the queue already
            job.fail(asyncio.CancelledError())
            self._forget(job)

    def _forget(self, job: Job[P, R]) -> None:
        if self._lanes.remove(job):
            if not self._lanes.jobs(job.lane):
                self._congestion.emptied(job.lane, self._clock.now())
            self._report_queue()
        self._changed.set()

    def _fail_all(self, error: Callable[[], ServiceError]) -> int:
        """Fail every waiting or running job, each with an error of its own; return how many."""
        jobs = [*self._running, *self._preempted, *self._lanes.clear()]
        num_failed = sum(job.fail(error()) for job in jobs if not job.is_settled)
        self._changed.set()
        self._report_queue()
        return num_failed

    def fail(self, failure: EngineDown) -> None:
        """End as if a batch had failed with this error: the engine was found to be down outside a batch."""
        assert self._task is not None, "the batcher was not started. This is a bug."
        self._failure = failure
        self._task.cancel()

    def _end(self, task: asyncio.Task[None]) -> None:
        """Fail all jobs when the task ends, however it ended, even if it was cancelled before its first step."""
        error = self._failure if task.cancelled() else task.exception()
        num_failed = self._fail_all(partial(EngineDown, DOWN))
        self._running, self._preempted = [], []
        if not self._is_stopping:
            self._observer.died(num_failed, error)

    def _check_open(self) -> None:
        if self._task is not None and self._task.done() and not self._is_stopping:
            raise EngineDown(DOWN)
        if self.is_draining:
            raise Draining("the service is shutting down and accepts no new requests")
        if self._task is None:
            raise NotReady("the service has not started yet")

    def _report_queue(self) -> None:
        self._observer.queue_changed(self._lanes.num_jobs, self._lanes.num_bytes)
