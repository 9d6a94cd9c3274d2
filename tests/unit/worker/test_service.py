"""Service: a process whose engine goes down or hangs while layers are loaded leaves like one in which a batch does so.

And in an overload it trims its heap sooner and more often.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from service.api.auth.key_ring import Role, line_for
from service.attention import self_check
from service.attention.call import AttentionCall
from service.attention.engine import Engine, LayerCall
from service.attention.heap import IDLE_GROWTH_BYTES, OVERLOAD_GROWTH_BYTES, Heap
from service.batching.batcher import Batcher
from service.batching.engine_protocol import STUCK_CHECKS
from service.batching.job import Cost
from service.errors import Draining, EngineDown
from service.layers.store import Store
from service.observability.telemetry import Telemetry
from service.settings import load_settings
from service.supervisor.status import State
from service.supervisor.supervisor import EXIT_ENGINE_DOWN, EXIT_FAILED, EXIT_REFUSED
from service.worker.local_channel import LocalChannel
from service.worker.service import Service, watch_loads
from tests.doubles import lone_metrics, turns
from tests.unit.layers.checkpoints import stored

DOWN = EngineDown("the device failed")


class FailingEngine(Engine):
    """The real engine, whose loads fail with `failure` if there is one."""

    failure: Exception | None = None

    def load(self, build: Any, **options: Any) -> Future[Any]:
        if self.failure is None:
            return super().load(build, **options)
        failed: Future[Any] = Future()
        failed.set_exception(self.failure)
        return failed


class Recording(Telemetry):
    """Records why the process ends."""

    def __init__(self) -> None:
        super().__init__(lone_metrics())
        self.events: list[tuple[str, BaseException | None]] = []

    def died(self, num_jobs: int, error: BaseException | None) -> None:
        self.events.append(("engine_down", error))

    def task_failed(self, error: BaseException) -> None:
        self.events.append(("main_task_failed", error))


class Process:
    """A service over a layer directory; `left` gets the exit code and the reason with which it leaves first."""

    def __init__(self, directory: Path, failure: Exception | None = None, **settings: Any) -> None:
        self.telemetry = Recording()
        self.left: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()
        given = {"layers_dir": directory, "device": "cpu", "workers": 1, "heartbeat_s": 0.02, **settings}
        self.service = Service(load_settings(**given), self.telemetry, LocalChannel(), self._leave, FailingEngine)
        self.fail_loads(failure)

    def fail_loads(self, failure: Exception | None) -> None:
        assert isinstance(self.service.engine, FailingEngine)
        self.service.engine.failure = failure

    def _leave(self, exit_code: int) -> None:
        reason = self.service._channel.status.start_error or str(self.service.why_not_ready())
        if not self.left.done():
            self.left.set_result((exit_code, reason))

    async def serve(self) -> None:
        self.service.readiness.port_opened()
        async with asyncio.timeout(10):
            while self.service.why_not_ready() is not None:  # noqa: ASYNC110 (readiness is state, not an event)
                await asyncio.sleep(0.001)

    async def end(self) -> tuple[int, str]:
        async with asyncio.timeout(10):
            left = await self.left
        await turns()  # the batcher's task ends
        return left


@contextlib.asynccontextmanager
async def started(directory: Path, failure: Exception | None = None, **settings: Any) -> AsyncIterator[Process]:
    process = Process(directory, failure, **settings)
    await process.service.start()
    try:
        yield process
    finally:
        await process.service.stop()


@pytest.mark.parametrize("has_layers", [True, False])
def test_an_engine_that_goes_down_at_the_first_load_has_the_process_replaced(tmp_path, has_layers):
    """Not refused: the supervisor would end the whole service."""
    if has_layers:
        Store(tmp_path).save(stored())

    async def story() -> None:
        async with started(tmp_path, DOWN) as process:
            assert await process.end() == (EXIT_ENGINE_DOWN, "the engine is down")
            assert process.service.why_not_ready() == "the engine is down"
            assert process.telemetry.events == [("engine_down", DOWN)]

    asyncio.run(story())


def test_an_engine_that_goes_down_in_a_rollout_has_the_process_replaced(tmp_path):
    async def story() -> None:
        async with started(tmp_path) as process:
            await process.serve()
            Store(tmp_path).save(stored())
            process.fail_loads(DOWN)
            author = asyncio.ensure_future(process.service.put_layer("tiny"))
            assert await process.end() == (EXIT_ENGINE_DOWN, "the engine is down")
            assert process.service.why_not_ready() == "the engine is down"
            assert process.telemetry.events == [("engine_down", DOWN)]
            process.service.begin_drain()
            with pytest.raises(Draining):
                await author

    asyncio.run(story())


class Checks:
    """A self-check whose forward passes wait for `gate`, or take `step_s` each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step_s: float = 0.0) -> None:
        self.gate, self._step_s, self._checks = threading.Event(), step_s, self_check.checks
        self.gate.set()
        monkeypatch.setattr("service.attention.self_check.checks", self)

    def __call__(self, layer: self_check.Variant) -> Iterator[bool]:
        for kept in self._checks(layer):
            self.gate.wait(10)
            time.sleep(self._step_s)
            yield kept


