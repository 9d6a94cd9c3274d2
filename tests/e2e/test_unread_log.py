"""An unread log stops nothing: whatever stdout and stderr are, the start, requests and the shutdown go on (D3).

Figure 13 (`tests/torture/figures/unread_log.py`) has an unread pipe, with a replacement and every line read or counted.
"""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import termios
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.integration.running import LAYERS, prepare
from tests.processes import environment, eventually, free_port, openpty

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
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

    def get(self, path) -> tuple[int, bytes]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)) as connection:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def status(self, path) -> int:
        with contextlib.suppress(OSError, http.client.HTTPException):
            return self.get(path)[0]
        return 0

    def ask_many(self, number: int) -> set[int]:
        """The statuses of so many requests."""

        def ask(_) -> set[int]:
            found = set()
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)) as connection:
                for _ in range(number // NUM_CALLERS):
                    connection.request("GET", "/v1/layers")
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


@pytest.fixture
def full_pipe():
    """The end of a pipe that takes no more."""
    source, end = os.pipe()
    os.set_blocking(end, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(end, b"\n" * 4096)
    os.set_blocking(end, True)
    yield end
    os.close(source)
    os.close(end)


@pytest.mark.long
def test_a_service_starts_with_a_full_pipe(tmp_path, full_pipe):
    with Service(tmp_path, full_pipe, full_pipe, workers=1, host="0.0.0.0") as service:
        assert service.ask_many(20) == {200}
        assert service.end() == 0


@pytest.mark.long
def test_a_refused_start_exits_with_its_code_though_its_log_is_unread(tmp_path, full_pipe):
    """The line of a worker, of the supervisor and of the command line."""
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
            assert (
                subprocess.run(command, stdout=full_pipe, stderr=full_pipe, timeout=60, check=False).returncode == code
            )


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
        assert service.ask_many(2000) == {200}
        assert service.status("/healthz") == 200
        eventually(lambda: service.num_dropped > 0, "what was lost is counted")
        assert os.get_blocking(end)
        assert service.end() == 0


def test_closed_streams_are_no_loss(tmp_path):
    with Service(tmp_path, None, None, shell=">&- 2>&-", workers=1) as service:
        assert service.ask_many(200) == {200}
        assert service.num_dropped == 0
        assert service.end() == 0


@pytest.mark.long
def test_a_socket_receives_every_line_that_is_read(tmp_path):
    reader, end = socket.socketpair()
    with reader, reader.makefile(encoding="utf-8") as file, ThreadPoolExecutor(1) as pool:
        with end, Service(tmp_path, end.fileno(), workers=2) as service:
            read = pool.submit(lambda: [json.loads(line) for line in file])
            assert service.ask_many(400) == {200}
            assert service.end() == 0
        lines = read.result()
    assert sum(line["event"] == "request" and line["route"] == "/v1/layers" for line in lines) == 400
    assert [line["exit_code"] for line in lines if line["event"] == "left"] == [0, 0]
    assert lines[-1]["event"] == "stopped"
