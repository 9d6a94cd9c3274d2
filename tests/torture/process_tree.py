"""A process as the kernel reports it: memory, its peak, descriptors, threads, children."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * PAGE_BYTES


def forget_peak(pid: int) -> None:
    """From now on `peak_bytes` returns the largest resident size since this call."""
    Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")


def peak_bytes(pid: int) -> int:
    return _status_kib(pid, "VmHWM:") * 1024


def file_bytes(pid: int) -> int:
    """Of what is resident, the pages of files: processes of one program share them."""
    return _status_kib(pid, "RssFile:") * 1024


def descriptors(pid: int) -> Counter[str]:
    """What they lead to, and how often: a path, `socket`, `pipe`, `anon_inode`."""
    found: Counter[str] = Counter()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found[str(path.readlink()).partition(":")[0]] += 1
    return found


def num_sockets(pid: int) -> int:
    return descriptors(pid)["socket"]


def num_threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def main_thread_s(pid: int) -> float:
    """Processor time of its first thread, in which a worker has its event loop."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text(encoding="ascii").split()[0]) / 1e9


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return [int(child) for child in found.split()]


def _status_kib(pid: int, field: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    raise AssertionError(f"the kernel does not tell {field}")
