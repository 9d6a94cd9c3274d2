"""Batcher: admits jobs to one of two queues, short or long, and settles each job with a result or an error.

Independent of tensors, HTTP and metrics. The policy chooses batches, admission refuses jobs, a dispatcher serves each queue, the
runner retries failed batches.
Invariants: Every admitted job is settled exactly once. Check and append happen without an await in between. All state changes are
synchronous methods on the loop, so there are no locks. A long job, or one of unknown length, never delays a short one: each queue
has its own batch in flight, virtual time and speed. If a dispatcher dies or a batch makes no progress, every job fails. Draining
admits nothing.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Hashable
from functools import partial
from typing import Generic

from service.batching.admission import Admission, Congestion, Queue, QueueLimits, Speed
from service.batching.dispatcher import Dispatcher
from service.batching.engine_protocol import Engine, Observer
from service.batching.job import NOTHING, Cost, Job, Outcome, P, R
from service.batching.policy import BatchLimits, Lanes
from service.batching.runner import MAX_SEQUENCES, InlinePolicy, Runner
from service.errors import Draining, EngineDown, NotReady, ServiceError
from service.loop_time import Clock

DOWN = "the engine has stopped; this process computes nothing until it is replaced"


class Batcher(Generic[P, R]):
    """The queues of one engine, on one event loop."""

    def __init__(
        self,
        engine: Engine[P, R],
        batch_limits: BatchLimits,
        queue_limits: QueueLimits,
        clock: Clock,
        observer: Observer,
    ) -> None:
        self._engine = engine
        self._limits = queue_limits
        self._clock = clock
        self._observer = observer
        self._policy = InlinePolicy(queue_limits.inline_s, queue_limits.overhead_flops)
        queues = [
            Queue(
                is_long,
                Lanes(queue_limits.flops_per_sequence),
                Speed(),
                Congestion(queue_limits.standing_wait_s),
            )
            for is_long in (False, True)
        ]
        self._admission = Admission(queue_limits, *queues)
        beside = asyncio.Lock()
        self._short, self._long = self._dispatchers = [
            Dispatcher(
                queue,
                Runner(engine, clock, observer, queue, queue_limits, self._policy, beside),
                self._admission,
                batch_limits,
                queue_limits.max_wait_s,
                clock,
                self._report_queue,
            )
            for queue in queues
        ]
        self._tasks: list[asyncio.Task[None]] = []
        self.is_draining = False
        self._is_stopping = self._has_died = False
        self._failure: EngineDown | None = None

    @property
    def is_alive(self) -> bool:
        return bool(self._tasks) and not any(task.done() for task in self._tasks)

    async def ended_within(self, seconds: float) -> bool:
        """Wait until a dispatcher ends, at most that long; return whether one has ended."""
        assert self._tasks, "the batcher was not started. This is a bug."
        await asyncio.wait(self._tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return not self.is_alive

    @property
    def num_queued(self) -> int:
        return self._admission.waiting.num_jobs

    @property
    def num_running(self) -> int:
        """Number of unsettled jobs in the batches in flight."""
        return sum([dispatcher.num_running for dispatcher in self._dispatchers])

    def start(self) -> None:
        if self._tasks:
            raise RuntimeError("the batcher was started twice. This is a bug.")
        loop = asyncio.get_running_loop()
        for name, dispatcher in (("batcher", self._short), ("batcher-long", self._long)):
            self._tasks.append(loop.create_task(dispatcher.serve(), name=name))
        for task in self._tasks:
            task.add_done_callback(self._end)

    async def submit(
        self,
        payload: P,
        lane: Hashable,
        cost: Cost,
        deadline: float,
        caller: Hashable = None,
        own_deadline: float = math.inf,
    ) -> Outcome[R]:
        """Return the answer to a payload by a finite deadline on the clock; distinct callers get fair shares.

        `own_deadline` is the service's, which the caller's may precede: a forecast beyond it is a QueueFull.

        Raises CostLimit, QueueFull or NotReady before admission, Draining, DeadlineExceeded or EngineDown before or after it,
        EngineFailed or the engine's own ServiceError after it. Cancelling it at any moment leaves nothing behind.
        """
        job = self.admit(payload, lane, cost, deadline, caller, own_deadline)
        try:
            return await job.promise
        finally:
            self._withdraw(job)
            # Else a cycle keeps the tensors until a garbage collection: error -> traceback -> frame -> job -> promise -> error.
            del job, payload

    def admit(
        self,
        payload: P,
        lane: Hashable,
        cost: Cost,
        deadline: float,
        caller: Hashable = None,
        own_deadline: float = math.inf,
    ) -> Job[P, R]:
        """Check a job and append it in one synchronous step."""
        self._check_open()
        rate = self._engine.rate(payload)
        dispatcher = self._long if self._is_long(lane, cost, rate) else self._short
        dispatcher.queue.speed.seed(rate)
        job: Job[P, R] = Job(payload, lane, cost, deadline=deadline, clock=self._clock, caller=caller)
        self._admission.check(dispatcher.queue, job, own_deadline)
        job.timer = self._clock.call_at(deadline, partial(self._expire, job))
        dispatcher.append(job)
        if self._admission.is_full:  # then no batch of either queue waits for more jobs
            for each in self._dispatchers:
                each.notify()
        self._report_queue()
        return job

    def _is_long(self, lane: Hashable, cost: Cost, first_rate: float) -> bool:
        """Whether the job may take longer than `long_s`, by the rate of its lane, else by that of the self-check.

        Many sequences may take any time, because flops predict it badly, and so may the first computation in a dtype.
        """
        if math.isinf(self._limits.long_s):
            return False
        rate = self._policy.rate(lane) or first_rate
        is_large = cost.flops + self._limits.overhead_flops > rate * self._limits.long_s
        return not first_rate or cost.sequences > MAX_SEQUENCES or is_large

    def check_open(self, caller: Hashable = None) -> None:
        """Raise the error that even the smallest job of any lane would get now; call it before a job is made."""
        self._check_open()
        if self.num_queued:
            self._admission.check_room(NOTHING, caller)

    @property
    def is_congested(self) -> bool:
        """Whether any lane holds too much, so that `check_lane` may raise."""
        return any(dispatcher.queue.congestion.has_long_queue for dispatcher in self._dispatchers)

    @property
    def num_overloaded(self) -> int:
        """Number of lanes in sustained overload; 0 of a queue while no job waits there and none of its batches runs."""
        return sum([dispatcher.num_overloaded for dispatcher in self._dispatchers])

    def check_lane(self, lane: Hashable, cost: Cost, caller: Hashable = None) -> None:
        """Raise QueueFull if this lane sheds load in the queue of a job of this cost; `check_open` raises for other reasons."""
        self._admission.check_lane(self._queue(lane, cost), lane, caller, self._clock.now())

    def note_arrival(self, lane: Hashable, cost: Cost, caller: Hashable = None) -> Callable[[], None]:
        """Count a request that likely becomes a job of this cost; call what is returned when it does, or ends."""
        queue = self._queue(lane, cost)
        queue.note_arrival(lane, caller, cost.flops)
        return partial(queue.note_arrival, lane, caller, -cost.flops)

    def _queue(self, lane: Hashable, cost: Cost) -> Queue:
        """Return the queue for a job of which only the cost is known."""
        rate = self._policy.rate(lane)
        return (self._long if rate and self._is_long(lane, cost, rate) else self._short).queue

    def begin_drain(self) -> None:
        """Admit nothing more; dispatch waiting jobs without waiting for others to join them."""
        self.is_draining = True
        for dispatcher in self._dispatchers:
            dispatcher.begin_drain()

    async def drain(self, timeout_s: float) -> int:
        """Admit nothing more and finish admitted jobs; after `timeout_s` fail the rest with Draining and return how many."""
        self.begin_drain()
        until = self._clock.now() + timeout_s
        for dispatcher in self._dispatchers:
            while dispatcher.queue.lanes.num_jobs + dispatcher.num_running and self._clock.now() < until:
                await dispatcher.wait(until)
        return self.give_up()

    def give_up(self) -> int:
        """Admit nothing more and fail every waiting or running job at once; return how many."""
        self.begin_drain()
        return self._fail_all(partial(Draining, "the service shut down before the request finished"))

    async def stop(self) -> None:
        """End the tasks; jobs that still wait fail with Draining."""
        self._is_stopping = True
        self.give_up()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

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
        if any(dispatcher.forget(job) for dispatcher in self._dispatchers):
            self._report_queue()

    def _fail_all(self, error: Callable[[], ServiceError]) -> int:
        """Fail every waiting or running job, each with an error of its own; return how many."""
        jobs = [job for dispatcher in self._dispatchers for job in dispatcher.clear()]
        num_failed = sum(job.fail(error()) for job in jobs if not job.is_settled)
        for dispatcher in self._dispatchers:
            dispatcher.runner.stop_if_unwanted()
        self._report_queue()
        return num_failed

    def fail(self, failure: EngineDown) -> None:
        """End as if a batch had failed with this error: the engine was found to be down outside a batch."""
        assert self._tasks, "the batcher was not started. This is a bug."
        self._failure = failure
        self._tasks[0].cancel()

    def _end(self, task: asyncio.Task[None]) -> None:
        """Fail all jobs when the first dispatcher ends, however it ended, even if it was cancelled before its first step."""
        error = self._failure if task.cancelled() else task.exception()
        if self._has_died:
            return
        self._has_died = True
        for other in self._tasks:
            other.cancel()
        num_failed = self._fail_all(partial(EngineDown, DOWN))
        for dispatcher in self._dispatchers:
            dispatcher.running = []
        if not self._is_stopping:
            self._observer.died(num_failed, error)

    def _check_open(self) -> None:
        if any(task.done() for task in self._tasks) and not self._is_stopping:
            raise EngineDown(DOWN)
        if self.is_draining:
            raise Draining("the service is shutting down and accepts no new requests")
        if not self._tasks:
            raise NotReady("the service has not started yet")

    def _report_queue(self) -> None:
        waiting = self._admission.waiting
        self._observer.queue_changed(waiting.num_jobs, waiting.num_bytes)
