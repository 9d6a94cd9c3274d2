"""Reconciler: how a process follows the desired state while layers load slowly and rollouts are rolled back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from service.supervisor.coordinator import Coordinator
from service.supervisor.status import DesiredState, Phase
from service.worker.layer_registry import Reconciler
from service.worker.local_channel import LocalChannel
from tests.doubles import ManualClock, turns

FIRST = DesiredState(1, Phase.SETTLED, {"a": "1"})


class SlowRegistry:
    """A layer registry that follows a desired state only once `gate` is open; the layer directory holds `found`."""

    def __init__(self) -> None:
        self.fault: str | None = None
        self.applied = DesiredState()
        self.found = dict(FIRST.layers)
        self.begun: list[int] = []
        self.done: list[int] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def load_directory(self, *, strict: bool) -> dict[str, str]:
        assert strict
        return self.found

    async def apply(self, desired: DesiredState) -> None:
        self.begun.append(desired.version)
        await self.gate.wait()
        self.done.append(desired.version)
        self.applied = desired


class Process:
    """A reconciler whose coordinator the test changes at will."""

    def __init__(self, desired: DesiredState | None = None) -> None:
        self.coordinator, self.registry, self.acknowledged = Coordinator(1, time.monotonic), SlowRegistry(), list[int]()
        self.coordinator.desired = desired or DesiredState()
        self.channel, self.clock = LocalChannel(self.coordinator), ManualClock()
        acknowledge = lambda: self.acknowledged.append(self.registry.applied.version)
        self.reconciler = Reconciler(self.registry, self.channel, self.clock, 10.0, acknowledge)  # type: ignore[arg-type]
        self.channel.open(self.reconciler.check)

    async def set_desired(self, desired: DesiredState) -> None:
        self.coordinator.desired = desired
        self.channel.report()
        await turns()


@pytest.fixture
def run():
    def run(story: Any) -> None:
        async def main() -> None:
            process = Process()
            await process.reconciler.load(strict=True)
            running = asyncio.ensure_future(process.reconciler.run())
            await story(process)
            assert not running.done()
            running.cancel()
            await asyncio.wait([running])
            await turns()
            assert len(asyncio.all_tasks()) == 1, "nothing is left behind"

        asyncio.run(main())

    return run


def test_the_first_process_proposes_what_the_layer_directory_holds(run):
    async def story(process: Process) -> None:
        assert process.coordinator.desired == FIRST
        assert (process.registry.done, process.acknowledged, process.registry.applied.version) == ([1], [1], 1)
        assert process.channel.status.found is None, "later reports are short"

    run(story)


def test_a_later_process_serves_the_desired_state_and_does_not_look_at_the_layer_directory():
    async def story() -> None:
        process = Process(FIRST)
        process.registry.load_directory = None  # type: ignore[assignment, method-assign]
        await process.reconciler.load(strict=True)
        assert (process.registry.done, process.acknowledged) == ([1], [1])

    asyncio.run(story())


def test_of_two_that_load_at_once_the_later_serves_what_the_first_found():
    async def story() -> None:
        process = Process()

        async def load_directory(*, strict: bool) -> dict[str, str]:
            process.coordinator.desired = FIRST  # another process was quicker
            return {"z": "9"}

        process.registry.load_directory = load_directory  # type: ignore[method-assign]
        await process.reconciler.load(strict=True)
        assert process.coordinator.desired == FIRST
        assert process.registry.done == [1]

    asyncio.run(story())


def test_an_aborted_desired_state_is_not_completed(run):
    """Its layer may take minutes to load, and the next change must not wait for it."""

    async def story(process: Process) -> None:
        process.registry.gate.clear()
        desired = FIRST.prepare({"a": "2"})
        await process.set_desired(desired)
        assert process.registry.begun == [1, 2]
        process.registry.gate = asyncio.Event()
        process.registry.gate.set()
        await process.set_desired(desired.abort())
        assert process.registry.done == process.acknowledged == [1, 3]

    run(story)


def test_a_current_desired_state_is_completed_despite_other_news(run):
    async def story(process: Process) -> None:
        process.registry.gate.clear()
        await process.set_desired(FIRST.prepare({"a": "2"}))
        for _ in range(3):
            process.reconciler.check()
            await turns()
        assert process.registry.begun == [1, 2]
        process.registry.gate.set()
        await turns()
        assert process.registry.done == process.acknowledged == [1, 2]

    run(story)


def test_a_state_with_a_missing_layer_is_applied_again_later(run):
    async def story(process: Process) -> None:
        process.registry.fault = "a layer is missing"
        for seconds, times in ((0.0, 1), (9.0, 1), (1.0, 2), (9.0, 2), (1.0, 3)):
            process.clock.advance(seconds)
            process.reconciler.check()
            await turns()
            assert process.registry.done == [1] * times

    run(story)


def test_other_states_put_no_retry_off(run):
    """They do not try a missing layer again (test_layer_registry.py), so it would never be tried while others change."""

    async def story(process: Process) -> None:
        process.registry.fault = "a layer is missing"
        desired = FIRST
        for _ in range(2):
            process.clock.advance(4.0)
            desired = desired.prepare({"b": "1"}).abort()
            await process.set_desired(desired)
        assert process.registry.done == [1, 3, 5]
        process.clock.advance(2.0)
        process.reconciler.check()
        await turns()
        assert process.registry.done == [1, 3, 5, 5]
        process.clock.advance(9.0)
        process.reconciler.check()
        await turns()
        assert process.registry.done == [1, 3, 5, 5]

    run(story)


def test_an_internal_fault_ends_the_task():
    """The owner of the task sees the error and has the process replaced."""

    async def story() -> None:
        process = Process()
        await process.reconciler.load(strict=True)
        running = asyncio.ensure_future(process.reconciler.run())

        def fail(desired: DesiredState) -> Coroutine[Any, Any, None]:
            raise ValueError("a bug")

        process.registry.apply = fail  # type: ignore[method-assign]
        await process.set_desired(FIRST.prepare({"a": "2"}))
        with pytest.raises(ValueError, match="a bug"):
            await running

    asyncio.run(story())
