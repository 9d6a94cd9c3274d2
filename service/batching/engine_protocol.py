"""Engine protocol: a batch goes in, a future of its results comes out; Observer is the protocol for events.

Holds the one Protocol between batching and the engine, the wait for its future, the limit of that wait, and what failures mean.
Independent of jobs, queues, tensors and the engine's thread.
Invariants: Whatever the engine raises or returns becomes a result or a failure of that batch, never an exception of the loop. An
engine that does not answer is down. A foreign exception is translated once, here; its text never reaches a caller.

Observer: the interface through which the batcher reports its events, and their frozen values.
Independent of its listeners (metrics, a test) and of metrics.
Invariants: An event is reported once, after the state has changed, on the loop. A listener returns at once and raises nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

from service.batching.clock import Clock
from service.batching.job import BatchInfo, Cost, P, R, Stage
from service.errors import CostLimit, EngineDown, EngineFailed, ServiceError

STUCK = "the engine is stuck: a batch runs longer than any batch may"

P_contra = TypeVar("P_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)


@runtime_checkable
class Stopped(Protocol):
    """A long batch that has stopped between two of its steps; it holds only its thread and its tensors."""

    def resume(self) -> Future[Any]:
        """Return the future of the next step, which gives what `Engine.run` gives."""

    def drop(self) -> None:
        """Discard the batch instead of resuming it."""


class Engine(Protocol[P_contra, R_co]):
    """Computes one result per payload, in order; EngineDown says that no later batch will be answered.

    An inline batch is short enough for the loop to wait: the engine may compute it before it returns. A long one may come back
    Stopped; until it is resumed, the batches that run in between do not stop.
    """

    def run(self, batch: Sequence[P_contra], /, *, is_inline: bool) -> Future[Sequence[R_co] | Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeLimits:
    """Times of batches: a step that has not ended in `max_s` never will. A batch that likely ends in `inline_s` runs inline (0:
    none does). A batch stops after about `step_s`.
    """

    max_s: float
    inline_s: float
    step_s: float = math.inf


async def wait_for(future: Future[Sequence[R] | Any], clock: Clock, until: float) -> None:
    """Return when the engine's future is done; raise EngineDown if it is not done at `until` (a finite time).

    Cancelling this cancels a batch that has not begun.

    Not `asyncio.wrap_future`: that never ends on a StopIteration, and shows a batch the engine cancelled as a cancellation of the
    caller.
    """
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def tell(_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed before its engine
            loop.call_soon_threadsafe(done.set)

    future.add_done_callback(tell)
    bound = clock.call_at(until, done.set)
    try:
        await done.wait()
        if not future.done():
            raise EngineDown(STUCK)
    finally:
        bound.cancel()
        future.cancel()


def hand_over(engine: Engine[P, R], batch: Sequence[P], *, is_inline: bool) -> Future[Sequence[R] | Any]:
    """Return the engine's future for this batch."""
    try:
        return engine.run(batch, is_inline=is_inline)
    except Exception as error:  # noqa: BLE001  any exception is this batch's failure
        return _failed(
            error
        )  # no local name for the future: error -> traceback -> frame -> future -> error would linger


def stopped(future: Future[Sequence[R] | Any]) -> Stopped | None:
    """Return the stopped batch if the step that has ended was not the last, else None."""
    if future.cancelled() or future.exception() is not None:
        return None
    result = future.result()
    return result if not isinstance(result, list) and isinstance(result, Stopped) else None


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


def is_out_of_memory(failure: BaseException) -> bool:
    """Whether the engine had too little memory for this batch, so that fewer jobs at once may succeed."""
    return isinstance(failure, CostLimit)


def told(failure: BaseException) -> ServiceError:
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


@dataclass(frozen=True, slots=True)
class BatchEvent:
    """The engine answered a batch; `requests` includes those whose caller has left, `notes` are the batch's."""

    lane: Hashable
    requests: int
    sequences: int
    tokens: int
    weights_bytes: int
    compute_s: float
    notes: dict[str, object] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, lane: Hashable, batch: BatchInfo, costs: Sequence[Cost], compute_s: float) -> BatchEvent:
        weights_bytes = sum([cost.weights_bytes for cost in costs])
        return cls(lane, batch.requests, batch.sequences, batch.tokens, weights_bytes, compute_s, batch.notes)


@dataclass(frozen=True, slots=True)
class RetryEvent:
    """A batch failed, and `num_jobs` of it are retried one by one; `reason` is the name of the exception's type."""

    lane: Hashable
    num_jobs: int
    reason: str


@dataclass(frozen=True, slots=True)
class SplitEvent:
    """A batch ran out of memory, and `num_jobs` of it are retried in two halves."""

    lane: Hashable
    num_jobs: int


@dataclass(frozen=True, slots=True)
class CancelEvent:
    """A caller left; `stage` is the stage that its job had reached."""

    lane: Hashable
    stage: Stage


@dataclass(frozen=True, slots=True)
class DeathEvent:
    """The batcher's loop ended and `num_jobs` failed; `error` is None if it was cancelled from outside."""

    num_jobs: int
    error: BaseException | None


class Observer(Protocol):
    """One method per event."""

    def queue_changed(self, num_jobs: int, num_bytes: int) -> None: ...

    def batch_done(self, event: BatchEvent) -> None: ...

    def retried_apart(self, event: RetryEvent) -> None: ...

    def batch_split(self, event: SplitEvent) -> None: ...

    def job_cancelled(self, event: CancelEvent) -> None: ...

    def died(self, event: DeathEvent) -> None: ...
