"""Notification: one process signals the others that there is something new to read in the run directory.

Invariants: A notification carries no message; the files do. One that is sent before a process listens is delivered when it does:
the supervisor starts workers with the signal blocked. A lost one costs only time: every heartbeat reads the directory too.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Protocol

# A worker sends it to the supervisor, and the supervisor to every worker.
NOTIFY_SIGNAL = signal.SIGUSR1


class Notifier(Protocol):
    def listen(self, notified: Callable[[], None]) -> None:
        """Call `notified` on the running loop at every notification from now on."""

    def notify(self) -> None: ...


class NoNotifier:
    """The notifier of a service with one process: there is no other process to notify."""

    def listen(self, notified: Callable[[], None]) -> None:
        pass

    def notify(self) -> None:
        pass


NO_NOTIFIER = NoNotifier()


class SupervisorNotifier:
    """Notifies the supervisor, which notifies every worker; made early, while the parent is still the supervisor."""

    def __init__(self) -> None:
        self._supervisor = os.getppid()

    def listen(self, notified: Callable[[], None]) -> None:
        import asyncio  # noqa: PLC0415 (memory: the supervisor imports this file too)

        asyncio.get_running_loop().add_signal_handler(NOTIFY_SIGNAL, notified)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {NOTIFY_SIGNAL})

    @property
    def is_orphaned(self) -> bool:
        """Whether the supervisor has ended first."""
        return os.getppid() != self._supervisor

    def notify(self) -> None:
        # The signal would end another parent that does not handle it.
        if not self.is_orphaned:
            os.kill(self._supervisor, NOTIFY_SIGNAL)
