"""Job: one admitted request with its cost, its times and the promise of its answer.

Independent of queues, the choice of batches, the engine and HTTP.
Invariants: `settle` and `fail` are the only ways to finish a job; both are idempotent, even if the caller has left. The promise
travels inside the job, so there is no table of waiters that could leak. A job stamps its own times.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Generic, NamedTuple, TypeVar

from service.errors import DeadlineExceeded
from service.loop_time import Clock, Handle

P = TypeVar("P")
R = TypeVar("R")


class Cost(NamedTuple):
    """What one request takes; `cells` are attention scores, heads x L x S summed over its sequences."""

    sequences: int
    tokens: int
    cells: int
    weights_bytes: int
    input_bytes: int
    flops: int


NOTHING = Cost(sequences=0, tokens=0, cells=0, weights_bytes=0, input_bytes=0, flops=0)


class Work(NamedTuple):
    """An amount of work: its flops, and its number of jobs."""

    flops: int
    num_jobs: int


@dataclass(frozen=True, slots=True)
class BatchInfo:
    """The batch that a job was computed in; an observer of the batch may leave values for its jobs in `notes`."""

    requests: int
    sequences: int
    tokens: int
    weights_bytes: int = 0
    notes: dict[str, object] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, costs: Sequence[Cost]) -> BatchInfo:
        return cls(
            requests=len(costs),
            sequences=sum([cost.sequences for cost in costs]),
            tokens=sum([cost.tokens for cost in costs]),
            weights_bytes=sum([cost.weights_bytes for cost in costs]),
        )


class Outcome(NamedTuple, Generic[R]):
    """An answer with its batch; `queue_s` is the time from acceptance to the first start, `compute_s` from then to the end."""

    result: R
    batch: BatchInfo
    queue_s: float
    compute_s: float


@dataclass(slots=True, eq=False, repr=False)
class Job(Generic[P, R]):
    """One admitted request, made on the running event loop, to which its promise belongs. A refused one is dropped at once."""

    payload: P
    lane: Hashable
    cost: Cost
    _: KW_ONLY
    deadline: float
    clock: Clock
    caller: Hashable = None
    batch: BatchInfo | None = None
    timer: Handle | None = None  # the call at its deadline: set by the batcher, cancelled at the end
    promise: asyncio.Future[Outcome[R]] = field(init=False)
    accepted_at: float = field(init=False)
    started_at: float | None = None
    settled_at: float | None = None

    def __post_init__(self) -> None:
        self.promise = asyncio.get_running_loop().create_future()
        self.accepted_at = self.clock.now()

    @property
    def is_settled(self) -> bool:
        """Whether the job was answered or has failed, or its caller has left."""
        return self.settled_at is not None or self.promise.done()

    def due_at(self, max_wait_s: float) -> float:
        """Return until when the job waits for others to join it: for half of the time to its deadline at most."""
        return self.accepted_at + min(max_wait_s, (self.deadline - self.accepted_at) / 2)

    def start(self, batch: BatchInfo) -> None:
        """Stamp the start; a retry changes the batch, not the time: queue_s ends at the first dispatch."""
        self.batch = batch
        if self.started_at is None:
            self.started_at = self.clock.now()

    def settle(self, result: R) -> bool:
        """Give the caller the result; return False if it was settled, the caller left, or the deadline passed."""
        if self.is_settled:
            return False
        if self.started_at is None or self.batch is None:
            raise RuntimeError("a job was settled before it was started. This is a bug.")
        now = self.clock.now()
        if now >= self.deadline:  # it passed while the loop waited for the engine
            self.expire()
            return False
        self._finish(now)
        queue_s, compute_s = self.started_at - self.accepted_at, now - self.started_at
        self.promise.set_result(Outcome(result, self.batch, queue_s, compute_s))
        return True

    def fail(self, error: BaseException) -> bool:
        """Give the caller the error; return False, without effect, if the job was finished before."""
        if self.settled_at is not None:
            return False
        self._finish(self.clock.now())
        if not self.promise.done():
            self.promise.set_exception(error)
            self.promise.exception()  # marks it as retrieved, so that asyncio logs nothing if the caller left
        return True

    def expire(self) -> bool:
        """Fail with DeadlineExceeded."""
        left_s = self.deadline - self.accepted_at
        return self.fail(
            DeadlineExceeded(f"no answer within the {left_s:.3f} s that were left when the request was queued")
        )

    def _finish(self, now: float) -> None:
        self.settled_at = now
        if self.timer is not None:
            self.timer.cancel()
