"""The service as the first process of a container: its user, what it may write, how many threads it has, how it ends.

The tests use this machine's root and no engine, so that every run of the suite has them; `make image-test` does the same, and
more, with the image itself.
"""

import os
import shutil
import signal
import socket
import time
from pathlib import Path

import httpx2
import pytest

from service.settings import usable_cores
from tests.e2e.boxed import Boxed
from tests.e2e.namespace import inner_pid, num_threads, status
from tests.e2e.started import X
from tests.integration.running import LAYERS, prepare
from tests.processes import eventually

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed: apt-get install bubblewrap"),
]


@pytest.fixture
def start(tmp_path):
    prepare(tmp_path, LAYERS)
    started: list[Boxed] = []

    def begin(*command: str, **environment: str) -> Boxed:
        started.append(Boxed(tmp_path / "layers", *command, **environment))
        return started[-1]

    yield begin
    for box in started:
        box.end()


@pytest.mark.long
def test_r1_it_serves_as_another_user_on_a_read_only_root(start):
    box = start(ATTENTION_WORKERS="1")
    url = box.wait_ready()
    assert httpx2.post(f"{url}/v1/layers/small/attend", json=X).status_code == 200
    for pid in box.pids():
        told = status(pid)
        assert {told[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
        assert told["NoNewPrivs"] == "1"
        mounts = [line.split() for line in Path(f"/proc/{pid}/mounts").read_text().splitlines()]
        assert ["ro" in mount[3].split(",") for mount in mounts if mount[1] == "/"] == [True]
        assert Path(f"/proc/{pid}/uid_map").read_text().split()[0] == "10001"
    mounted = {mount[1] for mount in mounts}
    written = [path.name for path in Path(f"/proc/{box.pid}/root/tmp").iterdir()]
    assert [name for name in written if not any(place.startswith(f"/tmp/{name}") for place in mounted)] == []
    assert box.stop()[0] == 0


@pytest.mark.long
def test_l12_the_first_process_stops_in_order_within_the_grace(start):
    box = start(ATTENTION_WORKERS="2", ATTENTION_SHUTDOWN_GRACE_S="10")
    url = box.wait_ready()
    assert inner_pid(box.pid) == 1
    assert httpx2.post(f"{url}/v1/layers/small/attend", json=X).status_code == 200
    pids, started = box.pids(), time.monotonic()
    assert len(pids) == 3
    exit_code, said = box.stop()
    assert exit_code == 0
    assert time.monotonic() - started < 10
    assert '"exit_code":0' in said.splitlines()[-1]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids), "no process is left"


def test_l12_a_command_without_a_signal_handler_stops_too(start):
    """The kernel drops a signal that the first process does not handle; the engine would then wait and kill it."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        box = start("health", "--url", f"http://127.0.0.1:{mute.getsockname()[1]}", "--timeout-s", "60")
        connection, _ = mute.accept()
        with connection:
            assert box.stop() == (128 + signal.SIGTERM, "")


@pytest.mark.long
def test_l12_the_first_process_reaps_a_killed_worker(start):
    box = start(ATTENTION_WORKERS="1")
    box.wait_ready()
    victim = box.pids()[1]
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: victim not in box.pids(), "it is no zombie")
    eventually(lambda: len(box.pids()) == 2, "another takes its place")


@pytest.mark.long
def test_r3_there_are_no_more_processes_than_cores_and_each_has_few_threads(start):
    """By default, on whatever this machine has; the limit on processes that docs/container.md recommends is 128."""
    box = start()
    url = box.wait_ready()
    with httpx2.Client(base_url=url) as session:
        for _ in range(50):
            assert session.post("/v1/layers/small/attend", json=X).status_code == 200
    workers = [pid for pid in box.pids() if pid != box.pid]
    assert len(workers) == usable_cores()
    assert num_threads(workers) <= 5 * len(workers)
    assert num_threads([box.pid]) == 1
    environment = Path(f"/proc/{workers[0]}/environ").read_bytes().split(b"\0")
    assert {b"OMP_NUM_THREADS=1", b"OPENBLAS_NUM_THREADS=1"} <= set(environment)
