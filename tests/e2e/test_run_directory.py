"""D4: the run directory is lost beside a death, full, damaged or not ours, while the service serves.

Figure 14 (`tests/torture/figures/run_directory.py`) loses the whole of it and every part, beside requests, and starts again.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.layers.store import Store
from tests.e2e.started import Started
from tests.integration.running import LAYERS, prepare, small_layer
from tests.processes import eventually, is_alive
from tests.torture.canary import Song, singing

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

PROGRAM = Path(__file__).with_name("faulty_service.py")  # with the admin routes open
HEALED_S = 10
REPLACED_S = 90  # torch is imported, on a machine that may be busy


@contextlib.contextmanager
def traffic(service: Service, *, may_be_cut: bool = False) -> Iterator[None]:
    """Requests beside the block; none fails, but those of a process that is killed may be cut."""
    songs: list[Song] = []
    with singing(service.port, songs, per_second=100, per_connection=20):
        yield
    assert [told for told in songs[0].wrong if not may_be_cut or ("Reset" not in told and "Remote" not in told)] == []


class Service(Started):
    """`serve` with two workers and a run directory that a test may spoil; `inside` is what its parent is mounted with."""

    def __init__(self, folder: Path, *, inside: str | None = None, **settings) -> None:
        folder.mkdir(exist_ok=True)
        parent = folder / "shared" / "run"
        prepare(folder, LAYERS)
        self.store = Store(folder / "layers")
        before: tuple[str, ...] = ()
        if inside is not None:
            parent.mkdir(parents=True)
            before = mounted(inside, parent)
        named = {"workers": 2, "run_dir": parent, "probe_s": 1, **settings}
        super().__init__(folder / "layers", program=[PROGRAM], before=before, **named)
        self.parent = parent if inside is None else Path(f"/proc/{self.process.pid}/root{parent}")

    @property
    def run_dir(self) -> Path:
        (found,) = self.parent.glob("attention-*")
        return found

    @property
    def workers(self) -> list[int]:
        return [line["pid"] for line in self.find(event="worker_started") if is_alive(line["pid"])]

    def ask(self, path: str, method: str = "GET") -> tuple[int, str]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as line:
            line.request(method, path)
            answer = line.getresponse()
            return answer.status, answer.read().decode()

    def is_well(self) -> bool:
        """Ready, and every process is in the metrics, which are there whatever happens."""
        try:
            (ready, _), (status, metrics) = self.ask("/readyz"), self.ask("/metrics")
        except OSError:
            return False
        assert status == 200, metrics
        return ready == 200 and "attention_ready_processes 2.0" in metrics

    def why_not_ready(self) -> str | None:
        status, told = self.ask("/readyz")
        return None if status == 200 else json.loads(told)["detail"]

    def replace_one(self) -> None:
        """A worker is killed and another in its place serves."""
        before = self.workers
        os.kill(before[0], signal.SIGKILL)
        eventually(lambda: len(set(self.workers) - set(before)) == 1, "a replacement is started", HEALED_S)

    def layers(self) -> set[str]:
        """What every process serves: one that serves others is met in so many connections."""
        told = {self.ask("/v1/layers")[1] for _ in range(20)}
        names = {tuple(sorted(layer["name"] for layer in json.loads(text)["layers"])) for text in told}
        assert len(names) == 1, "the processes serve different layers"
        return set(names.pop())

    def put(self, name: str) -> None:
        status, told = self.ask(f"/v1/layers/{name}", "PUT")
        assert status in (200, 201), told


IN_A_NAMESPACE = ("unshare", "--map-root-user", "--mount", "sh", "-c")


def mounted(options: str, place: Path) -> tuple[str, ...]:
    """What runs the command that follows it with a small file system at this place."""
    return (*IN_A_NAMESPACE, 'mount -t tmpfs -o "$0" none "$1" && shift && exec "$@"', options, str(place))


def can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    return not subprocess.run(
        [*IN_A_NAMESPACE, "mount -t tmpfs none /mnt"], check=False, capture_output=True
    ).returncode


@pytest.fixture(scope="module")
def lost(tmp_path_factory):
    """One service, which loses one thing after another."""
    service = Service(tmp_path_factory.mktemp("lost"))
    try:
        service.wait_ready()
        yield service
    finally:
        service.end()


NEEDS_MOUNT = pytest.mark.skipif(not can_mount(), reason="a small file system is mounted in a namespace of its own")


def remove(directory: Path) -> None:
    """Also where a process writes to it meanwhile."""
    while directory.exists():
        shutil.rmtree(directory, ignore_errors=True)


LOSSES = {"everything": remove, "metrics": lambda run: remove(run / "metrics")}


@pytest.mark.long
def test_a_worker_that_dies_before_a_loss_is_noticed_is_replaced_with_the_layers_of_the_other_D4(serve, tmp_path):
    """The others beat once in four seconds: the replacement starts before there is anything to read."""
    service = serve(tmp_path, kind=Service, heartbeat_s=4)
    service.wait_ready()
    assert service.ask("/v1/layers/zero", "DELETE")[0] == 204
    service.store.save(small_layer("unasked"))
    layers = service.layers()
    for lose in LOSSES.values():
        before = set(service.workers)
        lose(service.run_dir)
        service.replace_one()
        with traffic(service):  # no request goes to a process that still loads
            eventually(lambda: service.why_not_ready() is None, "the service is ready again", REPLACED_S)
        assert len(before & set(service.workers)) == 1
        assert service.layers() == layers, "what was agreed on, not what the directory holds"
    service.put("unasked")
    assert service.layers() == {*layers, "unasked"}
    assert "Traceback" not in str(service.lines)


def place_a_link(run_dir: Path) -> None:
    elsewhere = run_dir.parent / "elsewhere"
    elsewhere.mkdir(mode=0o777, exist_ok=True)  # a second try, where a heartbeat came in between
    remove(run_dir)
    run_dir.symlink_to(elsewhere)


@pytest.mark.long
def test_a_foreign_directory_is_left_alone_and_reported_until_it_is_gone_D4(lost):
    """Files and directories of another user in its place are tested in `unit/supervisor/`."""
    eventually(lost.is_well, "nothing is left of the last loss", REPLACED_S)
    run_dir, told = lost.run_dir, len(lost.find(event="heartbeat_not_written"))
    with traffic(lost):
        for _ in range(20):  # a heartbeat may come in between
            with contextlib.suppress(FileExistsError):
                place_a_link(run_dir)
                break
        eventually(lambda: "run directory" in (lost.why_not_ready() or ""), "the reason is reported", HEALED_S)
        time.sleep(3)
        assert lost.ask("/metrics")[0] == 200
        assert list(lost.parent.rglob("elsewhere/*")) == []
    with traffic(lost, may_be_cut=True):
        lost.replace_one()
        time.sleep(3)
    assert 1 <= len(lost.find(event="heartbeat_not_written")) - told <= 3, "one line a process, not one a heartbeat"
    run_dir.unlink()
    eventually(lost.is_well, "it heals by itself", REPLACED_S)
    assert "Traceback" not in str(lost.lines)
    (lost.parent / "elsewhere").rmdir()


def fill_with_bytes(directory: Path) -> None:
    with contextlib.suppress(OSError), (directory / f"filler-{time.monotonic_ns()}").open("wb", buffering=0) as file:
        while file.write(bytes(2**12)):
            pass


def fill_with_names(directory: Path) -> None:
    with contextlib.suppress(OSError):
        while True:
            (directory / f"filler-{time.monotonic_ns()}").touch()


@pytest.mark.long
@NEEDS_MOUNT
@pytest.mark.parametrize(
    ("options", "fill"),
    [pytest.param("size=8m", fill_with_bytes, id="bytes"), pytest.param("nr_inodes=40", fill_with_names, id="names")],
)
def test_a_full_run_directory_stops_no_request_and_is_reported_until_it_has_space_D4(serve, tmp_path, options, fill):
    service = serve(tmp_path, kind=Service, inside=options)
    service.wait_ready()
    is_over = threading.Event()

    def keep_full():
        while not is_over.wait(0.1):
            fill(service.parent)

    filler = threading.Thread(target=keep_full)
    filler.start()
    try:
        with traffic(service):
            eventually(lambda: "No space left" in (service.why_not_ready() or ""), "the reason is reported", HEALED_S)
            time.sleep(3)
            assert service.ask("/metrics")[0] == 200
        assert 1 <= len(service.find(event="heartbeat_not_written")) <= 2, "one line a process, not one a heartbeat"
        before = set(service.workers)
        with traffic(service, may_be_cut=True):
            service.replace_one()
            (fresh,) = set(service.workers) - before
            service.line(event="listening", pid=fresh)
            time.sleep(2)
        assert fresh in service.workers, "it serves without a place for its metrics"
        assert service.ask("/metrics")[0] == 200
    finally:
        is_over.set()
        filler.join()
    for file in service.parent.glob("filler-*"):
        file.unlink()
    eventually(service.is_well, "it heals by itself", HEALED_S)
    assert service.attend().status_code == 200
    assert "Traceback" not in str(service.lines)


@NEEDS_MOUNT
def test_a_start_without_space_is_one_line_D4(serve, tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    service = serve(before=mounted("size=4m", run_dir), workers=2, run_dir=run_dir)
    _, told = service.process.communicate(timeout=60)
    assert service.process.returncode == 1
    assert told == f"attention-service: cannot make a run directory in {run_dir}: No space left on device\n"


@pytest.mark.long
@pytest.mark.parametrize("kind", ["counter", "gauge_livesum"])
def test_a_truncated_mapped_file_costs_at_most_its_process_D4(lost, kind):
    """A page that its file no longer has is a SIGBUS."""
    eventually(lost.is_well, "nothing is left of the last loss", REPLACED_S)
    started = len(lost.find(event="worker_started"))
    with traffic(lost, may_be_cut=True):
        os.truncate(lost.run_dir / "metrics" / f"{kind}_0.db", 0)
        with contextlib.suppress(OSError):  # it went to the process that ends
            assert lost.ask("/metrics")[0] == 200
        time.sleep(2)
        eventually(lost.is_well, "the service is ready", REPLACED_S)
    assert len(lost.find(event="worker_started")) - started <= 1
    assert lost.attend().status_code == 200


@pytest.mark.long
def test_the_workers_of_a_killed_supervisor_leave_nothing_behind_D4(serve, tmp_path):
    service = serve(tmp_path, kind=Service)
    service.wait_ready()
    run_dir = service.run_dir
    service.process.kill()
    eventually(lambda: not service.workers, "the workers leave", REPLACED_S)
    assert not run_dir.exists()
