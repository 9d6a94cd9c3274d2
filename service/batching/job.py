"""A job: one admitted request, what it costs, and the promise of its answer.

Lives here: the cost of a request, the job with its times, the outcome its caller gets.
Must not know: queues, batches' choice, the engine, HTTP.
Laws: `settle` and `fail` are the only ways to finish a job and are idempotent, whatever became of the caller; the
promise travels inside the job, so there is no table of waiters that could leak; a job stamps its own times.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, NamedTuple, TypeVar

from service.batching.clock import Clock, Handle
from service.errors import DeadlineExceeded

P = TypeVar("P")
R = TypeVar("R")

Stage = Literal["queued", "running", "settled"]


class Cost(NamedTuple):
    """What one request takes: cells are attention scores, heads x L x S summed over its sequences."""

    sequences: int
    tokens: int
    cells: int
    weights_bytes: int
    input_bytes: int
    flops: int


NOTHING = Cost(sequences=0, tokens=0, cells=0, weights_bytes=0, input_bytes=0, flops=0)


@dataclass(frozen=True, slots=True)
class BatchInfo:
    """The company a job was computed in; in `notes` an observer of the batch may leave word for those of its members."""

    requests: int
    sequences: int
    tokens: int
    notes: dict[str, object] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, costs: Sequence[Cost]) -> BatchInfo:
        return cls(len(costs), sum([cost.sequences for cost in costs]), sum([cost.tokens for cost in costs]))


class Outcome(NamedTuple, Generic[R]):
    """An answer with its batch and its times: accepted to first started, and from there to settled (seconds)."""

    result: R
    batch: BatchInfo
    queue_s: float
    compute_s: float


class Job(Generic[P, R]):
    """One admitted request; made on the running event loop, which its promise belongs to."""

    __slots__ = (
        "_clock",
        "accepted_at",
        "batch",
        "caller",
        "cost",
        "deadline",
        "lane",
        "payload",
        "promise",
        "settled_at",
        "started_at",
        "timer",
    )

    def __init__(
        self, payload: P, lane: Hashable, cost: Cost, *, deadline: float, clock: Clock, caller: Hashable = None
    ) -> None:
        self._clock = clock
        self.caller = caller
        self.payload = payload
        self.lane = lane
        self.cost = cost
        self.deadline = deadline
        self.promise: asyncio.Future[Outcome[R]] = asyncio.get_running_loop().create_future()
        self.batch: BatchInfo | None = None
        self.timer: Handle | None = None  # the call at its deadline, set by the batcher, called off when it is finished
        self.accepted_at = clock.now()
        self.started_at: float | None = None
        self.settled_at: float | None = None

    @property
    def is_settled(self) -> bool:
        """Whether nothing can be done for the caller any more: answered, failed, or gone."""
        return self.settled_at is not None or self.promise.done()

    @property
    def stage(self) -> Stage:
        if self.settled_at is not None:
            return "settled"
        return "queued" if self.started_at is None else "running"

    def start(self, batch: BatchInfo) -> None:
        """Stamp the start; a retry changes the batch, not the time: queue_s ends where it was first handed over."""
        self.batch = batch
        if self.started_at is None:
            self.started_at = self._clock.now()

    def settle(self, result: R) -> bool:
        """Give the caller the result; False where it is settled, its caller has gone, or its deadline, which he is told."""
        if self.is_settled:
            return False
        if self.started_at is None or self.batch is None:
            raise RuntimeError("a job was settled before it was started. This is a bug.")
        now = self._clock.now()
        if now >= self.deadline:  # it passed while the loop waited for the engine
            self.expire()
            return False
        self._finish(now)
        queue_s, compute_s = self.started_at - self.accepted_at, now - self.started_at
        self.promise.set_result(Outcome(result, self.batch, queue_s, compute_s))
        return True

    def fail(self, error: BaseException) -> bool:
        """Give the caller the error; False, and nothing happens, where the job was finished before."""
        if self.settled_at is not None:
            return False
        self._finish(self._clock.now())
        if not self.promise.done():
            self.promise.set_exception(error)
            self.promise.exception()  # marks it as seen: a caller who left is no reason for a line on stderr
        return True

    def expire(self) -> bool:
        """Fail with DeadlineExceeded."""
        left_s = self.deadline - self.accepted_at
        return self.fail(
            DeadlineExceeded(f"there was no answer in the {left_s:.3f} s that were left when it came to wait")
        )

    def _finish(self, now: float) -> None:
        self.settled_at = now
        if self.timer is not None:
            self.timer.cancel()

    def __repr__(self) -> str:
        return f"<Job in lane {self.lane!r}, {self.stage}>"
