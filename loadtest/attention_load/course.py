"""Course: where a run is: which phase it is in, and from when to when each phase really had its users.

Laws: the clock is the wall clock, as it is what workers on other machines share (so their clocks must be in step, as NTP keeps
them); a phase is measured from when all its users are there until the next begins; users that do not change are there at once.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from attention_load.phases import Phase, phase_at


@dataclasses.dataclass(slots=True)
class Window:
    """`end_s` is None while the phase goes on."""

    phase: Phase
    begin_s: float
    end_s: float | None = None


class Course:
    def __init__(self, phases: Sequence[Phase], clock: Callable[[], float] = time.time) -> None:
        self.phases = phases
        self.windows: list[Window] = []
        self._clock = clock
        self._begun_s = clock()
        self._number: int | None = 0

    def advance(self) -> Phase | None:
        """The phase that is now; None when all are over."""
        number = phase_at(self.phases, self._clock() - self._begun_s)
        if number != self._number:
            same = number is not None and self._users(number) == self._users(self._number)
            self.end()
            self._number = number
            if same:
                self.reached()
        return None if number is None else self.phases[number]

    def reached(self) -> None:
        """All users of the phase are there."""
        if self._number is not None and not self._is_measured():
            self.windows.append(Window(self.phases[self._number], self._clock()))

    def end(self) -> None:
        if self.windows and self.windows[-1].end_s is None:
            self.windows[-1].end_s = self._clock()

    def _users(self, number: int | None) -> int | None:
        return None if number is None else self.phases[number].users

    def _is_measured(self) -> bool:
        return bool(self.windows) and self.windows[-1].end_s is None
