"""A slot: the place of one worker process, which outlives the processes in it.

Lives here: when the next process starts after a crash, and whether the one that runs still gives signs of life.
Must not know: signals, the system, the other slots.
Laws: after a crash the next one starts 0.1 s later, and after twice as long, up to 5 s, each time it lived less than 10 s;
silence is counted in looks, not in seconds: whoever pauses the whole service for an hour (a container) pauses whoever looks as
well; a process that has given no sign yet is not silent, it still imports.
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
    """None before the first sign."""
    rapid_crashes: int = 0

    def occupy(self, pid: int) -> None:
        self.pid, self.start_at = pid, None

    def vacate(self) -> None:
        self.pid = self.looks_since_sign = None

    def retry_later(self, now: float) -> float:
        """The next process starts so many seconds from now."""
        if now - self.started >= STEADY_S:
            self.rapid_crashes = 0
        delay_s = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(self.rapid_crashes, 16))
        self.rapid_crashes += 1
        self.start_at = now + delay_s
        return delay_s

    def heard(self) -> None:
        """A sign of life."""
        self.looks_since_sign = 0

    def looked_at(self) -> int:
        """How many times in a row, with this one, somebody looked and there was no sign."""
        if self.looks_since_sign is None:
            return 0
        silent, self.looks_since_sign = self.looks_since_sign, self.looks_since_sign + 1
        return silent
