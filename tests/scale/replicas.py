"""Replica: one real service as a process tree in a session of its own, on a port that it keeps when it is started again.

Invariants: signals go to the whole tree, because the service gives each worker a process group of its own; `end` leaves nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests import processes

READY_S = 90
STOP_S = 60


class Replica:
    """`env` has whole names of variables; port 0 is a free port. `start` may be called again once it has ended."""

    def __init__(self, layers_dir: Path, *, workers: int = 1, port: int = 0, env: dict[str, str] | None = None) -> None:
        self.port = port or processes.free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [sys.executable, "-m", "service", "serve", "--port", str(self.port)]
        self._env = processes.environment(workers=workers, layers_dir=layers_dir) | (env or {})
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by `end`)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        assert self._process is None or self._process.poll() is not None, "it runs already"
        self._process = subprocess.Popen(
            self._command, env=self._env, stdout=self._log, stderr=self._log, start_new_session=True
        )

    def ready(self, within_s: float = READY_S) -> None:
        """Wait until `/readyz` says so."""
        processes.eventually(
            lambda: processes.is_ready(self.url) or self._has_ended(), "the replica is ready", within_s
        )
        self._log.seek(0)
        assert not self._has_ended(), self._log.read()[-2000:]

    def kill(self) -> None:
        """SIGKILL for the whole tree, and wait until it is gone."""
        pids = self._tree()
        self._signal(signal.SIGKILL)
        self.drained()
        processes.eventually(lambda: not any(map(processes.is_alive, pids)), "its processes are gone", STOP_S)

    def drain(self) -> None:
        """SIGTERM, as an orchestrator sends it: to the first process."""
        assert self._process is not None
        self._process.terminate()

    def drained(self) -> int:
        """Wait for its end, and return the exit code."""
        assert self._process is not None
        return self._process.wait(STOP_S)

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def restore(self) -> None:
        """Make it ready again, whatever a test did to it."""
        if self._has_ended():
            self.start()
        self._signal(signal.SIGCONT)
        self.ready()

    def end(self) -> None:
        """Whatever state it is in."""
        if self._process is not None and not self._has_ended():
            self.kill()
        self._log.close()

    def _has_ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def _signal(self, signum: int) -> None:
        for pid in self._tree():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)

    def _tree(self) -> list[int]:
        """The processes of its session, the first one first: stopped or killed before its workers, it cannot replace them."""
        assert self._process is not None
        first = self._process.pid
        found = [first]
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                session = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[3]
                if int(session) == first and int(stat.parent.name) != first:
                    found.append(int(stat.parent.name))
        return found


@contextlib.contextmanager
def replicas(
    num: int, layers_dir: Path, *, workers: int = 1, env: dict[str, str] | None = None
) -> Iterator[list[Replica]]:
    """Start `num` replicas over one directory, wait until they are ready, and end them."""
    with contextlib.ExitStack() as stack:
        started = [Replica(layers_dir, workers=workers, env=env) for _ in range(num)]
        for replica in started:
            stack.callback(replica.end)
            replica.start()
        for replica in started:
            replica.ready()
        yield started
