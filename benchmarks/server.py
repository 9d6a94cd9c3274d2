"""Server: the processes of one subject, started, queried and ended.

Invariants: it is ready when its ready path answers; what it prints goes to a file; its end leaves no process behind; our own
settings and proxies do not reach it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import httpx2
import numpy as np

from benchmarks import process_tree
from benchmarks.subjects import ROOT, Subject, SubjectFailed
from benchmarks.wires import Request
from benchmarks.workloads import Workload, correct_answers

READY_S = 120
END_S = 15
# Idle means no CPU time in IDLE_S, five ticks of the kernel's clock. Longer than MAX_BUSY_S nothing waits for that.
IDLE_S, MAX_BUSY_S = 0.05, 2


class Server(contextlib.AbstractContextManager["Server"]):
    """`with Server(…) as server`; `paths` are the values of `{layers}` and `{source}` in command and environment."""

    def __init__(self, subject: Subject, form: str, paths: Mapping[str, str], log: Path) -> None:
        self.subject = subject
        self.warm_for: set[object] = set()  # workloads and concurrencies
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        values = {**paths, "port": str(self.port)}
        command = [part.format(**values) for part in subject.command]
        variables = {name: value.format(**values) for name, value in subject.environment.items()}
        environment = {**_environment(), **variables, "FORM": form}
        with log.open("ab") as file:
            self._process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
        try:
            self._await_ready(log)
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        return process_tree.tree(self._process.pid)

    def ask(self, path: str, request: Request | None = None) -> httpx2.Response:
        """GET the path, or POST the request's headers and body to it."""
        url, (headers, body) = f"http://127.0.0.1:{self.port}{path}", request or ({}, None)
        method = "GET" if request is None else "POST"
        return httpx2.request(method, url, headers=dict(headers), content=body, timeout=60, trust_env=False)

    def _await_ready(self, log: Path) -> None:
        end = time.monotonic() + READY_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > end:
                raise SubjectFailed(f"{self.subject.name} did not start: {log.read_text(errors='replace')[-400:]}")
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        try:
            status = self.ask(self.subject.ready_path).status_code
        except httpx2.HTTPError:
            return False
        return status == 200 or (self.subject.ready_path == "/" and status < 500)

    def largest_error(self, work: Workload, num: int) -> float:
        """Return the largest error of the first `num` answers; SubjectFailed if it exceeds the tolerance."""
        largest, name, wire = 0.0, f"{self.subject.name}, {work.name}", self.subject.wires[work.form]
        for x, correct in zip(work.inputs()[:num], correct_answers(work), strict=False):
            answer = self.ask(wire.path, wire.write(x))
            if answer.status_code != 200:
                raise SubjectFailed(f"{name}: {answer.status_code} at {wire.path}: {answer.text[:200]}")
            found = wire.read(answer.content, answer.headers)
            if found.shape != correct.shape:
                raise SubjectFailed(f"{name}: {found.size} numbers instead of {correct.size}")
            largest = max(largest, float(np.abs(found - correct).max()))
        if not largest <= self.subject.tolerance:
            raise SubjectFailed(f"{name}: an answer is off by {largest:.1e}")
        return largest

    def await_idle(self) -> None:
        """Let it finish what callers left behind, which is not for the time of the next subject."""
        end, spent = time.monotonic() + MAX_BUSY_S, process_tree.cpu_seconds(self.pids)
        while time.monotonic() < end:
            time.sleep(IDLE_S)
            before, spent = spent, process_tree.cpu_seconds(self.pids)
            if spent == before:
                return

    def close(self) -> None:
        """End its process group, by SIGTERM to the first process and by SIGKILL to what is left, and await their end."""
        pids = self.pids
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        end = time.monotonic() + END_S
        while process_tree.memory_mib(pids, "VmRSS") and time.monotonic() < end:
            time.sleep(0.01)


def _environment() -> dict[str, str]:
    own = {key: x for key, x in os.environ.items() if not key.startswith("ATTENTION_")}
    clean = {key: x for key, x in own.items() if not key.lower().endswith("_proxy")}
    return {**clean, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
