"""What all tests of real processes need: their environment and signals, a free port, a wait, what a service says of itself,
and that no process stays behind."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import time
from collections.abc import Callable, Collection
from pathlib import Path

import httpx2
import pytest


def environment(**settings: object) -> dict[str, str]:
    """The own environment with these settings of the service, and none of its own."""
    given = {name: value for name, value in os.environ.items() if not name.startswith("ATTENTION_")}
    return given | {f"ATTENTION_{name.upper()}": str(value) for name, value in settings.items()}


def restore_signals() -> None:
    """Let every process that is started from now on begin with the default action of all signals, and none blocked.

    An exec keeps a signal ignored and resets one with a handler. A background shell ignores SIGINT and SIGQUIT, `nohup` SIGHUP:
    this process goes on as if it ignored them. What Python ignores at its start, it restores itself in a child.
    """
    for signum in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:
        if signal.getsignal(signum) is signal.SIG_IGN:
            signal.signal(signum, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def adopt_orphans() -> None:
    """Become the parent of each descendant whose own parent ends (prctl(2), PR_SET_CHILD_SUBREAPER)."""
    ctypes.CDLL(None, use_errno=True).prctl(36, 1, 0, 0, 0)


def children() -> dict[int, str]:
    """The command line of each living child of this process, adopted ones included."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid() and state != "Z":
                command = (stat.parent / "cmdline").read_text(errors="replace").replace("\0", " ")
                if "multiprocessing.resource_tracker" not in command:  # Python's own, which ends with this process
                    found[int(stat.parent.name)] = command
        except OSError:
            continue  # it has ended meanwhile
    return found


def end_children(within_s: float, but: Collection[int] = ()) -> dict[int, str]:
    """Wait for the children to end; kill and return those that do not. A killed service's workers take seconds to notice."""

    def new() -> dict[int, str]:
        return {pid: command for pid, command in children().items() if pid not in but}

    end = time.monotonic() + within_s
    while (left := new()) and time.monotonic() < end:
        time.sleep(0.05)
    all_left = dict(left)
    while left:
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
        left = new()  # what a killed one leaves is adopted
        all_left |= left
    return all_left


def openpty() -> tuple[int, int]:
    """Both ends of a new terminal; the test is skipped where there is no /dev/pts, as in some containers."""
    try:
        return os.openpty()
    except OSError:
        pytest.skip("terminals need /dev/pts")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def eventually(condition: Callable[..., object], what: str, within_s: float = 20) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, f"not within {within_s} s: {what}"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """A zombie has ended, but its parent has not reaped it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def is_ready(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/readyz").status_code == 200
    except httpx2.HTTPError:
        return False


def samples(text: str) -> dict[str, float]:
    """The value of each series in the text of `/metrics`."""
    return {name: float(value) for name, value in (x.rsplit(" ", 1) for x in text.splitlines() if x[0] != "#")}
