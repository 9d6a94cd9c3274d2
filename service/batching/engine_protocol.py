"""Engine protocol: a batch goes in, a future of its results comes out; Observer is the protocol for events.

Independent of queues, tensors and the engine's threads, and of the listeners of events (metrics, a test).
Invariants: An event is reported once, after the state has changed, on the loop. A listener returns at once and raises nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from typing import Protocol, TypeVar

from service.batching.job import BatchInfo, R

# A batch is stuck if it made no progress at this many checks, spread over `QueueLimits.stuck_s`. A pause of the process is one.
STUCK_CHECKS = 5

P_contra = TypeVar("P_contra", contravariant=True)


class Progress(Protocol):
    """How far a batch has come; the engine's thread counts, the loop reads and may stop the batch."""

    @property
    def num_points(self) -> int:
        """Points that the batch has passed at which it could have stopped."""

    @property
    def seconds(self) -> float:
        """Processor time of the computation so far; 0 if the engine does not measure it."""

    @property
    def filler_rows(self) -> int: ...

    def stop(self) -> None:
        """End the batch at its next point; its future then fails."""


class Engine(Protocol[P_contra, R]):
    """Computes one result per payload, in order; EngineDown says that no later batch will be answered.

    An inline batch is short enough for the loop to wait: the engine may compute it before it returns. At most one long batch
    computes beside the others, on a thread of its own.
    """

    def run(
        self, batch: Sequence[P_contra], /, *, is_inline: bool, is_long: bool
    ) -> tuple[Future[Sequence[R]], Progress]: ...

    def rate(self, payload: P_contra, /) -> float:
        """Return the flops per second that computations of this kind reached in their self-check; 0 if unknown."""


class Observer(Protocol):
    """One method per event."""

    def queue_changed(self, num_jobs: int, num_bytes: int) -> None: ...

    def computed(self, progress: Progress) -> None:
        """The engine has ended a batch, whether it answered or failed."""

    def batch_done(self, lane: Hashable, batch: BatchInfo, compute_s: float) -> None:
        """The engine answered a batch, which includes requests whose caller has left."""

    def retried_apart(self, lane: Hashable, num_jobs: int, reason: str) -> None:
        """A batch failed, and `num_jobs` of it are retried one by one; `reason` is the name of the exception's type."""

    def batch_split(self, lane: Hashable, num_jobs: int) -> None:
        """A batch ran out of memory, and `num_jobs` of it are retried in two halves."""

    def died(self, num_jobs: int, error: BaseException | None) -> None:
        """The batcher's loop ended and `num_jobs` failed; `error` is None if it was cancelled from outside."""
