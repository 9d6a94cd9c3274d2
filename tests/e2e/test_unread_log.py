"""An unread log stops nothing: whatever stdout and stderr are, requests, replacements and the shutdown go on (D3)."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import termios
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.integration.running import LAYERS, prepare
from tests.processes import environment, eventually, free_port, is_alive, openpty
from tests.torture import process_tree

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
# Ten times what a pipe takes, and what waits in memory of all processes.
NUM_REQUESTS = 3000
NUM_CALLERS = 4


class Service:
    """The real service; its streams are what a test gives it, and read when a test reads them."""

    def __init__(self, folder, stdout, stderr=subprocess.DEVNULL, *, shell="", **settings):
        prepare(folder, LAYERS[:1])
        self.port = free_port()
        command = [sys.executable, "-m", "service", "serve", "--port", str(self.port)]
        command += ["--layers-dir", str(folder / "layers")]
        self.process = subprocess.Popen(
            ["/bin/sh", "-c", f'exec "$@" {shell}', "sh", *command],
            env=environment(**settings),
            stdout=stdout,
            stderr=stderr,
        )

    def __enter__(self):
        try:
            eventually(lambda: self.status("/readyz") == 200, "the service is ready", within_s=60)
        except AssertionError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()

    @property
    def workers(self) -> list[int]:
        return process_tree.children(self.process.pid)

    def get(self, path) -> tuple[int, bytes]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)) as connection:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def status(self, path) -> int:
        with contextlib.suppress(OSError, http.client.HTTPException):
            return self.get(path)[0]
        return 0

    def ask_many(self, path="/v1/layers", number=NUM_REQUESTS) -> set[int]:
        """The statuses of so many requests."""

        def ask(_) -> set[int]:
            found = set()
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)) as connection:
                for _ in range(number // NUM_CALLERS):
                    connection.request("GET", path)
                    answer = connection.getresponse()
                    answer.read()
                    found.add(answer.status)
            return found

        with ThreadPoolExecutor(NUM_CALLERS) as pool:
            return set().union(*pool.map(ask, range(NUM_CALLERS)))

    @property
    def num_dropped(self) -> float:
        text = self.get("/metrics")[1].decode()
        return float(text.split("\nattention_log_lines_dropped_total ")[1].split()[0])

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)


class Reader:
    """Reads a descriptor to its end, from now on."""

    def __init__(self, descriptor):
        self.lines: list[dict] = []
        self._file = os.fdopen(os.dup(descriptor), encoding="utf-8")
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self):
        with self._file:
            for line in self._file:
                self.lines.append(json.loads(line))

    def named(self, event) -> list[dict]:
        return [line for line in list(self.lines) if line["event"] == event]

    @property
    def num_reported(self) -> int:
        return sum(line["lines"] for line in self.named("log_lines_dropped"))


@pytest.fixture
def pipe():
    source, end = os.pipe()
    yield source, end
    for descriptor in (source, end):
        with contextlib.suppress(OSError):
            os.close(descriptor)


@pytest.fixture(params=["stdout", "both"])
def streams(request, pipe):
    """What a service gets as its streams: one pipe for stdout alone, or for both."""
    return (pipe[1], subprocess.DEVNULL) if request.param == "stdout" else (pipe[1], pipe[1])


@pytest.mark.long
def test_requests_continue_and_every_line_is_read_or_counted_and_reported_D3(tmp_path, pipe, streams):
    with Service(tmp_path, *streams, workers=2, heartbeat_s=0.2) as service:
        assert service.ask_many() == {200}
        assert service.status("/healthz") == 200
        eventually(lambda: service.num_dropped > NUM_REQUESTS / 2, "the lost lines are counted")
        assert os.get_blocking(pipe[1]), "the pipe still blocks for other processes that share it"
        reader = Reader(pipe[0])
        eventually(lambda: reader.num_reported == service.num_dropped, "the lost lines are reported")
        requests = [line for line in reader.named("request") if line["route"] == "/v1/layers"]
        assert len(requests) + reader.num_reported == NUM_REQUESTS
        assert len(reader.named("log_lines_dropped")) <= 2, "once, by each process"
        assert service.ask_many(number=200) == {200}
        eventually(
            lambda: (
                len([line for line in reader.named("request") if line["route"] == "/v1/layers"]) == len(requests) + 200
            ),
            "once somebody reads, lines are written again",
        )
        assert service.end() == 0
        os.close(pipe[1])
        eventually(lambda: reader.named("stopped"), "the last line")
        assert [line["exit_code"] for line in reader.named("left")] == [0, 0]


@pytest.mark.long
def test_a_killed_worker_is_replaced_and_the_service_ends_with_an_unread_log_D3(tmp_path, pipe, streams):
    with Service(tmp_path, *streams, workers=2, shutdown_grace_s=5) as service:
        assert service.ask_many() == {200}
        for victim in service.workers:
            os.kill(victim, signal.SIGKILL)
            # A first thread may be dead while others of its process still hold the port: gone is what the supervisor has buried.
            eventually(lambda victim=victim: victim not in service.workers, "it is gone")
            eventually(lambda: len(service.workers) == 2, "there is another", within_s=30)
            eventually(lambda: service.status("/readyz") == 200, "all are ready", within_s=30)
        assert service.ask_many(number=400) == {200}
        workers = service.workers
        assert service.end() == 0
        assert not any(map(is_alive, workers))


@pytest.mark.long
def test_a_service_starts_with_a_full_pipe(tmp_path, pipe, streams):
    os.set_blocking(pipe[1], False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(pipe[1], b"\n" * 4096)
    os.set_blocking(pipe[1], True)
    with Service(tmp_path, *streams, workers=1, host="0.0.0.0") as service:
        assert service.ask_many(number=20) == {200}
        assert service.end() == 0


@pytest.mark.long
def test_a_refused_start_exits_with_its_code_though_its_log_is_unread(tmp_path, pipe):
    """The line of a worker, of the supervisor and of the command line."""
    os.set_blocking(pipe[1], False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(pipe[1], b"\n" * 4096)
    os.set_blocking(pipe[1], True)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "small.safetensors").write_bytes(b"\0" * 64)
    (tmp_path / "layers").mkdir()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for options, code in (
            (["--layers-dir", tmp_path / "broken", "--port", "0", "--workers", "2"], 3),
            (["--layers-dir", tmp_path / "layers", "--port", taken.getsockname()[1]], 1),
            (["--layers-dir", tmp_path / "nowhere"], 1),
        ):
            command = [sys.executable, "-m", "service", "serve", *map(str, options)]
            assert subprocess.run(command, stdout=pipe[1], stderr=pipe[1], timeout=60, check=False).returncode == code


@contextlib.contextmanager
def unread_terminal():
    master, end = openpty()
    yield end
    os.close(master)
    os.close(end)


@contextlib.contextmanager
def stopped_terminal():
    """A terminal stopped with Ctrl-S, whose other end is open."""
    master, end = openpty()
    termios.tcflow(end, termios.TCOOFF)
    yield end
    termios.tcflow(end, termios.TCOON)
    os.close(master)
    os.close(end)


@contextlib.contextmanager
def unread_socket():
    """As systemd gives a service its journal."""
    reader, end = socket.socketpair()
    with reader, end:
        yield end.fileno()


@contextlib.contextmanager
def closed_pipe():
    source, end = os.pipe()
    os.close(source)
    yield end
    os.close(end)


@contextlib.contextmanager
def full_device():
    with open("/dev/full", "wb") as file:  # noqa: PTH123 (its number is wanted)
        yield file.fileno()


STREAMS = {
    "D3-terminal": unread_terminal,
    "D3-stopped-terminal": stopped_terminal,
    "D3-socket": unread_socket,
    "D3-closed-pipe": closed_pipe,
    "D3-full-disk": full_device,
}


@pytest.mark.long
@pytest.mark.parametrize("made", STREAMS.values(), ids=STREAMS)
def test_the_service_serves_counts_lost_lines_and_ends_with_any_stdout_and_stderr(tmp_path, made):
    with made() as end, Service(tmp_path, end, end, workers=1, heartbeat_s=0.2) as service:
        assert service.ask_many(number=2000) == {200}
        assert service.status("/healthz") == 200
        eventually(lambda: service.num_dropped > 0, "what was lost is counted")
        assert os.get_blocking(end)
        assert service.end() == 0


def test_closed_streams_are_no_loss(tmp_path):
    with Service(tmp_path, None, None, shell=">&- 2>&-", workers=1) as service:
        assert service.ask_many(number=200) == {200}
        assert service.num_dropped == 0
        assert service.end() == 0


@pytest.mark.long
def test_a_socket_receives_every_line_that_is_read(tmp_path):
    reader, end = socket.socketpair()
    with reader, end, Service(tmp_path, end.fileno(), workers=2) as service:
        lines = Reader(reader.fileno())
        assert service.ask_many(number=400) == {200}
        assert service.end() == 0
        end.close()
        eventually(lambda: lines.named("stopped"), "the last line")
        assert len([line for line in lines.named("request") if line["route"] == "/v1/layers"]) == 400
        assert len(lines.named("left")) == 2
