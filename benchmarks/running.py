"""Running: one subject's server, started, asked, measured from outside, put to rest and ended.

Laws: ready means that it answers its ready path; what it prints goes to a file; one that rests takes no time from another;
its end leaves no process behind; nothing of our own environment reaches it that would change what is measured (settings of
ours, proxies).
"""

from __future__ import annotations

import contextlib
import http.client
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self

import numpy as np

from benchmarks import process_tree
from benchmarks.bodies import Bodies
from benchmarks.echo import SIZE_HEADER
from benchmarks.subjects import ROOT, Subject
from benchmarks.wires import Wire
from benchmarks.workloads import TOLERANCE, Workload, right_answers

READY_S = 120
END_S = 15
# One that took no time on a core for LOOK_S, five ticks of the kernel's clock, is at rest; none is waited for longer than REST_S.
LOOK_S, REST_S = 0.05, 2
TOLERANCE_BFLOAT16 = 5e-2


class SubjectFailed(Exception):
    """It did not start, refused a request that is right, or answered something else."""


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


class Running:
    """`with Running(…) as running`; `named` fills the command in, `form` chooses where a subject needs several starts."""

    def __init__(self, subject: Subject, named: Mapping[str, str], log: Path, form: str = "binary") -> None:
        self.subject = subject
        self.warm_for: set[object] = set()  # the loads it has had
        self.port = free_port()
        self._log = log
        command = [part.format(**named, port=self.port) for part in subject.command]
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                command,
                env={**_clean_environment(), **subject.environment, **subject.by_form.get(form, {})},
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        end = time.monotonic() + READY_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > end:
                self._end()
                raise SubjectFailed(
                    f"{self.subject.name} did not start: {self._log.read_text(errors='replace')[-400:]}"
                )
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    @property
    def pids(self) -> list[int]:
        return process_tree.tree(self._process.pid)

    def rest(self) -> None:
        """Having nothing to do is rest, but one that polls is stopped, parents first, so that nobody sees a child stop.

        Not the others: stopped, Triton broke off connections and Mosec went on with one of its two processes. They end
        what callers have left behind: else that would be the next one's time.
        """
        if self.subject.polls:
            self._signal(self.pids, signal.SIGSTOP)
        else:
            self._come_to_rest(time.monotonic() + REST_S)

    def _come_to_rest(self, latest: float) -> None:
        """Until its processes take no time from one look to the next."""
        spent = process_tree.cpu_seconds(self.pids)
        while time.monotonic() < latest:
            time.sleep(LOOK_S)
            before, spent = spent, process_tree.cpu_seconds(self.pids)
            if spent == before:
                return

    def wake(self) -> None:
        if self.subject.polls:
            self._signal(reversed(self.pids), signal.SIGCONT)

    @staticmethod
    def _signal(pids: Iterable[int], number: signal.Signals) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _is_ready(self) -> bool:
        try:
            status, _, _ = self._ask("GET", self.subject.ready_path, {}, None, timeout_s=2)
        except (OSError, http.client.HTTPException):
            return False
        return status == http.HTTPStatus.OK or (self.subject.ready_path == "/" and status < 500)

    def _ask(
        self, method: str, path: str, headers: dict[str, str], body: bytes | None, timeout_s: float = 60
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            told = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, told, answer.read()
        finally:
            connection.close()

    def get(self, path: str) -> str:
        return self._ask("GET", path, {}, None)[2].decode()

    def answer_sizes(self, bodies: Bodies) -> list[int]:
        return [len(self._answer(bodies, i)[1]) for i in range(bodies.num)]

    def _answer(self, bodies: Bodies, i: int) -> tuple[dict[str, str], bytes]:
        headers, body = bodies.request(i)
        status, told, answer = self._ask("POST", bodies.path, headers, body)
        if status != http.HTTPStatus.OK:
            raise SubjectFailed(f"{self.subject.name} answered {status} at {bodies.path}: {answer[:200]!r}")
        return told, answer

    def largest_error(self, work: Workload, bodies: Bodies, wire: Wire, num: int) -> float:
        """Over the first `num` requests, against the answer in float64; raises SubjectFailed where it is too large."""
        largest = 0.0
        for i, right in enumerate(right_answers(work)[:num]):
            told, answer = self._answer(bodies, i)
            found = wire.read(answer, told)
            if found.shape != right.shape:
                raise SubjectFailed(f"{self.subject.name}, {work.name}: {found.size} numbers, {right.size} are right")
            largest = max(largest, float(np.abs(found - right).max()))
        is_bfloat16 = self.subject.environment.get("ATTENTION_DTYPE") == "bfloat16"
        if not largest <= (TOLERANCE_BFLOAT16 if is_bfloat16 else TOLERANCE):
            raise SubjectFailed(f"{self.subject.name}, {work.name}: answers are off by {largest:.1e}")
        return largest

    def check_sizes(self, bodies: Bodies, num: int) -> None:
        """For the echo: every answer has the size it was asked for."""
        for i in range(min(num, bodies.num)):
            asked = int(bodies.request(i)[0][SIZE_HEADER])
            if (got := len(self._answer(bodies, i)[1])) != asked:
                raise SubjectFailed(f"{self.subject.name} answered {got} bytes instead of {asked}")

    def _end(self) -> None:
        self.wake()  # who rests hears no request to end
        pids = self.pids
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        for pid in {*pids, *self.pids}:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getsid(pid) == self._process.pid:  # of its own session, so surely its own
                    os.kill(pid, signal.SIGKILL)
                    _await_end(pid)
        self._process.wait()


def _await_end(pid: int) -> None:
    """A process that was killed is there for a moment more; nobody but its parent may wait for it, and its parent may be gone."""
    descriptor = os.pidfd_open(pid)
    try:
        select.select([descriptor], [], [], END_S)
    finally:
        os.close(descriptor)


def _clean_environment() -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.upper().startswith("ATTENTION_") and not name.lower().endswith("_proxy")
    }
    return {**kept, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
