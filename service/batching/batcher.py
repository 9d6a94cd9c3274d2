"""The batcher: admits jobs, dispatches batches, settles what comes back.

Lives here: the waiting room's state and its one task; it meets the engine in one small Protocol.
Must not know: tensors, HTTP, metrics; which jobs run together (policy), what may come in (admission),
what is tried when a batch fails (runner).
Laws: every admitted job is settled exactly once; check and append happen without an await between; all state changes
are plain synchronous methods on the loop, hence no locks; one batch is in flight at a time, and at most one more has stopped
between two of its steps, while due batches of other lanes have their share; nothing polls; before the loop waits for a brief
batch it takes in what has come, as far as that fits into it; if the loop dies, or a step does not end, everyone is told;
draining admits nothing.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Hashable
from functools import partial
from typing import Generic

from service.batching.admission import Queue, QueueLimits, check_cost, check_room, check_standing, check_time
from service.batching.clock import Clock
from service.batching.congestion import Congestion
from service.batching.engine_protocol import Engine
from service.batching.job import NOTHING, Cost, Job, Outcome, P, R
from service.batching.observer import CancelEvent, DeathEvent, Observer
from service.batching.policy import MAX_FLOPS_BETWEEN, BatchLimits, Lanes, is_full, take
from service.batching.runner import Runner, let_come_in
from service.batching.speed import Speed
from service.errors import Draining, EngineDown, NotReady, ServiceError

DOWN = "the engine has stopped working; nothing can be computed until this process is replaced"


class Batcher(Generic[P, R]):
    """The waiting room of one engine, on one event loop."""

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
        self._running: list[Job[P, R]] = []  # the batch in flight, with its members that are settled already
        self._speed = Speed()
        self._stopped: list[Job[P, R]] = []  # the long batch that has stopped, likewise
        self._runner = Runner(engine, clock, observer, self._speed, queue_limits.compute, self._give_way)
        self._congestion = Congestion(queue_limits.standing_wait_s)
        self._queue = Queue(queue_limits, self._lanes, self._speed, self._congestion)
        self._arrived = asyncio.Event()  # a job came, or what waits is less: the task looks again
        self._left = asyncio.Event()  # a job went: drain looks again
        self._task: asyncio.Task[None] | None = None
        self._is_draining = False
        self._is_stopping = False

    @property
    def is_alive(self) -> bool:
        return self._task is not None and not self._task.done()

    async def ended_within(self, seconds: float) -> bool:
        """Whether the loop ends in that time; wakes as soon as it does."""
        assert self._task is not None, "the batcher was not started. This is a bug."
        await asyncio.wait([self._task], timeout=seconds)
        return self._task.done()

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @property
    def num_queued(self) -> int:
        return self._lanes.num_jobs

    @property
    def queued_bytes(self) -> int:
        return self._lanes.num_bytes

    @property
    def num_running(self) -> int:
        """Jobs of the batch in flight, and of the one that has stopped, that somebody still waits for."""
        return sum(not job.is_settled for job in (*self._running, *self._stopped))

    def start(self) -> None:
        if self._task is not None:
            raise RuntimeError("the batcher was started twice. This is a bug.")
        self._task = asyncio.get_running_loop().create_task(self._serve(), name="batcher")
        self._task.add_done_callback(self._end)

    async def submit(
        self, payload: P, lane: Hashable, cost: Cost, deadline: float, caller: Hashable = None
    ) -> Outcome[R]:
        """The answer to a payload, by a finite deadline on the clock; callers that are told apart get fair shares.

        Raises CostLimit, QueueFull, NotReady before it is admitted, Draining, DeadlineExceeded and EngineDown before or
        after, EngineFailed or the engine's own ServiceError after. Cancelling it at any moment leaves nothing behind.
        """
        job = self.admit(payload, lane, cost, deadline, caller)
        try:
            return await job.promise
        except asyncio.CancelledError:
            self._observer.job_cancelled(CancelEvent(lane, job.stage))
            raise
        finally:
            self._withdraw(job)
            del job, payload  # else error -> traceback -> frame -> job -> promise -> error keeps the tensors till a gc

    def admit(self, payload: P, lane: Hashable, cost: Cost, deadline: float, caller: Hashable = None) -> Job[P, R]:
        """Check and append in one synchronous step."""
        self._check_open()
        check_cost(cost, self._queue_limits)
        queue, now = self._queue, self._clock.now()
        check_room(cost, queue, caller)
        check_standing(lane, queue, now, caller)
        check_time(lane, cost.flops, deadline - now, queue, now, caller)
        job: Job[P, R] = Job(payload, lane, cost, deadline=deadline, clock=self._clock, caller=caller)
        job.timer = self._clock.call_at(deadline, partial(self._expire, job))
        self._lanes.append(job)
        self._arrived.set()
        self._tell_queue()
        return job

    def check_open(self, caller: Hashable = None) -> None:
        """Raise what even the smallest job of any lane would be refused with now: to be asked before a job is made."""
        self._check_open()
        if self._lanes.num_jobs:
            check_room(NOTHING, self._queue, caller)

    @property
    def is_congested(self) -> bool:
        """Whether any lane has a standing queue, so that `check_lane` has something to say."""
        return self._congestion.is_any

    @property
    def num_standing(self) -> int:
        """Lanes whose queue stands."""
        return self._congestion.num_standing

    def check_lane(self, lane: Hashable, caller: Hashable = None) -> None:
        """Raise what even the smallest job of this lane would be refused with now, besides what `check_open` raises."""
        check_standing(lane, self._queue, self._clock.now(), caller)

    def begin_drain(self) -> None:
        """Admit nothing any more; what waits is dispatched without waiting for company."""
        self._is_draining = True
        self._arrived.set()

    async def drain(self, timeout_s: float) -> int:
        """Admit nothing, finish what was admitted; after `timeout_s` fail the rest with Draining, return how many."""
        self.begin_drain()
        until = self._clock.now() + timeout_s
        while self.num_queued + self.num_running and self._clock.now() < until:
            await self._wait(self._left, until)
        return self.give_up()

    def give_up(self) -> int:
        """Admit nothing any more and fail everyone who waits or runs, at once; how many were told."""
        self.begin_drain()
        return self._fail_all(partial(Draining, "the service shut down before this was finished"))

    async def stop(self) -> None:
        """End the task; whoever still waits gets Draining."""
        self._is_stopping = True
        self.give_up()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _serve(self) -> None:
        while True:
            await self._gather()
            await self._execute()

    async def _gather(self) -> None:
        """Return when a batch is due; the engine is idle."""
        if not self._lanes.num_jobs:
            self._lanes.rest()
            self._congestion.rest()
            self._speed.rest()
        while (due_at := self._due_at()) > self._clock.now():
            await self._wait(self._arrived, due_at)
        await self._take_in()

    async def _take_in(self) -> None:
        """Before the loop waits for a brief batch, take in what has come by now, until a look at the sockets brings nothing."""
        num_jobs = 0
        while len(jobs := self._lanes.next_jobs) > num_jobs and self._could_grow() and self._runner.is_inline(jobs):
            num_jobs = len(jobs)
            await let_come_in()

    async def _wait(self, event: asyncio.Event, until: float) -> None:
        """Wait for the event's next time, or until a time that need not be finite."""
        event.clear()
        timer = self._clock.call_at(until, event.set) if math.isfinite(until) else None
        try:
            await event.wait()
        finally:
            if timer is not None:
                timer.cancel()

    def _due_at(self) -> float:
        """When the next batch goes: never while nothing waits, else at once unless it is to wait for company."""
        limits = self._queue_limits
        if not self._lanes.num_jobs:
            return math.inf
        if limits.max_wait_s <= 0 or self._is_draining or not self._could_grow():
            return -math.inf
        return min(job.accepted_at for job in self._lanes.heads) + limits.max_wait_s

    def _could_grow(self) -> bool:
        """Whether the next batch would be larger if more came in."""
        return self._lanes.num_jobs < self._queue_limits.capacity and not is_full(
            self._lanes.next_jobs, self._batch_limits
        )

    async def _give_way(self, lane: Hashable, seconds: float) -> None:
        """A batch of this lane has stopped after so many seconds: run what is due of others, up to their share.

        What would itself take long waits until it has ended: at most one batch is stopped, so what such batches hold is bounded.
        """
        self._lanes.stop(lane, self._speed.charge_of(seconds))
        self._stopped, self._running = self._running, []
        while self._lanes.num_jobs and (name := self._lanes.next_between(self._may_run_between)) is not None:
            await self._execute(name)
            await let_come_in()
        self._lanes.resume()
        self._running, self._stopped = self._stopped, []

    def _may_run_between(self, jobs: Collection[Job[P, R]]) -> bool:
        """Whether the next batch of a lane with these jobs is due and does not take long."""
        oldest = next(iter(jobs))
        if oldest.cost.flops > MAX_FLOPS_BETWEEN:
            return False
        due_at = oldest.accepted_at + self._queue_limits.max_wait_s
        return self._is_draining or due_at <= self._clock.now() or is_full(jobs, self._batch_limits)

    async def _execute(self, name: Hashable = None) -> None:
        """Take a batch (of that lane), drop whose callers left in this very turn, and run it."""
        batch = take(self._lanes, self._batch_limits, name)
        if batch:
            lane, flops = batch[0].lane, sum([job.cost.flops for job in batch])
            self._congestion.dispatched(lane, flops, self._lanes.flops(lane), self._speed.rate, self._clock.now())
        self._running = [job for job in batch if not self._is_over(job)]
        del batch
        self._tell_queue()
        await self._runner.run(self._running)
        self._running = []
        self._left.set()

    def _is_over(self, job: Job[P, R]) -> bool:
        """Whether nobody waits any more; a deadline that has passed may be told here before its call comes."""
        if job.deadline <= self._clock.now():
            job.expire()
        return job.is_settled

    def _expire(self, job: Job[P, R]) -> None:
        """The deadline's call: a waiting job is not executed any more, a running one's result will be discarded."""
        job.expire()
        self._forget(job)

    def _withdraw(self, job: Job[P, R]) -> None:
        """The caller goes, with his answer or without: nothing of the job stays behind."""
        if job.settled_at is None:  # else whoever settled it has forgotten it
            job.fail(asyncio.CancelledError())
            self._forget(job)

    def _forget(self, job: Job[P, R]) -> None:
        if self._lanes.remove(job):
            self._congestion.withdrew(job.lane, self._lanes.flops(job.lane))
            self._arrived.set()
            self._tell_queue()
        self._left.set()

    def _fail_all(self, error: Callable[[], ServiceError]) -> int:
        """Fail everyone who waits or runs, each with an error of his own; how many were told."""
        jobs = [*self._running, *self._stopped, *self._lanes.clear()]
        num_told = sum(job.fail(error()) for job in jobs if not job.is_settled)
        self._left.set()
        self._tell_queue()
        return num_told

    def _end(self, task: asyncio.Task[None]) -> None:
        """The task's last call, however it ended, even if it was cancelled before its first step."""
        error = None if task.cancelled() else task.exception()
        num_told = self._fail_all(partial(EngineDown, DOWN))
        self._running, self._stopped = [], []
        if not self._is_stopping:
            self._observer.died(DeathEvent(num_told, error))

    def _check_open(self) -> None:
        if self._task is not None and self._task.done() and not self._is_stopping:
            raise EngineDown(DOWN)
        if self._is_draining:
            raise Draining("the service is shutting down and takes no new requests")
        if self._task is None:
            raise NotReady("the service has not started yet")

    def _tell_queue(self) -> None:
        self._observer.queue_changed(self._lanes.num_jobs, self._lanes.num_bytes)

    def __repr__(self) -> str:
        running, ended = ("draining" if self._is_draining else "open"), ("stopped" if self._is_stopping else "dead")
        state = "not started" if self._task is None else running if self.is_alive else ended
        queued = f"{self.num_queued} jobs ({self.queued_bytes} bytes) wait in {self._lanes.num_lanes} lanes"
        return f"<Batcher is {state}: {queued}, {self.num_running} run>"
