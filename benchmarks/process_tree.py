"""Process tree: memory and CPU time of a process and its descendants, as Linux reports them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

# RSS counts shared pages in every process, PSS divides them among the processes; the peak of RSS is the kernel's own.
_FILES = {"VmRSS": "status", "VmHWM": "status", "Pss": "smaps_rollup"}


def tree(pid: int) -> list[int]:
    """Return the process and its living descendants, parents first."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += [int(child) for child in (task / "children").read_text(encoding="ascii").split()]
    return found


def memory_mib(pids: list[int], field: str) -> float:
    """Return the sum over the processes of VmRSS, VmHWM (its peak, which one process may reach before another) or Pss."""
    kib = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/{_FILES[field]}").read_text(encoding="utf-8").splitlines()
            kib += sum(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))
    return kib / 1024


def reset_peaks(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")


def cpu_seconds(pids: list[int]) -> dict[int, float]:
    """Return the CPU time so far of each living process."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
            found[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found
