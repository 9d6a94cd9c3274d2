"""Hand-written doubles: an engine behind a gate, a clock turned by hand, an observer that records, a channel without a socket.

Invariants: nothing here sleeps or polls; time passes only by `ManualClock.advance`, a batch ends when the test says so.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import inspect
import os
from collections.abc import Callable, Coroutine, Hashable, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from service.batching.job import BatchInfo
from service.errors import CostLimit, EngineDown
from service.observability.metrics import Metrics

T = TypeVar("T")
Batch = Sequence[Any]


def echo(batch: Batch) -> list[Any]:
    """GateEngine's answers by default: one result for each payload, which names the payload."""
    return [("answer", payload) for payload in batch]


class ManualClock:
    """Monotonic seconds that pass only when the test says so."""

    class Call:
        def __init__(self, when: float, callback: Callable[[], object]) -> None:
            self.when = when
            self.callback: Callable[[], object] | None = callback

        def cancel(self) -> None:
            self.callback = None

    def __init__(self, now: float = 1000.0) -> None:
        self._now = now
        self._calls: list[tuple[float, int, ManualClock.Call]] = []
        self._order = count()

    def now(self) -> float:
        return self._now

    def call_at(self, when: float, callback: Callable[[], object]) -> ManualClock.Call:
        call = self.Call(when, callback)
        heapq.heappush(self._calls, (when, next(self._order), call))
        return call

    def advance(self, seconds: float) -> None:
        """Let time pass, making each call when it is due."""
        until = self._now + seconds
        while self._calls and self._calls[0][0] <= until:
            when, _, call = heapq.heappop(self._calls)
            self._now = max(self._now, when)
            if call.callback is not None:
                call.callback()
        self._now = until

    def pause(self, seconds: float) -> None:
        """Let time pass while the process is stopped: afterwards each call that is due by then is made late."""
        self._now += seconds
        self.advance(0)

    @property
    def num_calls(self) -> int:
        """Calls that are still to come; 0 at rest, else a timer leaked."""
        return sum(call.callback is not None for _, _, call in self._calls)


class PreemptedBatch:
    """A batch of a GateEngine between two of its steps."""

    def __init__(self, engine: GateEngine, batch: list[Any]) -> None:
        self._engine = engine
        self._batch = batch

    def resume(self) -> Future[Any]:
        assert self._engine.preempted is self
        self._engine.preempted = None
        return self._engine.hold(self._batch)

    def drop(self) -> None:
        assert self._engine.preempted is self
        self._engine.preempted = None
        self._engine.dropped.append(self._batch)


class GateEngine:
    """An engine that holds each batch until the test opens the gate; it insists on one batch at a time.

    `is_open` answers at once. `bad` payloads fail every batch they are in; more than `room` of them are too much for its
    memory. `answer` may be replaced to return nonsense.
    """

    def __init__(self, *, is_open: bool = False) -> None:
        self.is_open = is_open
        self.bad: dict[Any, BaseException] = {}
        self.room = 10**9
        self.answer: Callable[[Batch], Any] = echo
        self.batches: list[list[Any]] = []
        self.inline_flags: list[bool] = []  # for each of them, whether it was run inline
        self.held: tuple[list[Any], Future[Any]] | None = None  # the held batch and its future
        self.preempted: PreemptedBatch | None = None  # a long one, which goes on when it is resumed
        self.dropped: list[list[Any]] = []

    @property
    def executed(self) -> list[Any]:
        """Every payload that was ever handed over, in order."""
        return [payload for batch in self.batches for payload in batch]

    @property
    def is_busy(self) -> bool:
        return self.held is not None and not self.held[1].done()

    @property
    def in_hand(self) -> list[Any]:
        """The batch that is held."""
        assert self.held is not None, "no batch is held"
        return self.held[0]

    def run(self, batch: Batch, *, is_inline: bool = False) -> Future[Any]:
        self.batches.append(list(batch))
        self.inline_flags.append(is_inline)
        return self.hold(list(batch))

    def hold(self, batch: list[Any]) -> Future[Any]:
        """From now on this batch is in hand."""
        assert not self.is_busy, "two batches in flight"
        future: Future[Any] = Future()
        self.held = (batch, future)
        if self.is_open:
            self.release()
        return future

    def release(self) -> None:
        """The held batch ends as its payloads deserve."""
        batch, future = self._take()
        bad = [self.bad[payload] for payload in batch if payload in self.bad]
        if len(batch) > self.room:
            future.set_exception(CostLimit("too much for the memory"))
        elif bad:
            future.set_exception(bad[0])
        else:
            future.set_result(self.answer(batch))

    def preempt(self) -> None:
        """The held batch has done one of its steps."""
        assert self.preempted is None, "two batches are preempted"
        batch, future = self._take()
        self.preempted = PreemptedBatch(self, batch)
        future.set_result(self.preempted)

    def open(self) -> None:
        """The held batch ends, and later ones at once."""
        self.is_open = True
        if self.is_busy:
            self.release()

    def fail(self, error: BaseException) -> None:
        """The held batch fails."""
        self._take()[1].set_exception(error)

    def die(self) -> None:
        """The held batch fails, and no later one will be answered."""
        self.fail(EngineDown("the compute thread ended"))

    def drop(self) -> None:
        """The held batch is cancelled from the engine's side."""
        assert self._take()[1].cancel()

    def _take(self) -> tuple[list[Any], Future[Any]]:
        assert self.held is not None, "no batch is held"
        held, self.held = self.held, None
        return held


