"""BoundProcess: the bound in a process of its own, started once, asked for figures again and again, and ended."""

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
        command = [sys.executable, "-m", "benchmarks.bound", str(source), str(threads)]
        with log.open("ab") as file:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True)
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._asked, self._told = process, process.stdin, process.stdout

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()

    def figures(self, work: str, seconds: float) -> dict[str, float]:
        """rps, tok_s and p50_ms of a work as `bound.py` names it; SubjectFailed where its answers are wrong or it ended."""
        said = ""
        try:
            self._asked.write(f"{work} {seconds}\n")
            self._asked.flush()
            if select.select([self._told], [], [], seconds + LATEST_S)[0]:
                said = self._told.readline()
        except OSError:
            pass
        if not said:
            raise SubjectFailed(f"{BOUND} said nothing: {self._log.read_text(errors='replace')[-400:]}")
        found: dict[str, float] = json.loads(said)
        return found
