"""D4: the run directory is lost, in whole or in part, full or not ours, while the service serves; what a killed one leaves."""

import contextlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from service.layers.store import Store
from tests.e2e.started import Started, X
from tests.integration.running import LAYERS, prepare, small_layer
from tests.processes import eventually, is_alive

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

PROGRAM = Path(__file__).with_name("faulty_service.py")  # with the admin routes open
HEALED_S = 10
REPLACED_S = 90  # torch is imported, on a machine that may be busy
BODY = json.dumps(X)


class Traffic:
    """Callers beside the block, each on a connection that it keeps for a while; `failures` is what went wrong."""

    def __init__(self, port: int, callers: int = 3) -> None:
        self.failures: list[str] = []
        self.num_answered = 0
        self._port = port
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._call) for _ in range(callers)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _call(self) -> None:
        while not self._is_over.wait(0.005):
            # Now and then another connection, which the kernel may give to another process.
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)) as line:
                for _ in range(20):
                    try:
                        line.request("POST", "/v1/layers/small/attend", BODY, {"Content-Type": "application/json"})
                        answer = line.getresponse()
                        told = answer.read()
                    except (OSError, http.client.HTTPException) as error:
                        self.failures.append(repr(error))
                        break
                    self.num_answered += 1
                    if answer.status != 200:
                        self.failures.append(told.decode())


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
            before = (*IN_A_NAMESPACE, 'mount -t tmpfs -o "$0" none "$1" && shift && exec "$@"', inside, str(parent))
        named = {"workers": 2, "run_dir": parent, "probe_s": 1, **settings}
        super().__init__(folder / "layers", program=[PROGRAM], before=before, **named)
        self.port = self.line(event="serving", host="127.0.0.1")["port"]
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


@pytest.fixture
def start(tmp_path):
    """Makes services of the test's own."""
    started: list[Service] = []

    def begin(folder=tmp_path, **settings) -> Service:
        started.append(Service(folder, **settings))
        return started[-1]

    yield begin
    for service in started:
        service.end()


def remove(directory: Path) -> None:
    """Also where a process writes to it meanwhile."""
    while directory.exists():
        shutil.rmtree(directory, ignore_errors=True)


