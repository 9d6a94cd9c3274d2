"""Engine protocol: a batch goes in, a future of its results comes out; Observer is the protocol for events.

Independent of queues, tensors and the engine's thread, and of the listeners of events (metrics, a test).
Invariants: An event is reported once, after the state has changed, on the loop. A listener returns at once and raises nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar, runtime_checkable

from service.batching.job import BatchInfo

# A step is stuck if it has not ended at this many checks, spread over `QueueLimits.max_step_s`: a pause of the process adds none.
STUCK_CHECKS = 5

P_contra = TypeVar("P_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)


@runtime_checkable
class Preempted(Protocol):
    """A long batch that is preempted between two of its steps; it holds only its thread and its tensors."""

    def resume(self) -> Future[Any]:
        """Return the future of the next step, which gives what `Engine.run` gives."""

    def drop(self) -> None:
        """Discard the batch instead of resuming it."""


class Engine(Protocol[P_contra, R_co]):
    """Computes one result per payload, in order; EngineDown says that no later batch will be answered.

    An inline batch is short enough for the loop to wait: the engine may compute it before it returns. A long one may come
    back Preempted; until it resumes, the batches that run in between are not preempted.
    """

    def run(self, batch: Sequence[P_contra], /, *, is_inline: bool) -> Future[Sequence[R_co] | Any]: ...


class Observer(Protocol):
    """One method per event."""

    def queue_changed(self, num_jobs: int, num_bytes: int) -> None: ...

    def batch_done(self, lane: Hashable, batch: BatchInfo, compute_s: float) -> None:
        """The engine answered a batch, which includes requests whose caller has left."""

    def retried_apart(self, lane: Hashable, num_jobs: int, reason: str) -> None:
        """A batch failed, and `num_jobs` of it are retried one by one; `reason` is the name of the exception's type."""

    def batch_split(self, lane: Hashable, num_jobs: int) -> None:
        """A batch ran out of memory, and `num_jobs` of it are retried in two halves."""

    def died(self, num_jobs: int, error: BaseException | None) -> None:
        """The batcher's loop ended and `num_jobs` failed; `error` is None if it was cancelled from outside."""
