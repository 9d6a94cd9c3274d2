"""Slot: the place of one worker process, with its restart delay and its missed watchdog pings.

Independent of signals, the system and the other slots.
Invariants: After a crash the next process starts 0.1 s later. The delay doubles, up to 5 s, each time a process lived less than
10 s. Silence is counted in checks, not in seconds: a pause of the whole service for an hour (a container) pauses the checks too.
A process that has sent no ping yet is not silent: it still imports.
"""

from __future__ import annotations

import dataclasses

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 5.0
STEADY_S = 10.0


@dataclasses.dataclass(slots=True)
class Slot:
    """Running while `pid` is set, else waiting for `start_at` (None: never again)."""

    index: int
    start_at: float | None
    pid: int | None = None
    started: float = 0.0
    has_served: bool = False
    looks_since_sign: int | None = None
    """Checks since the last ping; None before the first ping."""
    rapid_crashes: int = 0

    def occupy(self, pid: int) -> None:
        self.pid, self.start_at = pid, None

    def vacate(self) -> None:
        self.pid = self.looks_since_sign = None

    def retry_later(self, now: float) -> float:
        """Schedule the next process; return the delay in seconds."""
        if now - self.started >= STEADY_S:
            self.rapid_crashes = 0
        delay_s = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(self.rapid_crashes, 16))
        self.rapid_crashes += 1
        self.start_at = now + delay_s
        return delay_s

    def heard(self) -> None:
        """Record a watchdog ping."""
        self.looks_since_sign = 0

    def looked_at(self) -> int:
        """Record a watchdog check; return how many in a row, this one included, found no ping."""
        if self.looks_since_sign is None:
            return 0
        silent, self.looks_since_sign = self.looks_since_sign, self.looks_since_sign + 1
        return silent
