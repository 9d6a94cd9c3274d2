"""What the kernel tells of a process and all that it started: memory and the time on cores."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

MIB = 2**20
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


def tree(pid: int) -> list[int]:
    """The process and its descendants that live."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += [int(child) for child in (task / "children").read_text(encoding="ascii").split()]
    return found


def resident_bytes(pids: list[int]) -> int:
    """Added up, so what processes share counts as often as it is shared."""
    return sum(_kib(pid, "status", "VmRSS:") for pid in pids) * 1024


def proportional_bytes(pids: list[int]) -> int:
    """PSS: what processes share is divided among them."""
    return sum(_kib(pid, "smaps_rollup", "Pss:") for pid in pids) * 1024


def forget_peaks(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")


def peak_resident_bytes(pids: list[int]) -> int:
    """The peaks since they were forgotten, added up: no process had more, all together may never have had it at once."""
    return sum(_kib(pid, "status", "VmHWM:") for pid in pids) * 1024


def cpu_seconds(pids: list[int]) -> dict[int, float]:
    """Time on cores so far, of those that live."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
            found[pid] = (int(fields[11]) + int(fields[12])) / _TICKS_A_SECOND
    return found


def _kib(pid: int, file: str, field: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/{file}").read_text(encoding="utf-8").splitlines():
            if line.startswith(field):
                return int(line.split()[1])
    return 0
