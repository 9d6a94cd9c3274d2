"""The pulse: how the supervisor knows that a worker's event loop still turns.

Lives here: the worker's end of a pipe that all workers share, and how often it is written to and looked at.
Laws: a sign is one byte, the number of the slot, written by a timer of the loop itself; nothing is written to a disk that could
be full, and nobody waits: a full pipe has told enough.

A heartbeat (`supervisor/worker_status.py`) says how a process is, to its mates; a pulse says that it is, to who can end it.
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
# At so many looks without a sign a process is ended; at the one before it is asked where it stands.
CHECKS = 5
# A look has to be later than a sign can be.
LEAST_SILENCE_S = 10.0
# A worker that hears this writes the stacks of all its threads to stderr, whatever its interpreter is doing.
WHERE = signal.SIGQUIT


def check_interval_s(silence_s: float) -> float:
    """The time between two looks, where who gives no sign for `silence_s` is to be replaced."""
    return max(LEAST_SILENCE_S, silence_s) / CHECKS


class Watchdog:
    """A worker's."""

    def __init__(self, descriptor: int, slot: int) -> None:
        self._descriptor = descriptor
        self._sign = bytes([slot])

    def begin(self) -> None:
        """On the running loop, and for as long as it runs."""
        import asyncio  # noqa: PLC0415 (memory: the supervisor imports this file)

        if sys.stderr is not None:
            faulthandler.register(WHERE)
        self._beat(asyncio.get_running_loop())

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(OSError):  # full, or the supervisor is gone, which the lifeline tells
            os.write(self._descriptor, self._sign)
        loop.call_later(PING_S, self._beat, loop)
