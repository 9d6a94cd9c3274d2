"""What all tests of real processes need: their environment, a free port, a wait, and what a service says of itself."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import httpx2


def environment(**settings: object) -> dict[str, str]:
    """The own environment with these settings of the service, and none of its own."""
    given = {name: value for name, value in os.environ.items() if not name.startswith("ATTENTION_")}
    return given | {f"ATTENTION_{name.upper()}": str(value) for name, value in settings.items()}


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
