"""Reconciler: how a process follows the desired state while layers load slowly and rollouts are rolled back."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from service.worker.desired_state import DesiredState, DesiredStateFile, Phase
from service.worker.reconciler import Reconciler
from tests.doubles import ManualClock, turns

FIRST = DesiredState(1, Phase.SETTLED, {"a": "1"})


class SlowRegistry:
    """A layer registry that follows a desired state only once `gate` is open."""

    def __init__(self) -> None:
        self.fault: str | None = None
        self.begun: list[int] = []
        self.done: list[int] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def apply(self, desired: DesiredState) -> None:
        self.begun.append(desired.version)
        await self.gate.wait()
        self.done.append(desired.version)


class Story:
    def __init__(self, directory: Any) -> None:
        self.desired_file, self.registry, self.acknowledged = DesiredStateFile(directory), SlowRegistry(), list[int]()
        self.desired_file.create(FIRST.layers)
        self.reconciler = Reconciler(
            self.registry,  # type: ignore[arg-type]
            self.desired_file,
            ManualClock(),
            10.0,
            lambda: self.acknowledged.append(self.reconciler.version),
        )

    async def tell(self, desired: DesiredState) -> None:
        self.desired_file.write(desired)
        self.reconciler.check()
        await turns()


@pytest.fixture
def run(tmp_path):
    def run(story: Any) -> None:
        async def main() -> None:
            told = Story(tmp_path)
            await told.reconciler.load(strict=True)
            running = asyncio.ensure_future(told.reconciler.run())
            with told.desired_file.locked():  # as by the process that writes these states
                await story(told)
            assert not running.done()
            running.cancel()
            await asyncio.wait([running])
            await turns()
            assert len(asyncio.all_tasks()) == 1, "nothing is left behind"

        asyncio.run(main())

    return run


def test_an_aborted_desired_state_is_not_completed(run):
    """Its layer may take minutes to load, and the next change must not wait for it."""

    async def story(told: Story) -> None:
        told.registry.gate.clear()
        desired = FIRST.prepare("a", "2")
        await told.tell(desired)
        assert told.registry.begun == [1, 2]
        told.registry.gate = asyncio.Event()
        told.registry.gate.set()
        await told.tell(desired.abort())
        assert told.registry.done == told.acknowledged == [1, 3]

    run(story)


def test_a_current_desired_state_is_completed_despite_notifications(run):
    async def story(told: Story) -> None:
        told.registry.gate.clear()
        await told.tell(FIRST.prepare("a", "2"))
        for _ in range(3):
            told.reconciler.check()
            await turns()
        assert told.registry.begun == [1, 2]
        told.registry.gate.set()
        await turns()
        assert told.registry.done == told.acknowledged == [1, 2]

    run(story)


def test_an_internal_fault_ends_the_task(tmp_path):
    """The owner of the task sees the error and has the process replaced."""

    async def story() -> None:
        told = Story(tmp_path)
        await told.reconciler.load(strict=True)
        running = asyncio.ensure_future(told.reconciler.run())

        def fail(desired: DesiredState) -> Coroutine[Any, Any, None]:
            raise ValueError("a bug")

        told.registry.apply = fail  # type: ignore[method-assign]
        with told.desired_file.locked():
            await told.tell(FIRST.prepare("a", "2"))
        with pytest.raises(ValueError, match="a bug"):
            await running

    asyncio.run(story())