class BatchDone(NamedTuple):
    lane: Hashable
    batch: BatchInfo
    compute_s: float


class Death(NamedTuple):
    num_jobs: int
    error: BaseException | None


class RecordingObserver:
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.queue: list[tuple[int, int]] = []
        self.batches: list[BatchDone] = []
        self.retries: list[tuple[Hashable, int, str]] = []
        self.splits: list[tuple[Hashable, int]] = []
        self.deaths: list[Death] = []

    def queue_changed(self, num_jobs: int, num_bytes: int) -> None:
        self.queue.append((num_jobs, num_bytes))

    def batch_done(self, lane: Hashable, batch: BatchInfo, compute_s: float) -> None:
        self.batches.append(BatchDone(lane, batch, compute_s))

    def retried_apart(self, lane: Hashable, num_jobs: int, reason: str) -> None:
        self.retries.append((lane, num_jobs, reason))

    def batch_split(self, lane: Hashable, num_jobs: int) -> None:
        self.splits.append((lane, num_jobs))

    def died(self, num_jobs: int, error: BaseException | None) -> None:
        self.deaths.append(Death(num_jobs, error))


async def turns(num: int = 12) -> None:
    """Let the loop turn until what is ready has run; nothing here waits for anything but the next turn."""
    for _ in range(num):
        await asyncio.sleep(0)


def lone_metrics() -> Metrics:
    """Metrics without files: there is no directory for them, so only this process has their values."""
    return Metrics(Path(os.devnull), 0)


def run(main: Callable[[], Coroutine[Any, Any, T]], *, loop_factory: Any = None) -> T:
    """Run a test's coroutine; whatever the loop or a destructor complains of fails it."""
    complaints: list[dict[str, Any]] = []

    async def supervised() -> T:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        return await main()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        result = runner.run(supervised())
    assert not complaints, complaints
    return result


def on_loop(test: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., None]:
    """Make a test of a coroutine function; `run` runs it."""

    @functools.wraps(test)
    def sync_test(*arguments: Any, **named: Any) -> None:
        run(functools.partial(test, *arguments, **named))

    return sync_test


def on_loop_with(
    made: Callable[[], AbstractAsyncContextManager[Any]],
    start: Callable[[Callable[[], Coroutine[Any, Any, None]]], object] = run,
) -> Callable[[Callable[..., Coroutine[Any, Any, Any]]], Callable[..., None]]:
    """Make a test of a coroutine function, whose first parameter is what each call of `made` gives; pytest gives the others."""

    def decorate(test: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., None]:
        @functools.wraps(test)
        def sync_test(*arguments: Any, **named: Any) -> None:
            async def main() -> None:
                async with made() as first:
                    await test(first, *arguments, **named)

            start(main)

        signature = inspect.signature(test)
        sync_test.__dict__["__signature__"] = signature.replace(parameters=[*signature.parameters.values()][1:])
        return sync_test

    return decorate