STUCK_S = 0.2


def is_down(process: Process) -> None:
    ((event, error),) = process.telemetry.events
    assert (event, type(error)) == ("engine_down", EngineDown)
    assert process.service.why_not_ready() == "the engine is down"


@pytest.mark.parametrize("has_layers", [True, False])
def test_a_first_load_that_hangs_has_the_process_replaced(tmp_path, monkeypatch, has_layers):
    if has_layers:
        Store(tmp_path).save(stored())
    checks = Checks(monkeypatch)
    checks.gate.clear()

    async def story() -> None:
        async with started(tmp_path, stuck_s=STUCK_S) as process:
            assert await process.end() == (EXIT_ENGINE_DOWN, "the engine is down")
            is_down(process)
            checks.gate.set()

    asyncio.run(story())


def test_a_change_that_hangs_fails_waiting_requests_and_has_the_process_replaced(tmp_path, monkeypatch):
    """A long request waits for it."""
    checks = Checks(monkeypatch)

    async def story() -> None:
        async with started(tmp_path, stuck_s=STUCK_S) as process:
            await process.serve()
            Store(tmp_path).save(stored())
            checks.gate.clear()
            author = asyncio.ensure_future(process.service.put_layer("tiny"))
            while process.service.engine.load_step_began is None:  # noqa: ASYNC110 (it is state, not an event)
                await asyncio.sleep(0.001)
            attention = process.service.catalog.attention
            assert attention is not None
            row = torch.zeros(1, 1, 1, 1)
            payload = LayerCall(attention.loaded, AttentionCall(row, row, row, scale=1.0))
            cost = Cost(sequences=1, tokens=2, cells=1, weights_bytes=0, input_bytes=0, flops=10**15)
            with pytest.raises(EngineDown):
                await process.service.batcher.submit(payload, "lane", cost, time.monotonic() + 10)
            assert await process.end() == (EXIT_ENGINE_DOWN, "the engine is down")
            is_down(process)
            author.cancel()
            checks.gate.set()

    asyncio.run(story())


def test_a_pause_of_the_process_during_a_step_of_a_load_is_one_check(tmp_path):
    """An hour passes in one sleep; the step ends after it."""
    began = iter([1.0] * STUCK_CHECKS + [None, 2.0, None] + [3.0] * 100)
    engine: Any = SimpleNamespace(load_step_began=None)
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        engine.load_step_began = next(began)

    with pytest.raises(EngineDown, match="a step of a load"):
        asyncio.run(watch_loads(engine, 60.0, sleep))
    assert slept == [60.0 / STUCK_CHECKS] * (STUCK_CHECKS + 3 + STUCK_CHECKS + 1)


def test_a_load_of_many_steps_may_take_longer_than_one_step_may(tmp_path, monkeypatch):
    step_s = STUCK_S / 10  # there are 28 steps and more
    Checks(monkeypatch, step_s)

    async def story() -> None:
        async with started(tmp_path, stuck_s=STUCK_S) as process:
            began = time.monotonic()
            await process.serve()
            assert time.monotonic() - began > STUCK_S
            assert not process.left.done()

    asyncio.run(story())


