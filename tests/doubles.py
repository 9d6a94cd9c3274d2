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

from service.attention.progress import Progress
from service.batching import engine_protocol
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


class Held(NamedTuple):
    """A batch that a GateEngine holds."""

    batch: list[Any]
    future: Future[Any]
    progress: Progress


class GateEngine:
    """An engine that holds each batch until the test opens the gate; it insists on one short and one long batch at a time.

    `is_open` answers at once. `bad` payloads fail every batch they are in; more than `room` of them are too much for its
    memory. `answer` may be replaced to return nonsense. `first_rate` is that of its self-checks.
    """

    def __init__(self, *, is_open: bool = False) -> None:
        self.is_open = is_open
        self.first_rate = 0.0
        self.bad: dict[Any, BaseException] = {}
        self.room = 10**9
        self.answer: Callable[[Batch], Any] = echo
        self.batches: list[list[Any]] = []
        self.inline_flags: list[bool] = []  # for each of them, whether it was run inline
        self.long_flags: list[bool] = []  # for each of them, whether it was long
        self.held: dict[bool, Held] = {}  # the held batches, by whether they are long
        self.stopped: list[list[Any]] = []  # batches that were stopped before they ended

    @property
    def executed(self) -> list[Any]:
        """Every payload that was ever handed over, in order."""
        return [payload for batch in self.batches for payload in batch]

    @property
    def is_busy(self) -> bool:
        """Whether a short batch is held."""
        return self.is_held()

    def is_held(self, *, is_long: bool = False) -> bool:
        return is_long in self.held and not self.held[is_long].future.done()

    @property
    def in_hand(self) -> list[Any]:
        """The short batch that is held."""
        assert False in self.held, "no batch is held"
        return self.held[False].batch

    def rate(self, payload: Any) -> float:
        return self.first_rate

    def run(self, batch: Batch, *, is_inline: bool = False, is_long: bool = False) -> tuple[Future[Any], Progress]:
        self.batches.append(list(batch))
        self.inline_flags.append(is_inline)
        self.long_flags.append(is_long)
        assert not self.is_held(is_long=is_long), "two batches in flight on one thread"
        held = self.held[is_long] = Held(list(batch), Future(), Progress())
        if self.is_open:
            self.release(is_long=is_long)
        return held.future, held.progress

    def release(self, *, is_long: bool = False) -> None:
        """The held batch ends as its payloads deserve."""
        batch, future = self._take(is_long)
        bad = [self.bad[payload] for payload in batch if payload in self.bad]
        if len(batch) > self.room:
            future.set_exception(CostLimit("too much for the memory"))
        elif bad:
            future.set_exception(bad[0])
        else:
            future.set_result(self.answer(batch))

    def open(self) -> None:
        """The held batches end, and later ones at once."""
        self.is_open = True
        for is_long in (False, True):
            if self.is_held(is_long=is_long):
                self.release(is_long=is_long)

    def fail(self, error: BaseException, *, is_long: bool = False) -> None:
        """The held batch fails."""
        self._take(is_long)[1].set_exception(error)

    def die(self, *, is_long: bool = False) -> None:
        """The held batch fails, and no later one will be answered."""
        self.fail(EngineDown("the compute thread ended"), is_long=is_long)

    def drop(self) -> None:
        """The held batch is cancelled from the engine's side."""
        assert self._take(False)[1].cancel()

    def _take(self, is_long: bool) -> tuple[list[Any], Future[Any]]:
        assert is_long in self.held, "no batch is held"
        batch, future, progress = self.held.pop(is_long)
        if progress.is_stopped:
            self.stopped.append(batch)
        return batch, future


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

    def computed(self, progress: engine_protocol.Progress) -> None: ...

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
