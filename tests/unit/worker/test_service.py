"""Service: a process whose engine goes down while layers are loaded leaves like one whose engine goes down in a batch."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from service.attention.engine import Engine
from service.errors import Draining, EngineDown
from service.layers.store import Store
from service.observability.metrics import Metrics
from service.observability.telemetry import Telemetry
from service.settings import load_settings
from service.supervisor.supervisor import EXIT_ENGINE_DOWN, EXIT_FAILED, EXIT_REFUSED
from service.worker.control_channel import ControlChannel
from service.worker.service import Service
from tests.unit.layers.checkpoints import stored

DOWN = EngineDown("the device failed")


class FailingEngine(Engine):
    """The real engine, whose loads fail with `failure` if there is one."""

    failure: Exception | None = None

    def load(self, spec: Any, tensors: Any) -> Future[Any]:
        if self.failure is None:
            return super().load(spec, tensors)
        failed: Future[Any] = Future()
        failed.set_exception(self.failure)
        return failed


class Recording(Telemetry):
    """Records why the process ends."""

    def __init__(self) -> None:
        super().__init__(Metrics(), time.monotonic)
        self.events: list[tuple[str, BaseException | None]] = []

    def died(self, num_jobs: int, error: BaseException | None) -> None:
        assert num_jobs == 0
        self.events.append(("engine_down", error))

    def task_failed(self, error: BaseException) -> None:
        self.events.append(("main_task_failed", error))


class Process:
    """A service over a layer directory; `left` gets the exit code and the reason with which it leaves first."""

    def __init__(self, directory: Path, failure: Exception | None = None) -> None:
        self.telemetry = Recording()
        self.left: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()
        settings = load_settings(layers_dir=directory, device="cpu", workers=1, heartbeat_s=0.02)
        self.service = Service(settings, self.telemetry, ControlChannel(), self._leave, FailingEngine)
        self.fail_loads(failure)

    def fail_loads(self, failure: Exception | None) -> None:
        assert isinstance(self.service.engine, FailingEngine)
        self.service.engine.failure = failure

    def _leave(self, exit_code: int, reason: str) -> None:
        if not self.left.done():
            self.left.set_result((exit_code, reason))

    async def serve(self) -> None:
        self.service.readiness.port_opened()
        async with asyncio.timeout(10):
            while self.service.why_not_ready() is not None:  # noqa: ASYNC110 (readiness is state, not an event)
                await asyncio.sleep(0.001)

    async def end(self) -> tuple[int, str]:
        async with asyncio.timeout(10):
            return await self.left


@contextlib.asynccontextmanager
async def started(directory: Path, failure: Exception | None = None) -> AsyncIterator[Process]:
    process = Process(directory, failure)
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


def test_a_first_load_that_fails_otherwise_is_refused(tmp_path):
    Store(tmp_path).save(stored())

    async def story() -> None:
        async with started(tmp_path, RuntimeError("a secret reason")) as process:
            exit_code, reason = await process.end()
            assert exit_code == EXIT_REFUSED
            assert reason.startswith('layer "tiny": ')
            assert process.service.why_not_ready() == reason
            assert process.telemetry.events == []

    asyncio.run(story())


def test_an_internal_fault_of_a_task_has_the_process_replaced(tmp_path):
    fault = ValueError("a bug")

    async def story() -> None:
        async with started(tmp_path, fault) as process:
            exit_code, _ = await process.end()
            assert exit_code == EXIT_FAILED
            assert process.service.why_not_ready() == "an internal fault"
            assert process.telemetry.events == [("main_task_failed", fault)]

    asyncio.run(story())
