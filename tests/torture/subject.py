"""Subject: the real service as a process tree, its log in a file (or in a pipe that is read on request), and what is
measured of it from outside.

Invariants: black box: HTTP, signals and what the kernel reports of the processes; settings that this version does not have are
left out, so that one harness measures several versions; `end` leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from service.settings import Settings
from tests import processes
from tests.integration.running import LAYERS, prepare
from tests.torture import process_tree
from tests.torture.planted import VARIABLE

READY_S = 60
# At once, so that the pool that renders metrics is as large as it gets.
NUM_ASKERS = 32
REST_S = 2.0
# Text that is parsed in the thread, of fewer numbers than a request may have.
_MANY_NUMBERS = Settings.model_fields["decode_off_loop_bytes"].default // 5
_JSON = {"Content-Type": "application/json"}
# Appears with the first heartbeat after the first answer.
_HEARTBEAT_SERIES = "attention_layer_last_answer"
_CLOSED_S = 0.2  # in which the service sees that a caller has closed its connection, on a busy machine too


@dataclasses.dataclass(frozen=True, slots=True)
class Vitals:
    """What must be back where it was when nothing is going on."""

    pids: tuple[int, ...]
    resident_bytes: int
    descriptors: Counter[str]
    num_threads: int

    @property
    def num_files(self) -> int:
        """Descriptors that are no sockets, whose number is the callers' business."""
        return self.descriptors.total() - self.descriptors["socket"]


class Subject:
    """`plants` are faults for `planted.py`; `cpus` pins all processes; settings by their names.

    With `piped` stdout and stderr are one pipe, which is read only by `lines` (and while it waits to be ready).
    """

    def __init__(
        self, directory: Path, *, layers=LAYERS, plants: dict | None = None, cpus=None, piped=False, **settings: Any
    ) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        prepare(directory, layers)
        named = {name: value for name, value in settings.items() if name in Settings.model_fields}
        module = "service" if plants is None else "tests.torture.planted"
        named = {"run_dir": directory / "run", **named}
        (directory / "run").mkdir()
        self._out, self._err = (directory / "out.log").open("wb"), (directory / "err.log").open("wb")
        end: int | None = None
        self._pipe: int | None = None
        if piped:
            self._pipe, end = os.pipe()
        with pinned(cpus):
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, "serve", "--port", "0", "--layers-dir", str(directory / "layers")],
                env=processes.environment(**named) | {VARIABLE: json.dumps(plants)},
                stdout=self._out if end is None else end,
                stderr=self._err if end is None else end,
            )
        if end is not None:
            os.close(end)
        self.port = 0
        self.pids: tuple[int, ...] = ()

    def __enter__(self) -> Self:
        try:
            self.wait_ready()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def lines(self) -> Iterator[dict]:
        """The log so far."""
        while self._pipe is not None and select.select([self._pipe], [], [], 0)[0]:
            if not (some := os.read(self._pipe, 2**16)):
                break
            self._out.write(some)
            self._out.flush()
        with (self.directory / "out.log").open(encoding="utf-8") as file:
            for line in file:
                if line.endswith("\n"):
                    yield json.loads(line)

    def faults(self) -> list[str]:
        """What a log may not hold: our own faults, libraries' complaints, traces."""
        loud = [line for line in self.lines() if line["level"] in ("error", "critical")]
        told = [f"{line['event']} {str(line)[-200:]}" for line in loud if line["event"] != "worker_left"]
        errors = (self.directory / "err.log").read_text(encoding="utf-8", errors="replace")
        return told + ([f"stderr: {errors[:200]}"] if errors else [])

    def wait_ready(self) -> None:
        end = time.monotonic() + READY_S
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise AssertionError((self.directory / "err.log").read_text(encoding="utf-8"))
            if not self.port:
                self.port = next((line["port"] for line in self.lines() if "port" in line), 0)
            elif self.get("/readyz")[0] == http.HTTPStatus.OK:
                self.pids = tuple(process_tree.children(self.process.pid))
                return
            time.sleep(0.05)
        raise AssertionError("the service did not become ready")

    def get(self, path: str, timeout_s: float = 10) -> tuple[int, bytes]:
        """Status and body; (0, b"") without an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException):
            return 0, b""
        finally:
            connection.close()

    def post(self, path: str, body: bytes, headers: dict[str, str], timeout_s: float = 60) -> tuple[int, bytes]:
        """Status and body, over a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request("POST", path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def samples(self) -> dict[str, float]:
        return processes.samples(self.get("/metrics")[1].decode())

    def vitals(self) -> Vitals:
        """Of the workers together."""
        pids = tuple(process_tree.children(self.process.pid))
        resident, threads = (sum(map(kind, pids)) for kind in (process_tree.resident_bytes, process_tree.num_threads))
        descriptors = sum(map(process_tree.descriptors, pids), Counter())
        return Vitals(pids, resident, descriptors, threads)

    def baseline(self) -> Vitals:
        """The vitals of a service that has worked: what it opens and starts once, at need, is there by now."""
        bodies = [json.dumps({"query": query}).encode() for query in ([[0.5] * 16], [0.25] * _MANY_NUMBERS)]
        for _ in range(NUM_ASKERS):  # each over a connection of its own, so that every process gets some
            for body in bodies:
                self.post("/v1/layers/small/attend", body, _JSON)
        with ThreadPoolExecutor(NUM_ASKERS) as pool:
            list(pool.map(self.get, ["/metrics"] * NUM_ASKERS))
        end = time.monotonic() + READY_S
        while not any(name.startswith(_HEARTBEAT_SERIES) for name in self.samples()) and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(_CLOSED_S)
        return self.vitals()

    def forget_peaks(self) -> None:
        for pid in self.pids:
            process_tree.forget_peak(pid)

    def peak_bytes(self) -> int:
        return sum(process_tree.peak_bytes(pid) for pid in self.pids)

    def end(self) -> None:
        """Whatever state it is in; workers see their channel end."""
        pids = process_tree.children(self.process.pid) if self.process.poll() is None else []
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._out.close()
        self._err.close()
        if self._pipe is not None:
            os.close(self._pipe)


@contextlib.contextmanager
def pinned(cpus: set[int] | None) -> Iterator[None]:
    """A child started inside inherits these cores; None: all of ours."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus or own)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)
