"""Observer: the interface through which the batcher reports its events, and their frozen values.

Independent of its listeners (metrics, a test) and of metrics.
Invariants: An event is reported once, after the state has changed, on the loop. A listener returns at once and raises nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from service.batching.job import BatchInfo, Cost, Stage


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
