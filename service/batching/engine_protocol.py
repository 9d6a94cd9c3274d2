"""The engine as the waiting room sees it: a batch goes in, a future of its results comes out.

Lives here: the one Protocol in which the two rooms meet, the wait for its future, how long that may be, and what its
failures mean.
Must not know: jobs, queues, tensors, the engine's thread.
Laws: whatever the engine raises or returns becomes an answer or a failure of that batch, never an exception of the
loop; an engine that does not answer at all is down; a foreign exception is translated once, here, and its text never
reaches a caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from service.batching.clock import Clock
from service.batching.job import P, R
from service.errors import CostLimit, EngineDown, EngineFailed, ServiceError

STUCK = "the engine is stuck: a batch has not ended in the longest time that any may take"

P_contra = TypeVar("P_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)


@runtime_checkable
class Stopped(Protocol):
    """A long batch that has stopped between two of its steps and holds no more than its thread and its tensors."""

    def resume(self) -> Future[Any]:
        """The future of the next step, which gives what `Engine.run` gives."""

    def drop(self) -> None:
        """It will not be resumed."""


class Engine(Protocol[P_contra, R_co]):
    """What computes: one result per payload, in their order; EngineDown says that no later batch will be answered.

    A brief batch ends so soon that the loop may wait for it: the engine may compute it before it returns. A long one may come
    back Stopped; while it is, the batches that run between do not stop.
    """

    def run(self, batch: Sequence[P_contra], /, *, is_inline: bool) -> Future[Sequence[R_co] | Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeLimits:
    """How long batches take: a step that has not ended in `max_s` never will; what likely ends in `inline_s` is brief (0:
    nothing is); a batch stops after about `step_s`.
    """

    max_s: float
    inline_s: float
    step_s: float = math.inf


async def wait_for(future: Future[Sequence[R] | Any], clock: Clock, until: float) -> None:
    """Return when the engine's future is done; raises EngineDown where it is not `until` then (a finite time).

    Cancelling this calls off a batch that has not begun.

    Not `asyncio.wrap_future`: that never ends on a StopIteration, and shows a batch the engine cancelled as a
    cancellation of the caller.
    """
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def tell(_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed before its engine was
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
    """The engine's future for this batch."""
    try:
        return engine.run(batch, is_inline=is_inline)
    except Exception as error:  # noqa: BLE001  whatever it is, it is this batch's failure
        return _failed(
            error
        )  # no local name for the future: error -> traceback -> frame -> future -> error would linger


def stopped(future: Future[Sequence[R] | Any]) -> Stopped | None:
    """The batch whose step has ended, where it was not the last."""
    if future.cancelled() or future.exception() is not None:
        return None
    result = future.result()
    return result if not isinstance(result, list) and isinstance(result, Stopped) else None


def failure_of(future: Future[Sequence[R] | Any], num_payloads: int) -> BaseException | None:
    """What went wrong with a batch whose future is done; None where its results can be given out."""
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
    """Whether fewer jobs at once may go well: the engine says that there was not enough memory for this batch."""
    return isinstance(failure, CostLimit)


def told(failure: BaseException) -> ServiceError:
    """A failure as its caller is told it: one of the family as itself, any other without its text."""
    if isinstance(failure, ServiceError):
        return failure
    error = EngineFailed("the engine failed on this request; the fault is the service's, and is in its log")
    error.__cause__ = failure
    return error


def _failed(error: BaseException) -> Future[Sequence[R] | Any]:
    future: Future[Sequence[R] | Any] = Future()
    future.set_exception(error)
    return future
