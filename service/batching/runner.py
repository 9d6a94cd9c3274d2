"""Runner: runs a batch on the engine, and its retries, until each of its jobs is settled; InlinePolicy says on which thread.

Independent of callers, and of which jobs run together and when.
Invariants: Whatever the engine raises or returns becomes a result or a failure of that batch, never an exception of the loop. The
text of an exception other than a ServiceError never reaches a caller. An engine that is down, or a batch without progress, ends
the run. A batch stops when its last caller has left. After inline batches have blocked the loop for about `inline_s` together, it
gets time for other requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import statistics
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Generic

from service.batching.admission import SHORTEST_S, WINDOW, Queue, QueueLimits
from service.batching.engine_protocol import STUCK_CHECKS, Engine, Observer, Progress
from service.batching.job import BatchInfo, Job, P, R, Work
from service.batching.policy import BATCH_OVERHEAD_FLOPS
from service.errors import CostLimit, EngineDown, EngineFailed, ServiceError
from service.loop_time import Clock, Handle

STUCK = "the engine is stuck: a batch makes no progress"
# Loop ticks until a request that a socket holds has become a job or been answered: one reads it, the next runs its task.
TICKS_TO_ARRIVE = 2
# A batch of more sequences never runs inline: flops predict its time badly.
MAX_SEQUENCES = 64
# A batch that takes more than this multiple of `inline_s` was misjudged. Misjudged batches took ten times as long and more; a
# paused machine doubles the time of one in a hundred.
FAR_TOO_LONG = 3
# Lanes of unloaded layers are never removed one by one; at this number of lanes the records of all are dropped.
MAX_LANES = 1024


@dataclass(slots=True)
class _Pace:
    """The rates of the last batches of one lane, in flops per second: all of them, and their median."""

    rates: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    rate: float = 0.0
    batches_off_loop: int = 0
    """How many batches run off the loop before one may run inline again."""


class InlinePolicy:
    """A batch runs inline if it likely ends in `inline_s`; with 0 none does. Knows the rate of each lane.

    Invariants: A batch is judged by the rates of its own lane's last batches, because batches of equal flops take different times
    in other layers and dtypes. `overhead_flops` of each batch count as work: else a lane of single tokens would seem to be ten
    times as slow as it is. Rates are those of processor time, so other threads change none. A lane has no inline batch before its
    first batch has run. Flops predict the time of many small sequences worst, so a batch of many never runs inline. At most one
    batch in seventeen of a lane is misjudged: after a wait that was far too long, or a failed batch, the lane's next sixteen do
    not run inline.
    """

    def __init__(self, inline_s: float, overhead_flops: int = BATCH_OVERHEAD_FLOPS) -> None:
        self._inline_s = inline_s
        self._overhead_flops = overhead_flops
        self._lanes: dict[Hashable, _Pace] = {}

    def is_inline(self, lane: Hashable, flops: int, sequences: int, blocked_s: float = 0.0) -> bool:
        """Whether a batch of this lane, with that much work in that many sequences, runs inline.

        `blocked_s` is how long inline batches have blocked the loop since it last had time for other requests.
        """
        pace = self._lanes.get(lane)
        if not self._inline_s or pace is None or pace.batches_off_loop or sequences > MAX_SEQUENCES:
            return False
        return flops + self._overhead_flops <= pace.rate * (self._inline_s - blocked_s)

    def rate(self, lane: Hashable) -> float:
        """Return the flops per second of the median batch of this lane; 0 if none has run."""
        return 0.0 if (pace := self._lanes.get(lane)) is None else pace.rate

    def note(self, lane: Hashable, flops: int, seconds: float, *, waited_s: float) -> None:
        """Record how long a batch of this lane took, and for how much of that the loop waited."""
        pace = self._lanes.get(lane)
        if pace is None:
            if len(self._lanes) >= MAX_LANES:
                self._lanes.clear()
            pace = self._lanes[lane] = _Pace()
        if waited_s > FAR_TOO_LONG * self._inline_s:
            pace.batches_off_loop = WINDOW
        elif pace.batches_off_loop:
            pace.batches_off_loop -= 1
        pace.rates.append((flops + self._overhead_flops) / seconds if seconds else 0.0)
        pace.rate = statistics.median_low(pace.rates)

    def failed(self, lane: Hashable) -> None:
        """Record that a batch of this lane failed. How long the loop waited is unknown, so the next batches run off the loop."""
        if (pace := self._lanes.get(lane)) is not None:
            pace.batches_off_loop = WINDOW


@dataclass(eq=False, repr=False)
class Runner(Generic[P, R]):
    """Runs the batches of one queue; the queue's speed and `policy` learn from them.

    `beside` is locked while a long batch runs, so that a short one that runs out of memory beside it can wait for its end.
    """

    engine: Engine[P, R]
    clock: Clock
    observer: Observer
    queue: Queue
    limits: QueueLimits
    policy: InlinePolicy
    beside: asyncio.Lock
    _blocked_s: float = 0.0  # by inline batches, since the loop last had time for other requests
    _computed: list[Job[P, R]] = field(default_factory=list)  # the jobs of the batch that the engine's thread computes
    _progress: Progress | None = None  # of that batch

    def is_inline(self, jobs: Iterable[Job[P, R]]) -> bool:
        """Whether a batch of these jobs likely ends so soon that the loop may wait for it."""
        if self.queue.is_long:
            return False
        flops, sequences = sum([job.cost.flops for job in jobs]), sum([job.cost.sequences for job in jobs])
        return self.policy.is_inline(next(iter(jobs)).lane, flops, sequences, self._blocked_s)

    def max_flops(self, lane: Hashable) -> float:
        """Return the most flops that a batch of this lane may have: a short batch ends in `long_s`."""
        rate = self.policy.rate(lane) or self.queue.speed.rate
        return math.inf if self.queue.is_long or not rate else rate * self.limits.long_s - self.limits.overhead_flops

    def stop_if_unwanted(self) -> None:
        """Stop the batch that the engine's thread computes if all its callers have left."""
        if self._progress is not None and all(job.is_settled for job in self._computed):
            self._progress.stop()

    async def take_in_arrivals(self) -> None:
        """Let the event loop take in the requests that have arrived."""
        self._blocked_s = 0.0
        for _ in range(TICKS_TO_ARRIVE):
            await asyncio.sleep(0)

    async def yield_to_loop(self) -> None:
        """If inline batches have blocked the loop, give it time for other requests."""
        if self._blocked_s:
            await self.take_in_arrivals()

    def turn(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Return what the next batch is taken and run within: a long one not beside a short one that ran out of memory."""
        return self.beside if self.queue.is_long else contextlib.nullcontext()

    async def run(self, jobs: list[Job[P, R]]) -> None:
        """Run these jobs until all are settled; raise EngineDown and leave unsettled jobs to the caller."""
        parts = [jobs]
        while parts:
            left = [job for job in parts.pop() if not job.is_settled]
            if left:
                parts.extend(reversed(await self._attempt(left)))

    async def _attempt(self, jobs: list[Job[P, R]], *, is_alone: bool = False) -> list[list[Job[P, R]]]:
        """Run these jobs and settle them; return the parts to try instead if several failed together.

        A short batch that runs out of memory beside a long one runs again, alone, before the next long one (P5).
        Nothing here keeps a failure: its traceback holds the tensors whose memory an out-of-memory retry needs.
        """
        future = await self._ended(jobs)
        failure = failure_of(future, len(jobs))
        if failure is None:
            for job, result in zip(jobs, future.result(), strict=True):
                job.settle(result)
            return []
        if isinstance(failure, CostLimit) and not (self.queue.is_long or is_alone) and self.beside.locked():
            del failure, future
            async with self.beside:
                left = [job for job in jobs if not job.is_settled]
                return await self._attempt(left, is_alone=True) if left else []
        parts = self._parts(jobs, failure)
        del failure, future
        if parts:
            await self.yield_to_loop()
        return parts

    async def _ended(self, jobs: list[Job[P, R]]) -> Future[Sequence[R]]:
        """Return the future of the batch of these jobs when it has ended, and record how long that took."""
        costs = [job.cost for job in jobs]
        work, batch, lane = Work(sum([cost.flops for cost in costs]), len(costs)), BatchInfo.of(costs), jobs[0].lane
        for job in jobs:
            job.start(batch)
        started_at = self.clock.now()
        self.queue.speed.begin(work, started_at)
        try:
            future, progress = self.engine.run(
                [job.payload for job in jobs], is_inline=self.is_inline(jobs), is_long=self.queue.is_long
            )
        except Exception as error:  # noqa: BLE001  any exception is this batch's failure
            self.queue.speed.end()
            # No local name for the future: error -> traceback -> frame -> future -> error would stay until a gc.
            return _failed(error)
        # Includes the time of an inline pass that failed and that the engine's thread repeats.
        waited_s = self.clock.now() - started_at
        if future.done():
            self._blocked_s += max(waited_s, SHORTEST_S)
        else:
            await self._watch(jobs, future, progress)
        self.queue.speed.end()
        self.observer.computed(progress)
        if failure_of(future, len(jobs)) is None:
            compute_s = self.clock.now() - started_at
            # Callers wait for the clock. A long batch gets a part of its core, which differs from batch to batch, so its own
            # speed is that of the processor's time (`SLOWDOWN` of admission accounts for that).
            self.queue.speed.note(work, (progress.seconds or compute_s) if self.queue.is_long else compute_s)
            self.policy.note(lane, work.flops, progress.seconds or compute_s, waited_s=waited_s)
            self.observer.batch_done(lane, batch, compute_s)
        return future

    async def _watch(self, jobs: list[Job[P, R]], future: Future[Sequence[R]], progress: Progress) -> None:
        """Return when the engine's thread has ended the batch, which may be stopped meanwhile."""
        self._computed, self._progress = jobs, progress
        self.stop_if_unwanted()
        try:
            await wait_for(future, self.clock, self.limits.stuck_s, progress)
        finally:
            self._computed, self._progress = [], None

    def _parts(self, jobs: list[Job[P, R]], failure: BaseException) -> list[list[Job[P, R]]]:
        """Return halves if memory ran out, since less at once may fit; else single jobs, since any may be the culprit.

        A job that was alone fails. Raises EngineDown if that is the failure.
        """
        if isinstance(failure, EngineDown):
            raise failure
        lane, left = jobs[0].lane, [job for job in jobs if not job.is_settled]
        if not left:
            return []  # it may have been stopped
        self.policy.failed(lane)
        if len(jobs) == 1:
            jobs[0].fail(caller_error(failure))
            return []
        if isinstance(failure, CostLimit):
            self.observer.batch_split(lane, len(left))
            middle = (len(left) + 1) // 2
            return [left[:middle], left[middle:]]
        self.observer.retried_apart(lane, len(left), type(failure).__name__)
        return [[job] for job in left]


async def wait_for(future: Future[Sequence[R]], clock: Clock, max_s: float, progress: Progress) -> None:
    """Return when the engine's future is done; raise EngineDown if the batch makes no progress at STUCK_CHECKS checks in `max_s`.

    In that case, or if this is cancelled, a batch that has not begun is cancelled, and one that has begun is stopped.
    `asyncio.wrap_future` would not do: it never ends if the future fails with StopIteration, and if the engine cancels a batch,
    that looks like a cancellation of the caller.
    """
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    timer: Handle

    def check(num_left: int, num_points: int) -> None:
        nonlocal timer
        if progress.num_points != num_points:
            num_left, num_points = STUCK_CHECKS, progress.num_points
        if num_left:
            timer = clock.call_at(clock.now() + max_s / STUCK_CHECKS, partial(check, num_left - 1, num_points))
        else:
            done.set()

    def wake(_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed before its engine
            loop.call_soon_threadsafe(done.set)

    future.add_done_callback(wake)
    check(STUCK_CHECKS, progress.num_points)
    try:
        await done.wait()
        if not future.done():
            raise EngineDown(STUCK)
    finally:
        timer.cancel()
        if not future.done():
            future.cancel()
            progress.stop()


def failure_of(future: Future[Sequence[R]], num_payloads: int) -> BaseException | None:
    """Return the failure of a batch whose future is done; None if its results are usable."""
    if future.cancelled():
        return EngineDown("the engine dropped a batch")
    error = future.exception()
    if error is not None:
        return error
    results: object = future.result()
    if not isinstance(results, Sequence) or isinstance(results, (str, bytes)):
        return TypeError(f"the engine returned {type(results).__name__}, not a sequence of results. This is a bug.")
    if len(results) != num_payloads:
        return ValueError(f"the engine returned {len(results)} results for {num_payloads} payloads. This is a bug.")
    return None


def caller_error(failure: BaseException) -> ServiceError:
    """Return the error that the caller gets: a ServiceError as itself, any other without its text."""
    if isinstance(failure, ServiceError):
        return failure
    error = EngineFailed("the engine failed on this request; the service has logged the fault")
    error.__cause__ = failure
    return error


def _failed(error: BaseException) -> Future[Sequence[R]]:
    future: Future[Sequence[R]] = Future()
    future.set_exception(error)
    return future
