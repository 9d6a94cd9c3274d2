"""The observer: what the waiting room tells whoever keeps the numbers.

Lives here: one verb per event, and the frozen values that go with them.
Must not know: who listens (metrics, a test), or what a metric is.
Laws: an event is told once, after the state has changed, on the loop; a listener returns at once and raises nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from service.batching.job import BatchInfo, Cost, Stage


@dataclass(frozen=True, slots=True)
class BatchEvent:
    """The engine answered a batch; `requests` counts also those whose caller did not wait for it, `notes` are the batch's."""

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
    """A batch failed, and `num_jobs` of it are tried again one by one; `reason` is the name of the exception's type."""

    lane: Hashable
    num_jobs: int
    reason: str


@dataclass(frozen=True, slots=True)
class SplitEvent:
    """Memory ran out for a batch, and `num_jobs` of it are tried again in two halves."""

    lane: Hashable
    num_jobs: int


@dataclass(frozen=True, slots=True)
class CancelEvent:
    """A caller left; `stage` is how far his job had come."""

    lane: Hashable
    stage: Stage


@dataclass(frozen=True, slots=True)
class DeathEvent:
    """The waiting room's loop ended, `num_jobs` were told so; `error` is None where it was cancelled from outside."""

    num_jobs: int
    error: BaseException | None


class Observer(Protocol):
    """One verb per event."""

    def queue_changed(self, num_jobs: int, num_bytes: int) -> None: ...

    def batch_done(self, event: BatchEvent) -> None: ...

    def retried_apart(self, event: RetryEvent) -> None: ...

    def batch_split(self, event: SplitEvent) -> None: ...

    def job_cancelled(self, event: CancelEvent) -> None: ...

    def died(self, event: DeathEvent) -> None: ...
