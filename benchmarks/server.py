"""Server: the processes of one subject, started, queried, paused and ended.

Invariants: it is ready when its ready path answers; what it prints goes to a file; paused, it takes no CPU time; its end leaves
no process behind; our own settings and proxies do not reach it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import httpx2
import numpy as np

from benchmarks import process_tree
from benchmarks.subjects import ROOT, Subject, SubjectFailed
from benchmarks.wires import RequestFiles
from benchmarks.workloads import Workload, correct_answers

READY_S = 120
END_S = 15
# Idle means no CPU time in IDLE_S, five ticks of the kernel's clock. Longer than MAX_BUSY_S nothing waits for that.
IDLE_S, MAX_BUSY_S = 0.05, 2


class Server:
    """`with Server(…) as server`; `paths` are the values of `{layers}` and `{source}` in the command."""

    def __init__(self, subject: Subject, form: str, paths: Mapping[str, str], log: Path) -> None:
        self.subject = subject
        self.warm_for: set[object] = set()  # workloads and concurrencies
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        command = [part.format(**paths, port=self.port) for part in subject.command]
        environment = {**_environment(), **subject.environment, "FORM": form}
        with log.open("ab") as file:
            self._process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
        end = time.monotonic() + READY_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > end:
                self.close()
                raise SubjectFailed(f"{subject.name} did not start: {log.read_text(errors='replace')[-400:]}")
            time.sleep(0.1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        return process_tree.tree(self._process.pid)

    def ask(self, path: str, request: tuple[Mapping[str, str], bytes] | None = None) -> httpx2.Response:
        """GET the path, or POST the request's headers and body to it."""
        url, (headers, body) = f"http://127.0.0.1:{self.port}{path}", request or ({}, None)
        method = "GET" if request is None else "POST"
        return httpx2.request(method, url, headers=dict(headers), content=body, timeout=60, trust_env=False)

    def _is_ready(self) -> bool:
        try:
            status = self.ask(self.subject.ready_path).status_code
        except httpx2.HTTPError:
            return False
        return status == 200 or (self.subject.ready_path == "/" and status < 500)

    def largest_error(self, work: Workload, requests: RequestFiles, num: int) -> float:
        """Return the largest error of the first `num` answers; SubjectFailed if it exceeds the tolerance."""
        largest = 0.0
        for i, correct in enumerate(correct_answers(work)[:num]):
            answer = self.ask(requests.path, requests.read(i))
            if answer.status_code != 200:
                raise SubjectFailed(
                    f"{self.subject.name}: {answer.status_code} at {requests.path}: {answer.text[:200]}"
                )
            found = self.subject.wires[work.form].read(answer.content, answer.headers)
            if found.shape != correct.shape:
                raise SubjectFailed(f"{self.subject.name}, {work.name}: {found.size} numbers instead of {correct.size}")
            largest = max(largest, float(np.abs(found - correct).max()))
        if not largest <= self.subject.tolerance:
            raise SubjectFailed(f"{self.subject.name}, {work.name}: an answer is off by {largest:.1e}")
        return largest

    def pause(self) -> None:
        """Stop a subject that polls by a signal, parents first, so that none sees a child stop. Wait until another is idle.

        Only those that poll are stopped: stopped, Triton broke connections and Mosec went on with one of its two processes.
        What callers left behind is finished here, not in the time of the next subject.
        """
        if self.subject.polls:
            self._signal(self.pids, signal.SIGSTOP)
            return
        end, spent = time.monotonic() + MAX_BUSY_S, process_tree.cpu_seconds(self.pids)
        while time.monotonic() < end:
            time.sleep(IDLE_S)
            before, spent = spent, process_tree.cpu_seconds(self.pids)
            if spent == before:
                return

    def resume(self) -> None:
        if self.subject.polls:
            self._signal(self.pids[::-1], signal.SIGCONT)

    def _signal(self, pids: list[int], number: signal.Signals) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> None:
        """End all processes of its session: by SIGTERM to the first, then by SIGKILL."""
        self.resume()  # a stopped process does not see SIGTERM
        pids = self.pids
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        for pid in {*pids, *self.pids}:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getsid(pid) == self._process.pid:
                    self._kill(pid)
        self._process.wait()

    def _kill(self, pid: int) -> None:
        """Kill a process and await its end, which only its parent, perhaps gone, could await by `wait`."""
        descriptor = os.pidfd_open(pid)
        try:
            os.kill(pid, signal.SIGKILL)
            select.select([descriptor], [], [], END_S)
        finally:
            os.close(descriptor)


def _environment() -> dict[str, str]:
    own = {key: x for key, x in os.environ.items() if not key.startswith("ATTENTION_")}
    clean = {key: x for key, x in own.items() if not key.lower().endswith("_proxy")}
    return {**clean, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
