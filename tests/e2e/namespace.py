"""A pid namespace seen from outside: the processes of a container, their threads, and what may be done to them."""

import contextlib
from pathlib import Path


def members(first_pid: int) -> list[int]:
    """The processes of its namespace, as this one numbers them; a process that is none any more is left out."""
    namespace = Path(f"/proc/{first_pid}/ns/pid").stat().st_ino
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and (entry / "ns" / "pid").stat().st_ino == namespace:
                found.append(int(entry.name))
    return sorted(found)


def inner_pid(pid: int) -> int:
    """Its number inside."""
    return int(status(pid)["NSpid"].split()[-1])


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def num_threads(pids: list[int]) -> int:
    return sum(int(status(pid)["Threads"]) for pid in pids)
