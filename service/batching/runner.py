"""Runner: runs a batch on the engine, and its retries, until each of its jobs is settled.

Independent of callers, and of which jobs run together and when.
Invariants: A batch too large for the memory is retried in halves; one that fails otherwise is retried job by job. An engine that
is down ends the run, and so does a step that does not end. A stopped batch goes on only while a caller waits for it. After an
inline batch the loop has time for other requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Hashable, Sequence
from concurrent.futures import Future
from typing import Any, Generic, NamedTuple

from service.batching.clock import Clock
from service.batching.engine_protocol import (
    BatchEvent,
    ComputeLimits,
    Engine,
    Observer,
    RetryEvent,
    SplitEvent,
    failure_of,
    hand_over,
    is_out_of_memory,
    stopped,
    told,
    wait_for,
)
from service.batching.job import BatchInfo, Cost, Job, P, R
from service.batching.speed import InlinePolicy, Speed, Work
from service.errors import EngineDown

# Loop ticks from a request in a socket to a job or to another answer: the first reads it, the second runs its task.
TURNS_TO_COME_IN = 2


async def let_come_in() -> None:
    """Let the loop take in the requests that have arrived."""
    for _ in range(TURNS_TO_COME_IN):
        await asyncio.sleep(0)


Between = Callable[[Hashable, float], Awaitable[object]]


class _Attempt(NamedTuple):
    """What a batch cost, how long it took, and for how much of that it blocked the loop."""

    costs: list[Cost]
    batch: BatchInfo
    work: Work
    compute_s: float
    waited_s: float


class Runner(Generic[P, R]):
    """Runs the batches of one engine; `speed` learns from them. `between` is awaited before a stopped batch goes on, with the
    batch's lane and the seconds of its last step.
    """

    def __init__(
        self,
        engine: Engine[P, R],
        clock: Clock,
        observer: Observer,
        speed: Speed,
        limits: ComputeLimits,
        between: Between,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._observer = observer
        self._speed = speed
        self._max_s = limits.max_s
        self._between = between
        self._inline_policy = InlinePolicy(limits.inline_s)

    def is_inline(self, jobs: Collection[Job[P, R]]) -> bool:
        """Whether a batch of these jobs likely ends so soon that the loop may wait for it."""
        flops, sequences = sum([job.cost.flops for job in jobs]), sum([job.cost.sequences for job in jobs])
        return self._inline_policy.is_inline(next(iter(jobs)).lane, flops, sequences)

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
        work = Work(sum([cost.flops for cost in costs]), len(costs))
        batch = BatchInfo.of(costs)
        for job in jobs:
            job.start(batch)
        started_at = self._clock.now()
        self._speed.begin(work, started_at)
        is_inline = self._inline_policy.is_inline(jobs[0].lane, work.flops, batch.sequences)
        future = hand_over(self._engine, [job.payload for job in jobs], is_inline=is_inline)
        # Includes the time of an inline pass that failed and that the engine's thread repeats.
        waited_s = compute_s = self._clock.now() - started_at
        # A long batch may have stopped already: then its future is done and the batch is not.
        was_at_once = future.done() and stopped(future) is None
        if not was_at_once:
            last, steps_s = await self._in_steps(jobs, work, future)
            if last is None:
                return []
            future, compute_s = last, waited_s + steps_s
            del last
        parts = self._settle(jobs, _Attempt(costs, batch, work, compute_s, waited_s), future)
        del future
        if was_at_once:
            await let_come_in()
        return parts

    async def _in_steps(
        self, jobs: list[Job[P, R]], work: Work, future: Future[Any]
    ) -> tuple[Future[Any] | None, float]:
        """Return the last step's future (None: no caller waits) and the seconds of all steps, without batches run in between."""
        total_s, started_at = 0.0, self._clock.now()
        while True:
            await wait_for(future, self._clock, started_at + self._max_s)
            step_s = self._clock.now() - started_at
            total_s += step_s
            batch = stopped(future)
            if batch is None:
                return future, total_s
            try:
                await self._between(jobs[0].lane, step_s)
            except BaseException:
                batch.drop()
                raise
            if all(job.is_settled for job in jobs):
                batch.drop()
                return None, total_s
            started_at = self._clock.now()
            self._speed.begin(self._speed.less(work, total_s), started_at)
            future = batch.resume()

    def _settle(self, jobs: list[Job[P, R]], attempt: _Attempt, future: Future[Sequence[R]]) -> list[list[Job[P, R]]]:
        failure, lane = failure_of(future, len(jobs)), jobs[0].lane
        if isinstance(failure, EngineDown):
            raise failure
        if failure is not None:
            self._inline_policy.failed(lane)
            if len(jobs) > 1:
                return self._parts(jobs, failure)
            jobs[0].fail(told(failure))
            return []
        for job, result in zip(jobs, future.result(), strict=True):
            job.settle(result)
        self._speed.note(attempt.work, attempt.compute_s)
        self._inline_policy.note(lane, attempt.work.flops, attempt.compute_s, waited_s=attempt.waited_s)
        self._observer.batch_done(BatchEvent.of(lane, attempt.batch, attempt.costs, attempt.compute_s))
        return []

    def _parts(self, jobs: list[Job[P, R]], failure: BaseException) -> list[list[Job[P, R]]]:
        """Return halves if memory ran out, since less at once may fit; else single jobs, since any may be the culprit."""
        left = [job for job in jobs if not job.is_settled]
        if is_out_of_memory(failure):
            self._observer.batch_split(SplitEvent(jobs[0].lane, len(left)))
            middle = (len(left) + 1) // 2
            return [left[:middle], left[middle:]]
        self._observer.retried_apart(RetryEvent(jobs[0].lane, len(left), type(failure).__name__))
        return [[job] for job in left]
