"""BoundProcess: the bound in a process of its own, asked for figures again and again.

Laws: it is started when it is first asked, and anew behind its end; one that fails has ended.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
from pathlib import Path

from benchmarks.running import SubjectFailed
from benchmarks.subjects import BOUND

LATEST_S = 600


class BoundProcess:
    """`source` is the layer's file of weights; `log` takes what it complains of."""

    def __init__(self, source: Path, threads: int, log: Path) -> None:
        self._log = log
        self._command = [sys.executable, "-m", "benchmarks.bound", str(source), str(threads)]
        self._process: subprocess.Popen[str] | None = None

    def end(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            process.kill()
            process.communicate()

    def figures(self, work: str, seconds: float) -> dict[str, float]:
        """rps, tok_s and p50_ms of a work as `bound.py` names it; SubjectFailed where its answers are wrong or it ended."""
        if self._process is None:
            self._process = self._start()
        said = self._said(self._process, f"{work} {seconds}\n", seconds + LATEST_S)
        try:
            found: dict[str, float] = json.loads(said)
        except ValueError:
            self.end()
            complaint = self._log.read_text(errors="replace")[-400:]
            raise SubjectFailed(f"{BOUND} said no figures but {said[:100]!r}: {complaint}") from None
        return found

    def _start(self) -> subprocess.Popen[str]:
        with self._log.open("ab") as file:
            return subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True
            )

    def _said(self, process: subprocess.Popen[str], asked: str, latest_s: float) -> str:
        """Its line, empty where there is none."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(asked)
            process.stdin.flush()
            is_there = bool(select.select([process.stdout], [], [], latest_s)[0])
        except OSError:
            return ""
        return process.stdout.readline() if is_there else ""
