"""Runner: runs a batch on the engine, and its retries, until each of its jobs is settled; InlinePolicy says on which thread.

Independent of callers, and of which jobs run together and when.
Invariants: Whatever the engine raises or returns becomes a result or a failure of that batch, never an exception of the loop. The
text of an exception other than a ServiceError never reaches a caller. An engine that is down, or a step that does not end, ends
the run. A preempted batch resumes only while a caller waits for it. After inline batches have blocked the loop for about
`inline_s` together, it gets time for other requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic

from service.batching.admission import SHORTEST_S, WINDOW, QueueLimits, Speed
from service.batching.engine_protocol import STUCK_CHECKS, Engine, Observer, Preempted
from service.batching.job import BatchInfo, Job, P, R, Work
from service.errors import CostLimit, EngineDown, EngineFailed, ServiceError
from service.loop_time import Clock, Handle

STUCK = "the engine is stuck: a batch runs longer than any batch may"
# Loop ticks until a request that a socket holds has become a job or been answered: one reads it, the next runs its task.
TICKS_TO_ARRIVE = 2
# A batch of more sequences never runs inline: flops predict its time badly.
MAX_SEQUENCES = 64
# A batch that takes more than this multiple of `inline_s` was misjudged. Misjudged batches took ten times as long and more; a
# paused machine doubles the time of one in a hundred.
FAR_TOO_LONG = 3
# Lanes of unloaded layers are never removed one by one; at this number of lanes the records of all are dropped.
MAX_LANES = 1024
# A callback that is awaited after each step of a preempted batch, before it resumes: it gets the batch's lane, the seconds of the
# step, and whether that was the last.
AfterStep = Callable[[Hashable, float, bool], Awaitable[object]]


@dataclass(slots=True)
class _Pace:
    """The rates of the last batches of one lane, in flops per second: all of them, and their median."""

    rates: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    rate: float = 0.0
    batches_off_loop: int = 0
    """How many batches run off the loop before one may run inline again."""


class InlinePolicy:
    """A batch runs inline if it likely ends in `inline_s`; with 0 none does.

    Invariants: A batch is judged by the rates of its own lane's last batches, because batches of equal flops take different times
    in other layers and dtypes. A lane has no inline batch before its first batch has run. Flops predict the time of
    many small sequences worst, so a batch of many never runs inline. At most one batch in seventeen of a lane
    is misjudged: after a wait that was far too long, or a failed batch, the lane's next sixteen do not run inline.
    """

    def __init__(self, inline_s: float) -> None:
        self._inline_s = inline_s
        self._lanes: dict[Hashable, _Pace] = {}

    def is_inline(self, lane: Hashable, flops: int, sequences: int, blocked_s: float = 0.0) -> bool:
        """Whether a batch of this lane, with that much work in that many sequences, runs inline.

        `blocked_s` is how long inline batches have blocked the loop since it last had time for other requests.
        """
        pace = self._lanes.get(lane)
        if pace is None or pace.batches_off_loop or sequences > MAX_SEQUENCES:
            return False
        return flops <= pace.rate * (self._inline_s - blocked_s)

    def note(self, lane: Hashable, flops: int, seconds: float, *, waited_s: float) -> None:
        """Record how long a batch of this lane took, and for how much of that the loop waited."""
        if not self._inline_s:
            return
        pace = self._lanes.get(lane)
        if pace is None:
            if len(self._lanes) >= MAX_LANES:
                self._lanes.clear()
            pace = self._lanes[lane] = _Pace()
        if waited_s > FAR_TOO_LONG * self._inline_s:
            pace.batches_off_loop = WINDOW
        elif pace.batches_off_loop:
            pace.batches_off_loop -= 1
        pace.rates.append(flops / seconds if seconds else 0.0)
        pace.rate = statistics.median_low(pace.rates)

    def failed(self, lane: Hashable) -> None:
        """Record that a batch of this lane failed. How long the loop waited is unknown, so the next batches run off the loop."""
        if (pace := self._lanes.get(lane)) is not None:
            pace.batches_off_loop = WINDOW


class Runner(Generic[P, R]):
    """Runs the batches of one engine; `speed` learns from them."""

    def __init__(
        self,
        engine: Engine[P, R],
        clock: Clock,
        observer: Observer,
        speed: Speed,
        limits: QueueLimits,
        after_step: AfterStep,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._observer = observer
        self._speed = speed
        self._max_s = limits.max_step_s
        self._after_step = after_step
        self._inline_policy = InlinePolicy(limits.inline_s)
        self._blocked_s = 0.0  # by inline batches, since the loop last had time for other requests

    def is_inline(self, jobs: Iterable[Job[P, R]]) -> bool:
        """Whether a batch of these jobs likely ends so soon that the loop may wait for it."""
        flops, sequences = sum([job.cost.flops for job in jobs]), sum([job.cost.sequences for job in jobs])
        return self._inline_policy.is_inline(next(iter(jobs)).lane, flops, sequences, self._blocked_s)

    async def take_in_arrivals(self) -> None:
        """Let the event loop take in the requests that have arrived."""
        self._blocked_s = 0.0
        for _ in range(TICKS_TO_ARRIVE):
            await asyncio.sleep(0)

    async def yield_to_loop(self) -> None:
        """If inline batches have blocked the loop, give it time for other requests."""
        if self._blocked_s:
            await self.take_in_arrivals()

    async def run(self, jobs: list[Job[P, R]]) -> None:
        """Run these jobs until all are settled; raise EngineDown and leave unsettled jobs to the caller."""
        parts = [jobs]
        while parts:
            left = [job for job in parts.pop() if not job.is_settled]
            if left:
                parts.extend(reversed(await self._attempt(left)))

    async def _attempt(self, jobs: list[Job[P, R]]) -> list[list[Job[P, R]]]:
        """Run these jobs and settle them; return the parts to try instead if several failed together.

        Nothing here keeps a failure: its traceback holds the tensors whose memory an out-of-memory retry needs.
        """
        costs = [job.cost for job in jobs]
        work, batch, lane = Work(sum([cost.flops for cost in costs]), len(costs)), BatchInfo.of(costs), jobs[0].lane
        for job in jobs:
            job.start(batch)
        started_at = self._clock.now()
        self._speed.begin(work, started_at)
        future = hand_over(self._engine, [job.payload for job in jobs], is_inline=self.is_inline(jobs))
        # Includes the time of an inline pass that failed and that the engine's thread repeats.
        waited_s = compute_s = self._clock.now() - started_at
        # A long batch may be preempted already: then its future is done, but the batch is not.
        ended_at_once = future.done() and preempted(future) is None
        if not ended_at_once:
            last, steps_s = await self._in_steps(jobs, work, future)
            if last is None:
                self._speed.end()
                return []
            future, compute_s = last, waited_s + steps_s
            del last
        self._speed.end()
        failure = failure_of(future, len(jobs))
        if failure is None:
            for job, result in zip(jobs, future.result(), strict=True):
                job.settle(result)
            self._speed.note(work, compute_s)
            self._inline_policy.note(lane, work.flops, compute_s, waited_s=waited_s)
            self._observer.batch_done(lane, batch, compute_s)
        parts = [] if failure is None else self._parts(jobs, failure)
        del failure, future
        if ended_at_once:
            self._blocked_s += max(waited_s, SHORTEST_S)
        if parts:
            await self.yield_to_loop()
        return parts

    async def _in_steps(
        self, jobs: list[Job[P, R]], work: Work, future: Future[Any]
    ) -> tuple[Future[Any] | None, float]:
        """Return the last step's future (None: no caller waits) and the seconds of all steps; batches in between do not count."""
        total_s, started_at = 0.0, self._clock.now()
        while True:
            await wait_for(future, self._clock, self._max_s)
            step_s = self._clock.now() - started_at
            batch = preempted(future)
            if batch is None:
                if total_s:  # it was preempted before
                    await self._after_step(jobs[0].lane, step_s, True)
                return future, total_s + step_s
            total_s += step_s
            try:
                await self._after_step(jobs[0].lane, step_s, False)
            except BaseException:
                batch.drop()
                raise
            if all(job.is_settled for job in jobs):
                batch.drop()
                return None, total_s
            started_at = self._clock.now()
            self._speed.begin(work, started_at, total_s)
            future = batch.resume()

    def _parts(self, jobs: list[Job[P, R]], failure: BaseException) -> list[list[Job[P, R]]]:
        """Return halves if memory ran out, since less at once may fit; else single jobs, since any may be the culprit.

        A job that was alone fails. Raises EngineDown if that is the failure.
        """
        if isinstance(failure, EngineDown):
            raise failure
        lane, left = jobs[0].lane, [job for job in jobs if not job.is_settled]
        self._inline_policy.failed(lane)
        if not left:
            return []
        if len(jobs) == 1:
            jobs[0].fail(caller_error(failure))
            return []
        if isinstance(failure, CostLimit):
            self._observer.batch_split(lane, len(left))
            middle = (len(left) + 1) // 2
            return [left[:middle], left[middle:]]
        self._observer.retried_apart(lane, len(left), type(failure).__name__)
        return [[job] for job in left]


