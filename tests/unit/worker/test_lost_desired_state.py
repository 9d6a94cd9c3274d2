"""Reconciler when the desired state is lost: a process that knows the agreed state writes it again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from service.errors import NotReady
from service.worker import reconciler
from service.worker.desired_state import DesiredState, DesiredStateFile, Phase
from service.worker.reconciler import Reconciler
from tests.doubles import ManualClock, turns

OLD, NEW = {"a": "sha256:1"}, {"a": "sha256:2"}
SETTLED = DesiredState(4, Phase.SETTLED, OLD)
PREPARE = DesiredState(5, Phase.PREPARE, NEW, OLD, "a")
SERVE = DesiredState(6, Phase.SERVE, NEW, OLD, "a")


class LayerRegistry:
    """Serves any desired state; the layer directory holds `found`."""

    fault = None

    def __init__(self) -> None:
        self.served: dict[str, str] | None = None
        self.found = {"z": "sha256:9"}

    async def load_directory(self, *, strict: bool) -> dict[str, str]:
        return self.found

    async def apply(self, desired: DesiredState) -> None:
        self.served = dict(desired.served)


class Process:
    def __init__(self, directory: Path, *, has_peers: bool = False) -> None:
        self.registry = LayerRegistry()
        self.desired_file = DesiredStateFile(directory)
        self.reconciler = Reconciler(
            cast("Any", self.registry), self.desired_file, ManualClock(), 10.0, lambda: None, has_peers=has_peers
        )

    async def follow(self) -> None:
        self._task = asyncio.ensure_future(self.reconciler.run())
        await self.check()

    async def check(self) -> None:
        self.reconciler.check()
        await turns()

    def end(self) -> None:
        self._task.cancel()


@pytest.fixture
def followed(tmp_path):
    """Run `story` with one process per desired state, each started in turn."""

    def run(story, *desired_states, **options):
        async def main():
            processes = []
            for desired in desired_states:
                process = Process(tmp_path, **options)
                process.desired_file.write(desired)
                await process.reconciler.load(strict=True)
                processes.append(process)
            with Process(tmp_path).desired_file.locked():  # as during a rollout: no process rolls back
                for process in processes:
                    await process.follow()
            await story(*processes)
            for process in processes:
                process.end()

        asyncio.run(main())

    return run


@pytest.mark.parametrize("desired", [SETTLED, PREPARE, SERVE], ids=lambda desired: desired.phase)
@pytest.mark.parametrize("text", [None, b"", b'{"version": 9'])
def test_a_lost_desired_state_is_written_again_and_a_running_rollout_aborted(followed, tmp_path, desired, text):
    async def story(process):
        (tmp_path / "desired_state").unlink()
        if text is not None:
            (tmp_path / "desired_state").write_bytes(text)
        await process.check()
        assert process.desired_file.read() == DesiredState(desired.version + 1, Phase.SETTLED, OLD)
        assert process.registry.served == OLD
        assert process.reconciler.version == desired.version + 1

    followed(story, desired)


def test_during_a_rollout_only_its_author_writes_the_desired_state(followed, tmp_path):
    async def story(process):
        with Process(tmp_path).desired_file.locked() as has_lock:
            assert has_lock
            (tmp_path / "desired_state").unlink()
            await process.check()
            assert process.desired_file.read() is None
            assert process.reconciler.version == PREPARE.version
        await process.check()
        assert process.registry.served == OLD

    followed(story, PREPARE)


def test_an_unwritable_run_directory_changes_no_served_layer(followed, tmp_path):
    async def story(process):
        tmp_path.rename(tmp_path.with_name("away"))
        await process.check()
        assert (process.reconciler.version, process.registry.served) == (SETTLED.version, OLD)
        tmp_path.mkdir()
        await process.check()
        assert process.desired_file.read() == DesiredState(SETTLED.version + 1, Phase.SETTLED, OLD)

    followed(story, SETTLED)


@pytest.mark.parametrize("version", [1, SETTLED.version])
def test_the_desired_state_of_a_late_process_yields_to_the_known_one(followed, version):
    async def story(process):
        process.desired_file.write(DesiredState(version, Phase.SETTLED, {"z": "sha256:9"}))
        await process.check()
        assert process.desired_file.read() == DesiredState(SETTLED.version + 1, Phase.SETTLED, OLD)
        assert process.registry.served == OLD

    followed(story, SETTLED)


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize(
    ("desired_states", "layers"),
    [
        ((SETTLED, PREPARE, PREPARE), OLD),
        ((PREPARE, SERVE, SERVE), OLD),
        ((SERVE, SERVE, SERVE.settle()), NEW),
        ((SETTLED, SETTLED, SETTLED), OLD),
    ],
    ids=["preparing", "serving", "settled", "at-rest"],
)
def test_processes_in_different_phases_agree_again_in_any_order_of_checks(
    followed, tmp_path, desired_states, layers, first
):
    async def story(*processes):
        (tmp_path / "desired_state").unlink()
        for _ in range(3):
            for process in (*processes[first:], *processes[:first]):
                await process.check()
        (agreed,) = {process.reconciler.version for process in processes}
        assert processes[0].desired_file.read() == DesiredState(agreed, Phase.SETTLED, layers)
        assert all(process.registry.served == layers for process in processes)

    followed(story, *desired_states)


def test_a_process_with_peers_waits_for_them_to_write_the_desired_state_again(tmp_path):
    async def story():
        process = Process(tmp_path, has_peers=True)
        beginning = asyncio.ensure_future(process.reconciler.load(strict=True))
        await process.check()
        assert not beginning.done()
        process.desired_file.write(SETTLED)
        process.reconciler.check()
        await beginning
        assert (process.reconciler.version, process.registry.served) == (SETTLED.version, OLD)

    asyncio.run(story())


def test_a_process_with_silent_peers_serves_nothing_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(reconciler, "DESIRED_STATE_S", 0.0)
    process = Process(tmp_path, has_peers=True)
    with pytest.raises(NotReady, match="does not say which"):
        asyncio.run(process.reconciler.load(strict=True))
    assert process.registry.served is None


def test_a_process_without_peers_begins_with_the_layer_directory(tmp_path):
    process = Process(tmp_path)
    asyncio.run(process.reconciler.load(strict=True))
    assert process.desired_file.read() == DesiredState(1, Phase.SETTLED, {"z": "sha256:9"})
    assert process.registry.served == {"z": "sha256:9"}