def empty(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            path.unlink(missing_ok=True)


LOSSES = {
    "everything": remove,
    "its-parents-too": lambda run: remove(run.parent.parent),
    "moved-away": lambda run: run.rename(run.parent / "away"),
    "all-files": empty,
    "metrics": lambda run: remove(run / "metrics"),
    "one-counter-file": lambda run: (run / "metrics" / "counter_0.db").unlink(),
    "one-gauge-file": lambda run: (run / "metrics" / "gauge_livesum_1.db").unlink(),
}
# After these a worker is killed: its replacement finds what the others have made again.
DEADLY = ("everything", "metrics")


@pytest.mark.long
@pytest.mark.parametrize("loss", LOSSES)
def test_lost_files_are_created_again_and_no_request_fails_D4(lost, loss):
    eventually(lost.is_well, "nothing is left of the last loss", REPLACED_S)
    agreed = f"agreed-{loss}"
    lost.store.save(small_layer(agreed))
    lost.put(agreed)
    layers, counted = lost.layers(), lost.samples()["attention_received_total"]
    with Traffic(lost.port) as traffic:
        time.sleep(0.5)
        run_dir = lost.run_dir
        LOSSES[loss](run_dir)
        eventually((run_dir / "metrics" / "counter_0.db").exists, "the metrics are back", HEALED_S)
        eventually(lost.is_well, "it is ready, and in the metrics", HEALED_S)
        time.sleep(1.5)  # a beat of each process later it still is
        assert lost.is_well()
        assert run_dir.is_dir()
    assert traffic.failures == []
    assert traffic.num_answered > 20
    assert lost.samples()["attention_received_total"] >= counted + traffic.num_answered, "nothing that lives forgot"
    lost.store.save(small_layer(f"unasked-{loss}"))
    if loss in DEADLY:
        lost.replace_one()
        eventually(lost.is_well, "the service is ready again", REPLACED_S)
        assert len(lost.workers) == 2, "the first replacement stays"
    assert lost.layers() == layers, "what was agreed on, not what the directory holds"
    lost.put(agreed)
    lost.put(f"unasked-{loss}")
    assert lost.layers() == {*layers, f"unasked-{loss}"}
    assert "Traceback" not in str(lost.lines)


@pytest.mark.long
def test_a_worker_that_dies_before_a_loss_is_noticed_is_replaced_with_the_layers_of_the_other_D4(start):
    """The others beat once in four seconds: the replacement starts before there is anything to read."""
    service = start(heartbeat_s=4)
    service.wait_ready()
    assert service.ask("/v1/layers/zero", "DELETE")[0] == 204
    service.store.save(small_layer("unasked"))
    layers = service.layers()
    for part in ("everything", "metrics"):
        before = set(service.workers)
        LOSSES[part](service.run_dir)
        service.replace_one()
        with Traffic(service.port) as traffic:
            eventually(lambda: service.why_not_ready() is None, "the service is ready again", REPLACED_S)
        assert traffic.failures == [], "no request goes to a process that still loads"
        assert len(before & set(service.workers)) == 1
        assert service.layers() == layers


def place_a_file(run_dir: Path) -> None:
    remove(run_dir)
    run_dir.touch(exist_ok=False)


def place_a_link(run_dir: Path) -> None:
    elsewhere = run_dir.parent / "elsewhere"
    elsewhere.mkdir(mode=0o777, exist_ok=True)  # a second try, where a heartbeat came in between
    remove(run_dir)
    run_dir.symlink_to(elsewhere)


def give_away(run_dir: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root gives files away")
    os.chown(run_dir, 65534, 65534)


def remove_whatever(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        remove(path)
    else:
        path.unlink()


@pytest.mark.long
@pytest.mark.parametrize("spoil", [place_a_file, place_a_link, give_away])
def test_a_foreign_directory_is_left_alone_and_reported_until_it_is_gone_D4(lost, spoil):
    eventually(lost.is_well, "nothing is left of the last loss", REPLACED_S)
    run_dir, told = lost.run_dir, len(lost.find(event="heartbeat_not_written"))
    with Traffic(lost.port) as traffic:
        for _ in range(20):  # a heartbeat may come in between
            with contextlib.suppress(FileExistsError):
                spoil(run_dir)
                break
        eventually(lambda: "run directory" in (lost.why_not_ready() or ""), "the reason is reported", HEALED_S)
        time.sleep(3)
        assert lost.ask("/metrics")[0] == 200
        assert list(lost.parent.rglob("elsewhere/*")) == []
        assert traffic.failures == []
        lost.replace_one()
        time.sleep(3)
    assert [text for text in traffic.failures if "Reset" not in text and "Remote" not in text] == []
    assert 1 <= len(lost.find(event="heartbeat_not_written")) - told <= 3, "one line a process, not one a heartbeat"
    remove_whatever(run_dir)
    eventually(lost.is_well, "it heals by itself", REPLACED_S)
    assert "Traceback" not in str(lost.lines)
    for path in lost.parent.glob("elsewhere"):
        path.rmdir()


def fill_with_bytes(directory: Path) -> None:
    with contextlib.suppress(OSError), (directory / f"filler-{time.monotonic_ns()}").open("wb", buffering=0) as file:
        while file.write(bytes(2**12)):
            pass


def fill_with_names(directory: Path) -> None:
    with contextlib.suppress(OSError):
        while True:
            (directory / f"filler-{time.monotonic_ns()}").touch()


@pytest.mark.long
@pytest.mark.skipif(not can_mount(), reason="a small file system is mounted in a namespace of its own")
@pytest.mark.parametrize(
    ("options", "fill"),
    [pytest.param("size=8m", fill_with_bytes, id="bytes"), pytest.param("nr_inodes=40", fill_with_names, id="names")],
)
def test_a_full_run_directory_stops_no_request_and_is_reported_until_it_has_space_D4(start, options, fill):
    service = start(inside=options)
    service.wait_ready()
    is_over = threading.Event()

    def keep_full():
        while not is_over.wait(0.1):
            fill(service.parent)

    filler = threading.Thread(target=keep_full)
    with Traffic(service.port) as traffic:
        filler.start()
        try:
            eventually(lambda: "No space left" in (service.why_not_ready() or ""), "the reason is reported", HEALED_S)
            time.sleep(3)
            assert service.ask("/metrics")[0] == 200
            assert traffic.failures == []
            assert 1 <= len(service.find(event="heartbeat_not_written")) <= 2, "one line a process, not one a heartbeat"
            before = set(service.workers)
            service.replace_one()
            (fresh,) = set(service.workers) - before
            service.line(event="listening", pid=fresh)
            time.sleep(2)
            assert fresh in service.workers, "it serves without a place for its metrics"
            assert service.ask("/metrics")[0] == 200
        finally:
            is_over.set()
            filler.join()
    assert [told for told in traffic.failures if "Reset" not in told and "Remote" not in told] == []
    for file in service.parent.glob("filler-*"):
        file.unlink()
    eventually(service.is_well, "it heals by itself", HEALED_S)
    assert service.attend().status_code == 200
    assert "Traceback" not in str(service.lines)


def test_a_start_without_space_is_one_line_D4(tmp_path):
    if not can_mount():
        pytest.skip("a small file system is mounted in a namespace of its own")
    with contextlib.closing(Refused(tmp_path)) as refused:
        _, told = refused.process.communicate(timeout=60)
        assert refused.process.returncode == 1
        assert told == (
            f"attention-service: cannot make a run directory in {tmp_path / 'run'}: No space left on device\n"
        )


class Refused(Started):
    def __init__(self, folder: Path) -> None:
        prepare(folder, LAYERS)
        (folder / "run").mkdir()
        command = 'mount -t tmpfs -o "$0" none "$1" && shift && exec "$@"'
        before = (*IN_A_NAMESPACE, command, "size=4m", str(folder / "run"))
        super().__init__(folder / "layers", before=before, workers=2, run_dir=folder / "run")

    close = Started.end


@pytest.mark.long
@pytest.mark.parametrize("kind", ["counter", "gauge_livesum"])
def test_a_truncated_mapped_file_costs_at_most_its_process_D4(lost, kind):
    """A page that its file no longer has is a SIGBUS."""
    eventually(lost.is_well, "nothing is left of the last loss", REPLACED_S)
    started = len(lost.find(event="worker_started"))
    with Traffic(lost.port):
        os.truncate(lost.run_dir / "metrics" / f"{kind}_0.db", 0)
        with contextlib.suppress(OSError):  # it went to the process that ends
            assert lost.ask("/metrics")[0] == 200
        time.sleep(2)
        eventually(lost.is_well, "the service is ready", REPLACED_S)
    assert len(lost.find(event="worker_started")) - started <= 1
    assert lost.attend().status_code == 200


@pytest.mark.long
def test_the_next_start_removes_only_the_files_of_a_killed_supervisor_D4(start, tmp_path):
    shared = tmp_path / "together"
    first, second = (start(tmp_path / name, run_dir=shared, workers=1) for name in ("first", "second"))
    for service in (first, second):
        service.wait_ready()
    one, two = sorted(shared.glob("attention-*"), key=lambda path: str(first.process.pid) not in path.name)
    foreign = [shared / "attention-1-abcdefgh.run", shared / "attention-2-abcdefgh.run", shared / "notes"]
    foreign[0].mkdir()
    (foreign[0] / "notes").touch()
    foreign[1].touch()
    foreign[2].mkdir()
    first.process.kill()
    for pid in first.workers:
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not any(map(is_alive, first.workers)), "nothing of the first runs")
    assert one.is_dir()
    third = start(tmp_path / "third", run_dir=shared, workers=1)
    third.wait_ready()
    assert not one.exists()
    assert two.is_dir()
    assert all(path.exists() for path in foreign)
    assert second.why_not_ready() is None
    assert second.process.pid != third.process.pid


@pytest.mark.long
def test_the_workers_of_a_killed_supervisor_leave_nothing_behind_D4(start):
    service = start()
    service.wait_ready()
    run_dir = service.run_dir
    service.process.kill()
    eventually(lambda: not service.workers, "the workers leave", REPLACED_S)
    assert not run_dir.exists()
