"""FakeService: a real supervisor over fake workers, started by a test and gone at its end."""

import contextlib
import http.client
import json
import os
import subprocess
import sys
from pathlib import Path

from tests.processes import eventually, is_alive

FAKE_WORKER = Path(__file__).with_name("fake_worker.py")
ROOT = Path(__file__).parents[2]
START_S = 20


class FakeService:
    """One supervisor over fake workers; everything it started is gone at the end of the block."""

    def __init__(self, folder, *arguments, workers=2, grace=3):
        self.run_dir = folder / "run"
        self.log = folder / "stdout"
        self.errors = folder / "stderr"
        command = [sys.executable, FAKE_WORKER, "serve", f"--workers={workers}", f"--grace={grace}"]
        with self.log.open("wb") as stdout, self.errors.open("wb") as stderr:
            self.process = subprocess.Popen(
                [*map(str, command), f"--run-dir={self.run_dir}", *arguments],
                stdout=stdout,
                stderr=stderr,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(START_S)
        eventually(lambda: not any(map(is_alive, self.worker_pids)), "the workers leave with their supervisor")

    def events(self, name):
        lines = [json.loads(line) for line in self.log.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [line for line in lines if line["event"] == name]

    @property
    def port(self):
        return self.events("serving")[0]["port"]

    @property
    def worker_pids(self):
        return [event["pid"] for event in self.events("worker_started")]

    def get(self, path, headers=None):
        """Status and body over a connection of its own; the answer's headers are added to `headers`."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)) as connection:
            connection.request("GET", path)
            answer = connection.getresponse()
            if headers is not None:
                headers.append(answer.headers)
            return answer.status, answer.read().decode()

    def is_ready(self):
        with contextlib.suppress(OSError, IndexError, http.client.HTTPException):
            return self.get("/readyz") == (200, "ready")
        return False

    def await_ready(self):
        eventually(self.is_ready, "the service is ready")
        return self

    def ends(self, within_s=START_S):
        return self.process.wait(within_s)