async def wait_for(future: Future[Sequence[R] | Any], clock: Clock, max_s: float) -> None:
    """Return when the engine's future is done; raise EngineDown if it is not done at the last of STUCK_CHECKS checks in `max_s`.

    In that case, or if this is cancelled, a batch that has not begun is cancelled. `asyncio.wrap_future` would not do: it never
    ends if the future fails with StopIteration, and if the engine cancels a batch, that looks like a cancellation of the caller.
    """
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    timer: Handle

    def check(num_left: int) -> None:
        nonlocal timer
        following = partial(check, num_left - 1) if num_left > 1 else done.set
        timer = clock.call_at(clock.now() + max_s / STUCK_CHECKS, following)

    def wake(_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed before its engine
            loop.call_soon_threadsafe(done.set)

    future.add_done_callback(wake)
    check(STUCK_CHECKS)
    try:
        await done.wait()
        if not future.done():
            raise EngineDown(STUCK)
    finally:
        timer.cancel()
        future.cancel()


def hand_over(engine: Engine[P, R], batch: Sequence[P], *, is_inline: bool) -> Future[Sequence[R] | Any]:
    """Return the engine's future for this batch."""
    try:
        return engine.run(batch, is_inline=is_inline)
    except Exception as error:  # noqa: BLE001  any exception is this batch's failure
        # No local name for the future: error -> traceback -> frame -> future -> error would stay until a gc.
        return _failed(error)


def preempted(future: Future[Sequence[R] | Any]) -> Preempted | None:
    """Return the preempted batch if the step that has ended was not the last, else None."""
    if future.cancelled() or future.exception() is not None:
        return None
    result = future.result()
    return result if not isinstance(result, list) and isinstance(result, Preempted) else None


def failure_of(future: Future[Sequence[R] | Any], num_payloads: int) -> BaseException | None:
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


def _failed(error: BaseException) -> Future[Sequence[R] | Any]:
    future: Future[Sequence[R] | Any] = Future()
    future.set_exception(error)
    return future
