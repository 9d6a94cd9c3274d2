"""Readiness: why a process is not ready, and what it reports to the supervisor."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from types import SimpleNamespace
from typing import Any

import pytest

from service.errors import DeadlineExceeded, LayerError, LayerMissing, LayerNotLoaded
from service.supervisor.status import DesiredState, ServiceStatus, State, WorkerStatus
from service.worker import readiness
from service.worker.readiness import DRAINING, LOADING, NOT_LISTENING, Readiness


class Log:
    def __init__(self) -> None:
        self.reported: list[tuple[bool, int]] = []
        self.events: list[str] = []
        self.age = 0.0

    def seconds_since_answer(self, name: str) -> float:
        return self.age

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


class Channel:
    """Keeps the last report; as one of several processes the service is ready, unless the test says otherwise."""

    def __init__(self, *, has_peers: bool) -> None:
        self.has_peers = has_peers
        self.status = WorkerStatus()
        self.service = ServiceStatus(why_not_ready=None)

    @property
    def why_not_ready(self) -> str | None:
        return self.service.why_not_ready

    def report(self, **fields: Any) -> None:
        self.status = WorkerStatus(**fields)
        self.ready(*([1] if self.status.state is State.READY else []))

    def ready(self, *pids: int) -> None:
        self.service = ServiceStatus(why_not_ready=None, ready=list(pids))


class Process:
    """Readiness with collaborators that the test sets up."""

    def __init__(
        self, *, has_layers: bool = True, has_peers: bool = False, probe_s: float = 10.0, heartbeat_s: float = 1.0
    ) -> None:
        self.log = Log()
        self.channel = Channel(has_peers=has_peers)
        self.restore: Any = lambda: False
        self.batcher = room(is_alive=True)
        catalog = room(awaited=(), models=lambda: [room(name="a")])
        self.registry = room(catalog=catalog if has_layers else None, fault=None, refusal=None, least_rows={})
        self.registry.applied = DesiredState(3)
        self.used: list[Any] = []
        self.models = room(in_use=lambda: [*self.used], release=lambda name: self.used.clear())
        restore = lambda: self.restore()
        made: Any = Readiness  # the collaborators have only what it reads
        self.readiness: Readiness = made(
            self.channel, self.batcher, self.registry, self.models, self.log, restore, probe_s, heartbeat_s
        )

    def reported(self) -> State:
        return self.channel.status.state


@pytest.fixture
def process():
    return Process()


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
    process.log.age = 30.0
    assert process.readiness.why_not_ready() is None
    process.log.age = 31.0
    process.readiness.report()
    assert process.readiness.why_not_ready() == 'layer "a" has not answered for 31 s'
    assert process.reported() is State.FAILED
    process.registry.catalog.awaited = ("late",)
    assert process.readiness.why_not_ready() == "a layer is missing"
    process.registry.fault = "late: no such file"
    assert process.readiness.why_not_ready() == "late: no such file"
    process.batcher.is_alive = False
    assert process.readiness.why_not_ready() == "the engine is down"
    process.batcher.is_alive, process.registry.catalog.awaited = True, ()
    process.log.age = 0.0
    process.readiness.report()
    assert process.reported() is State.READY


def test_a_layer_is_stale_only_after_a_heartbeat_could_probe_it():
    """Probes run at heartbeats, so between rare heartbeats a layer that nobody calls is older than three probe intervals."""
    process = Process(probe_s=1.0, heartbeat_s=8.0)
    process.readiness.port_opened()
    process.readiness.state_applied()
    process.log.age = 25.0
    assert process.readiness.why_not_ready() is None
    process.log.age = 26.0
    assert process.readiness.why_not_ready() == 'layer "a" has not answered for 26 s'


def test_layers_are_probed_together_so_that_a_busy_engine_delays_a_heartbeat_once(process, monkeypatch):
    monkeypatch.setattr(readiness, "_probe", lambda model: (model.name, None))
    names, probed, timeouts = ["a", "b", "c"], list[str](), list[float]()
    process.registry.catalog.models = lambda: [room(name=name, digest="") for name in names]
    process.log.age = 10.0

    async def submit(name: str, lane: Any, cost: None, deadline: float) -> None:
        probed.append(name)
        timeouts.append(deadline - time.monotonic())
        while len(probed) < len(names):  # noqa: ASYNC110 (ticks are counted, not events)
            await asyncio.sleep(0)
        raise DeadlineExceeded("too busy")

    process.batcher.submit = submit

    async def probe() -> None:
        async with asyncio.timeout(5.0):
            await process.readiness.probe()

    asyncio.run(probe())
    assert probed == names
    assert all(1.9 < timeout_s <= 2.0 for timeout_s in timeouts), "two heartbeats"
    process.log.age = 9.0
    asyncio.run(probe())
    assert probed == names, "none is due"


def test_a_model_in_use_is_probed_like_a_layer_and_one_that_does_not_answer_is_released_and_harms_no_readiness(
    process, monkeypatch
):
    monkeypatch.setattr(readiness, "_probe", lambda model: (model.name, None))
    ages = {"a": 0.0, "models/b": 10.0}
    process.log.seconds_since_answer = ages.get
    process.used = [room(name="models/b", digest="", about=room(name="b"))]
    probed: list[str] = []

    async def submit(name: str, lane: Any, cost: None, deadline: float) -> None:
        probed.append(name)
        raise DeadlineExceeded("too busy")

    process.batcher.submit = submit
    asyncio.run(process.readiness.probe())
    assert probed == ["models/b"]
    ages["models/b"] = 31.0
    asyncio.run(process.readiness.probe())
    assert process.used == []
    process.readiness.state_applied()
    process.readiness.port_opened()
    assert process.reported() is State.READY
    asyncio.run(process.readiness.probe())
    assert len(probed) == 1, "a released model is not probed"


def test_draining_is_final_and_reported_at_once(process):
    process.readiness.port_opened()
    process.readiness.state_applied()
    process.readiness.drain()
    assert process.reported() is State.DRAINING
    process.readiness.state_applied()
    assert process.readiness.why_not_ready() == DRAINING
    assert process.log.reported[-1] == (False, 0)


def test_a_process_that_drains_because_of_a_fault_reports_the_fault(process):
    process.readiness.port_opened()
    process.readiness.state_applied()
    process.readiness.give_up("an internal fault")
    process.readiness.drain()
    assert (process.channel.status.state, process.channel.status.reason) == (State.FAILED, "an internal fault")
    assert process.readiness.why_not_ready() == "an internal fault"


@pytest.mark.parametrize(
    ("kind", "is_file_changed"), [(LayerNotLoaded, False), (LayerError, True), (LayerMissing, True)]
)
def test_an_acknowledgement_and_the_refusal_of_its_change_are_one_report(process, kind, is_file_changed):
    process.registry.refusal = kind("a reason")
    process.readiness.state_applied()
    expected = WorkerStatus(State.STARTING, NOT_LISTENING, 3, "a reason", is_file_changed=is_file_changed)
    assert process.channel.status == expected


def test_the_others_are_the_reason_of_a_process_that_is_ready_itself(process):
    process.readiness.port_opened()
    process.readiness.state_applied()
    process.channel.service = ServiceStatus(why_not_ready="1 of 2 processes is starting")
    assert process.readiness.why_not_ready() == "1 of 2 processes is starting"


def test_a_process_that_never_served_reports_starting_rather_than_draining():
    """The supervisor restarts a process that drained."""
    process = Process(has_layers=False)
    process.readiness.port_opened()
    process.readiness.drain()
    assert process.reported() is State.STARTING


def refuse(code: int) -> Any:
    def restore() -> bool:
        raise OSError(code, os.strerror(code))

    return restore


def test_an_unwritable_run_directory_is_reported_once_and_ends_nothing(process):
    why = "the run directory (ATTENTION_RUN_DIR) cannot be written: No such file or directory"
    process.restore = refuse(errno.ENOENT)
    process.readiness.port_opened()
    process.readiness.state_applied()
    assert process.log.events == [why]
    assert process.readiness.why_not_ready() == why
    assert (process.channel.status.state, process.channel.status.reason) == (State.FAILED, why)
    assert process.log.reported[-1] == (False, 0)
    process.restore = lambda: False
    for _ in range(2):
        process.readiness.report()
    assert process.log.events == [why, "again"]
    assert process.readiness.why_not_ready() is None
    assert process.reported() is State.READY


def test_a_new_reason_is_reported_too(process):
    for code in (errno.ENOSPC, errno.ENOSPC, errno.EROFS):
        process.restore = refuse(code)
        process.readiness.report()
    assert [reported.rpartition(": ")[2] for reported in process.log.events] == [
        "No space left on device",
        "Read-only file system",
    ]


def test_every_heartbeat_creates_missing_files_again_and_reports_them(process):
    missing = [False, True, False]
    process.restore = missing.pop
    for _ in range(3):
        process.readiness.report()
    assert process.log.events == ["made again"]


def test_the_port_opens_after_the_layers_while_another_process_answers(process):
    async def wait() -> None:
        process.channel.ready(2)
        opening = asyncio.ensure_future(process.readiness.may_listen())
        await asyncio.sleep(0)
        assert not opening.done()
        process.readiness.state_applied()
        await opening

    asyncio.run(wait())


def test_the_port_opens_after_the_layers_while_others_run_that_are_not_ready():
    process = Process(has_peers=True)

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
        process.channel.ready(2)
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

    def __init__(self) -> None:
        self.num_joined = 0
        process = Process()
        self._channel = process.channel
        self._readiness = process.readiness
        self._readiness.joined = self._joined

    def _joined(self) -> None:
        self.num_joined += 1

    def beat(self, *ready: int) -> int:
        """Let the supervisor report these processes as ready; return the number of notifications so far."""
        self._channel.ready(*ready)
        self._readiness.check()
        return self.num_joined


def test_a_process_that_is_late_or_a_replacement_joins_once_D9():
    others = Others()
    for ready, num_joined in (((), 0), ((1,), 0), ((1, 2), 1), ((1, 2, 3), 2), ((1, 2, 3), 2)):
        assert others.beat(*ready) == num_joined
    assert others.beat(1, 2) == 2
    assert others.beat(1, 2, 4) == 3
    assert others.beat(1, 2, 4) == 3


def test_a_process_does_not_count_itself_as_joining():
    """Its connections are new: it would shed those that it has just accepted."""
    others, own = Others(), os.getpid()
    for ready, num_joined in (((-1,), 0), ((-1, own), 0), ((-1,), 0), ((-1, own), 0), ((-1, own, -2), 1)):
        assert others.beat(*ready) == num_joined


def test_a_process_that_is_ready_first_counts_the_second_as_joining():
    others, own = Others(), os.getpid()
    assert others.beat(own) == 0
    assert others.beat(own, -1) == 1


def test_the_replacement_of_one_that_died_before_it_was_seen_joins_too():
    others = Others()
    assert others.beat(2) == 0
    assert others.beat(2, 3) == 1


def test_several_replacements_join_one_by_one_or_together():
    others = Others()
    others.beat(1, 2, 3)
    assert others.beat(1, 4) == 1
    assert others.beat(1, 4, 5) == 2
    assert others.beat(1, 6, 7) == 3


def test_a_process_that_was_briefly_unready_does_not_join_again():
    others = Others()
    others.beat(1, 2)
    for ready in ((1,), (), (2,), (1, 2)):
        assert others.beat(*ready) == 0


def test_a_replacement_does_not_count_existing_processes_as_joined():
    others = Others()
    assert others.beat(1, 2) == 0
    assert others.beat(2, 3) == 1