@pytest.mark.parametrize(("has_layers", "what"), [(True, 'layer "tiny"'), (False, "attention without a layer")])
@pytest.mark.parametrize("failure", [RuntimeError("a secret reason"), MemoryError()], ids=["passes", "memory"])
def test_a_first_load_that_fails_otherwise_is_refused(tmp_path, has_layers, what, failure):
    if has_layers:
        Store(tmp_path).save(stored())

    async def story() -> None:
        async with started(tmp_path, failure) as process:
            exit_code, reason = await process.end()
            assert exit_code == EXIT_REFUSED
            assert reason.startswith(what)
            assert process.service.why_not_ready() == reason
            assert process.telemetry.events == []

    asyncio.run(story())


def test_an_internal_fault_of_a_task_has_the_process_replaced(tmp_path, monkeypatch):
    fault = ValueError("a bug")

    def serving(self: Recording, names: list[str], num_layers: int, _: str = "") -> None:
        raise fault

    monkeypatch.setattr(Recording, "serving", serving)

    async def story() -> None:
        async with started(tmp_path) as process:
            exit_code, _ = await process.end()
            assert exit_code == EXIT_FAILED
            assert process.service.why_not_ready() == "an internal fault"
            assert process.telemetry.events == [("main_task_failed", fault)]

    asyncio.run(story())


def test_a_process_whose_engine_goes_down_in_a_batch_reports_that_and_not_the_drain(tmp_path):
    """As failed, with the reason, until it has ended."""

    async def story() -> None:
        async with started(tmp_path) as process:
            await process.serve()
            process.service.batcher.fail(DOWN)
            assert await process.end() == (EXIT_ENGINE_DOWN, "the engine is down")
            process.service.begin_drain()
            status = process.service._channel.status
            assert (status.state, status.reason) == (State.FAILED, "the engine is down")

    asyncio.run(story())


@pytest.mark.parametrize("hangs", ["engine", "check"])
def test_a_thread_that_does_not_end_delays_the_end_by_at_most_the_time_for_all_threads(tmp_path, monkeypatch, hangs):
    """A forward pass on either thread, or the check of a body: the process then exits without its threads."""
    monkeypatch.setattr("service.worker.service.CLOSE_S", 0.01)
    go_on, ended = threading.Event(), list[bool]()
    hang = lambda *_: ended.append(go_on.wait(20))

    async def story() -> None:
        async with started(tmp_path) as process:
            service = process.service
            if hangs == "engine":
                monkeypatch.setattr(service.engine, "close", hang)
            else:
                checking = asyncio.ensure_future(service.shared.run_off_loop(hang))
                await turns()
        assert not service.is_over()
        assert ended == []
        go_on.set()
        if hangs == "check":
            await checking
        Engine.close(service.engine)

    asyncio.run(story())


def test_a_keys_file_whose_server_is_away_does_not_delay_the_end(tmp_path, monkeypatch):
    """The interpreter would wait for the thread that checks the file: the process exits without it."""
    go_on, begun = threading.Event(), threading.Event()
    (tmp_path / "keys").write_text(line_for("secret", Role.INFER))

    def hang(_: object) -> None:
        begun.set()
        go_on.wait(20)

    async def story() -> None:
        async with started(tmp_path, api_keys_file=tmp_path / "keys") as process:
            assert process.service.keys is not None
            monkeypatch.setattr("service.api.auth.key_ring._stamp", hang)
            checking = asyncio.ensure_future(process.service.keys.check())
            await asyncio.to_thread(begun.wait, 20)
            checking.cancel()
        assert not process.service.is_over()
        go_on.set()

    asyncio.run(story())


class RecordingHeap(Heap):
    """Trims nothing; `called(growth)` waits until it was called with this growth."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._growths: asyncio.Queue[int] = asyncio.Queue()

    def give_back(self, growth_bytes: int) -> None:
        self._loop.call_soon_threadsafe(self._growths.put_nowait, growth_bytes)

    async def called(self, growth_bytes: int) -> None:
        async with asyncio.timeout(10):
            while await self._growths.get() != growth_bytes:
                pass


def test_the_heap_is_trimmed_when_idle_and_in_an_overload(tmp_path, monkeypatch):
    async def story() -> None:
        async with started(tmp_path) as process:
            process.service._heap = heap = RecordingHeap()
            await heap.called(IDLE_GROWTH_BYTES)
            monkeypatch.setattr(Batcher, "num_overloaded", 1)
            await heap.called(OVERLOAD_GROWTH_BYTES)

    asyncio.run(story())
