"""Control channel: a worker reports once a second and at every change, and learns what the supervisor reports."""

import asyncio
import faulthandler
import socket
import subprocess
import sys
import time

import pytest

from service.supervisor.channel import MAX_SUPERVISOR_BYTES, MAX_WORKER_BYTES, STACKS_SIGNAL, Channel
from service.supervisor.coordinator import Coordinator
from service.supervisor.status import DesiredState, Phase, ServiceStatus, State, WorkerStatus
from service.worker.control_channel import MAX_UNANSWERED, ControlChannel
from service.worker.local_channel import LocalChannel
from tests.doubles import turns


@pytest.fixture
def ends():
    """The supervisor's end, and the worker's."""
    ours, its = socket.socketpair()
    worker = ControlChannel(Channel(its, MAX_SUPERVISOR_BYTES), has_peers=False)
    yield Channel(ours, MAX_WORKER_BYTES), worker
    ours.close()
    worker._end.close()
    faulthandler.unregister(STACKS_SIGNAL)


async def until(is_so):
    for _ in range(10_000):
        if is_so():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never was")


def report(supervisor):
    """The latest report that has arrived, None if there is none."""
    message = supervisor.receive()
    return None if message is None else WorkerStatus.parse(message)


def test_a_worker_reports_when_it_opens_the_channel_at_every_change_and_while_its_loop_runs(ends, monkeypatch):
    monkeypatch.setattr("service.worker.control_channel.PING_S", 0.001)
    supervisor, worker = ends

    async def main():
        worker.open(lambda: None)
        assert report(supervisor) == WorkerStatus()
        worker.report(state=State.READY, version=3)
        found = [report(supervisor)]
        while len(found) < 4:
            await asyncio.sleep(0.001)
            found += filter(None, [report(supervisor)])
        assert found == [WorkerStatus(State.READY, version=3)] * 4

    asyncio.run(main())


def test_a_worker_knows_what_the_supervisor_reported_before_and_after_it_opened_the_channel(ends):
    supervisor, worker = ends
    early, late = (ServiceStatus(DesiredState(version, Phase.SETTLED, {"a": "x"}), None) for version in (1, 2))
    supervisor.send(early)

    async def main():
        changed = asyncio.Event()
        worker.open(changed.set)
        assert worker.service == early
        changed.clear()
        supervisor.send(late)
        await changed.wait()
        assert worker.service == late

    asyncio.run(main())


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_end_of_the_supervisor_is_noticed_once_and_reports_go_nowhere(ends, when):
    supervisor, worker = ends
    ended = []

    async def main():
        is_over = asyncio.Event()

        def supervisor_ended():
            ended.append(worker.is_orphaned)
            is_over.set()

        worker.ended = supervisor_ended
        if when == "before":
            supervisor.close()
        worker.open(lambda: None)
        supervisor.close()
        await is_over.wait()
        worker.report(state=State.DRAINING)
        await turns()
        assert ended == [True]

    asyncio.run(main())


def test_without_answers_the_service_is_not_ready_and_an_answer_makes_good(ends, monkeypatch):
    """A stopped supervisor notices no dead process."""
    monkeypatch.setattr("service.worker.control_channel.PING_S", 0.001)
    supervisor, worker = ends
    ready = ServiceStatus(DesiredState(1, Phase.SETTLED, {}), None)

    async def main():
        supervisor.send(ready)
        worker.open(lambda: None)
        seen = [worker.why_not_ready]
        await until(lambda: worker.why_not_ready is not None)
        assert worker.why_not_ready == f"the supervisor has not answered {MAX_UNANSWERED + 1} reports"
        supervisor.send(ready)
        await until(lambda: worker.why_not_ready is None)
        assert seen == [None]

    asyncio.run(main())


def test_a_report_for_which_there_is_no_room_is_sent_when_there_is(ends, monkeypatch):
    monkeypatch.setattr("service.worker.control_channel.PING_S", 3600)  # no second report, which would wait too
    supervisor, worker = ends
    many = {f"layer-{number}": "sha256:0" for number in range(20_000)}

    async def main():
        worker.open(lambda: None)
        worker.report(found=many)
        found = None
        while found is None or found.found is None:
            await asyncio.sleep(0)
            found = report(supervisor) or found
        assert found.found == many
        assert not asyncio.get_running_loop().remove_writer(worker._end.fileno())

    asyncio.run(main())


def test_an_unread_channel_blocks_no_worker(ends):
    _, worker = ends

    async def main():
        worker.open(lambda: None)
        started = time.monotonic()
        for version in range(10_000):
            worker.report(version=version)
        assert time.monotonic() - started < 10

    asyncio.run(main())


def test_a_worker_blocked_in_native_code_dumps_its_stack():
    """A signal handler written in Python would not run then."""
    code = """
import asyncio, ctypes, os, socket, sys
from service.supervisor.channel import MAX_SUPERVISOR_BYTES, STACKS_SIGNAL, Channel
from service.worker.control_channel import ControlChannel
def stand_still():
    ctypes.PyDLL(None).sleep(20)  # with the lock, until a signal
    print("over", file=sys.stderr, flush=True)
ours, its = socket.socketpair()
async def main():
    ControlChannel(Channel(its, MAX_SUPERVISOR_BYTES), has_peers=False).open(lambda: None)
    os.posix_spawn("/bin/sh", ["sh", "-c", f"sleep 0.5; kill -{int(STACKS_SIGNAL)} {os.getpid()}"], os.environ)
    stand_still()
asyncio.run(main())
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    stack, _, _ = run.stderr.partition("over")
    assert "in stand_still" in stack


def test_processes_without_a_supervisor_share_a_coordinator():
    async def main():
        coordinator = Coordinator(2, time.monotonic)
        one, two = (LocalChannel(coordinator, pid) for pid in (1, 2))
        for channel in (one, two):
            channel.open(lambda: None)
        one.report(state=State.READY, found={"a": "x"})
        two.report(state=State.READY, found={"b": "y"})
        assert one.service == two.service == ServiceStatus(DesiredState(1, layers={"a": "x"}), None, [1, 2])

    asyncio.run(main())
