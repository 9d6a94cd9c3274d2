"""The bell: how one process lets all of them know that there is something new to read in the run directory.

Laws: it carries no message, for the files have it; one that is rung before a process can hear is heard as soon as it can (the
supervisor starts workers with the signal blocked); a bell that nobody hears costs time and nothing else: every heartbeat
looks as well.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Protocol

# What one worker sends for all of them to look at what they share.
NEWS = signal.SIGUSR1


class Notifier(Protocol):
    def listen(self, heard: Callable[[], None]) -> None:
        """From now on `heard` is called on the running loop whenever somebody rings."""

    def notify(self) -> None: ...


class Alone:
    """For a service of one process: nobody else is there to hear."""

    def listen(self, heard: Callable[[], None]) -> None:
        pass

    def notify(self) -> None:
        pass


ALONE = Alone()


class SupervisorNotifier:
    """Rings the supervisor, which rings every worker; made by a worker early, while its parent is still the supervisor."""

    def __init__(self) -> None:
        self._supervisor = os.getppid()

    def listen(self, heard: Callable[[], None]) -> None:
        import asyncio  # noqa: PLC0415 (memory: the supervisor imports this file with the heartbeats)

        asyncio.get_running_loop().add_signal_handler(NEWS, heard)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {NEWS})

    @property
    def is_orphaned(self) -> bool:
        """The supervisor has ended first."""
        return os.getppid() != self._supervisor

    def notify(self) -> None:
        # Another parent might take a signal amiss.
        if not self.is_orphaned:
            os.kill(self._supervisor, NEWS)
