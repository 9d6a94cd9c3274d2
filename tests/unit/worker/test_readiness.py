"""Readiness: why a process is not ready, and what it reports to the other processes."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from service.supervisor.worker_status import State, WorkerStatus
from service.worker.readiness import DRAINING, LOADING, NOT_LISTENING, Readiness


class Log:
    def __init__(self) -> None:
        self.reported: list[tuple[bool, int]] = []
        self.events: list[str] = []

    def readiness_changed(self, *, is_ready: bool, num_ready: int) -> None:
        self.reported.append((is_ready, num_ready))

    def heartbeat_failed(self, reason: str) -> None:
        self.events.append(reason)

    def heartbeat_recovered(self) -> None:
        self.events.append("again")

    def run_directory_recreated(self) -> None:
        self.events.append("made again")


def room(**facts: object) -> Any:
    """A collaborator with the attributes that readiness reads."""
    return SimpleNamespace(**facts)


class Process:
    """Readiness with collaborators that the test sets up."""

    def __init__(self, directory: Path, *, has_layers: bool = True, workers: int = 1, has_peers: bool = False) -> None:
        self.log = Log()
        self.status = WorkerStatus(directory, workers, 60.0, has_peers=has_peers)
        self.batcher = room(is_alive=True)
        self.probes = room(why_not_ready=lambda catalog: None)
        self.registry = room(catalog=room(awaited=()) if has_layers else None, fault=None, refusal=None)
        reconciler = room(version=3)
        self.readiness = Readiness(self.status, self.batcher, self.registry, reconciler, self.probes, self.log)

    def reported(self) -> State:
        (beat,) = self.status.fresh()
        return beat.state


@pytest.fixture
def process(tmp_path):
    return Process(tmp_path)


def test_a_process_is_ready_with_its_layers_loaded_and_its_port_open(process):
    readiness = process.readiness
    assert readiness.why_not_ready() == readiness.reason == LOADING
    readiness.state_applied()
    assert readiness.why_not_ready() == NOT_LISTENING
    assert process.reported() is State.STARTING
    readiness.port_opened()
    assert readiness.why_not_ready() is None
    assert process.reported() is State.READY
    assert process.log.reported[-1] == (True, 1)


def test_layers_and_port_may_become_ready_in_either_order(process):
    process.readiness.port_opened()
    assert process.readiness.why_not_ready() == LOADING
    process.readiness.state_applied()
    assert process.readiness.why_not_ready() is None


def test_a_later_fault_is_the_reason_until_it_is_repaired(process):
    process.readiness.port_opened()
    process.readiness.state_applied()
    process.probes.why_not_ready = lambda catalog: "a layer does not answer"
    process.readiness.report()
    assert process.readiness.why_not_ready() == "a layer does not answer"
    assert process.reported() is State.FAILED
    process.registry.catalog.awaited = ("late",)
    assert process.readiness.why_not_ready() == "a layer is missing"
    process.registry.fault = "late: no such file"
    assert process.readiness.why_not_ready() == "late: no such file"
    process.batcher.is_alive = False
    assert process.readiness.why_not_ready() == "the engine is down"
    process.batcher.is_alive, process.registry.catalog.awaited = True, ()
    process.probes.why_not_ready = lambda catalog: None
    process.readiness.report()
    assert process.reported() is State.READY


def test_draining_is_final_and_reported_at_once(process):
    process.readiness.port_opened()
    process.readiness.state_applied()
    process.readiness.drain()
    assert process.reported() is State.DRAINING
    process.readiness.state_applied()
    assert process.readiness.why_not_ready() == DRAINING
    assert process.log.reported[-1] == (False, 0)


def test_a_process_that_never_served_reports_starting_rather_than_draining(tmp_path):
    """The supervisor restarts a process that drained."""
    process = Process(tmp_path, has_layers=False)
    process.readiness.port_opened()
    process.readiness.drain()
    assert process.reported() is State.STARTING


def test_an_unwritable_run_directory_is_reported_once_and_ends_nothing(tmp_path):
    process = Process(tmp_path / "later")
    why = "the run directory (ATTENTION_RUN_DIR) cannot be written: No such file or directory"
    process.readiness.port_opened()
    process.readiness.state_applied()
    assert process.log.events == [why]
    assert process.readiness.why_not_ready() == why
    assert process.log.reported[-1] == (False, 0)
    (tmp_path / "later").mkdir()
    for _ in range(2):
        process.readiness.report()
    assert process.log.events == [why, "again"]
    assert process.readiness.why_not_ready() is None
    assert process.reported() is State.READY


def test_a_new_reason_is_reported_too(process):
    def refuse(code: int) -> Any:
        def restore() -> bool:
            raise OSError(code, os.strerror(code))

        return restore

    for code in (errno.ENOSPC, errno.ENOSPC, errno.EROFS):
        process.status.restore = refuse(code)
        process.readiness.report()
    assert [reported.rpartition(": ")[2] for reported in process.log.events] == [
        "No space left on device",
        "Read-only file system",
    ]


def test_every_heartbeat_creates_missing_files_again_and_reports_them(process):
    missing = [False, True, False]
    process.status.restore = missing.pop
    for _ in range(3):
        process.readiness.report()
    assert process.log.events == ["made again"]


def test_the_port_opens_after_the_layers_while_another_process_answers(process):
    async def wait() -> None:
        process.status.fresh = lambda: [room(pid=2, state=State.READY)]
        opening = asyncio.ensure_future(process.readiness.may_listen())
        await asyncio.sleep(0)
        assert not opening.done()
        process.readiness.state_applied()
        await opening

    asyncio.run(wait())


def test_the_port_opens_after_the_layers_while_others_serve_without_heartbeats(tmp_path):
    process = Process(tmp_path, has_peers=True)

    async def wait() -> None:
        opening = asyncio.ensure_future(process.readiness.may_listen())
        await asyncio.sleep(0)
        assert not opening.done()
        process.readiness.state_applied()
        await opening

    asyncio.run(wait())


@pytest.mark.parametrize("end", ["drain", "give_up"])
def test_a_waiting_port_is_opened_if_no_layers_will_come(process, end):
    """A client that connects then gets the reason."""

    async def wait() -> None:
        process.status.fresh = lambda: [room(pid=2, state=State.READY)]
        opening = asyncio.ensure_future(process.readiness.may_listen())
        await asyncio.sleep(0)
        process.readiness.drain() if end == "drain" else process.readiness.give_up("a layer cannot be read")
        await opening

    asyncio.run(wait())


def test_a_lone_process_opens_its_port_while_it_loads(process):
    asyncio.run(process.readiness.may_listen())
    assert process.readiness.why_not_ready() == LOADING


class Others:
    """A process with other processes in the states that the test sets; counts notifications that one joined."""

    def __init__(self, directory: Path, workers: int) -> None:
        self.num_joined = 0
        process = Process(directory, workers=workers)
        self._status: Any = process.status
        self._readiness = process.readiness
        self._readiness.when_joined(self._joined)

    def _joined(self) -> None:
        self.num_joined += 1

    def beat(self, *ready: int, starting: tuple[int, ...] = ()) -> int:
        """Send a heartbeat with these processes ready; return the number of notifications so far."""
        states = [(pid, State.READY) for pid in ready] + [(pid, State.STARTING) for pid in starting]
        self._status.fresh = lambda: [room(pid=pid, state=state) for pid, state in states]
        self._readiness.report()
        return self.num_joined


def test_a_process_that_is_late_or_a_replacement_joins_once_D9(tmp_path):
    others = Others(tmp_path, workers=3)
    for ready, num_joined in (((), 0), ((1,), 0), ((1, 2), 1), ((1, 2, 3), 2), ((1, 2, 3), 2)):
        assert others.beat(*ready) == num_joined
    assert others.beat(1, 2) == 2
    assert others.beat(1, 2, starting=(4,)) == 2
    assert others.beat(1, 2, 4) == 3
    assert others.beat(1, 2, 4) == 3


def test_the_replacement_of_one_that_died_before_it_was_seen_joins_too(tmp_path):
    others = Others(tmp_path, workers=2)
    assert others.beat(2) == 0
    assert others.beat(2, 3) == 1


def test_several_replacements_join_one_by_one_or_together(tmp_path):
    others = Others(tmp_path, workers=3)
    others.beat(1, 2, 3)
    assert others.beat(1, 4) == 1
    assert others.beat(1, 4, 5) == 2
    assert others.beat(1, 6, 7) == 3


def test_a_process_that_was_briefly_unready_does_not_join_again(tmp_path):
    others = Others(tmp_path, workers=2)
    others.beat(1, 2)
    for ready in ((1,), (), (2,), (1, 2)):
        assert others.beat(*ready) == 0


def test_a_replacement_does_not_count_existing_processes_as_joined(tmp_path):
    others = Others(tmp_path, workers=2)
    assert others.beat(1, 2) == 0
    assert others.beat(2, 3) == 1
