"""Watchdog: a worker's event loop pings the supervisor through a pipe, which shows that the loop still runs.

Holds the worker's end of the pipe that all workers share, and the intervals of pings and checks.
Invariants: A ping is one byte, the number of the slot, written by a timer of the loop itself. Nothing is written to a disk, which
could be full. Nothing waits: a full pipe holds enough pings.

A ping shows the supervisor that a process runs. A heartbeat (`supervisor/worker_status.py`) reports its state to the workers.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

PING_S = 1.0
# After this many checks without a ping a process is killed; at the check before, it writes its stacks.
CHECKS = 5
# Two checks must lie further apart than two pings ever do.
MIN_TIMEOUT_S = 10.0
# At this signal a worker writes the stacks of all its threads to stderr, whatever its interpreter is doing.
STACKS_SIGNAL = signal.SIGQUIT


def check_interval_s(timeout_s: float) -> float:
    """Return the time between two checks if a process that sends no ping for `timeout_s` is to be replaced."""
    return max(MIN_TIMEOUT_S, timeout_s) / CHECKS


class Watchdog:
    """Sends the pings of one worker."""

    def __init__(self, descriptor: int, slot: int) -> None:
        self._descriptor = descriptor
        self._ping = bytes([slot])

    def start(self) -> None:
        """Ping from the running loop, for as long as it runs."""
        import asyncio  # noqa: PLC0415 (memory: the supervisor imports this file)

        if sys.stderr is not None:
            faulthandler.register(STACKS_SIGNAL)
        self._send(asyncio.get_running_loop())

    def _send(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(OSError):  # full, or the supervisor is gone, which the lifeline shows
            os.write(self._descriptor, self._ping)
        loop.call_later(PING_S, self._send, loop)
