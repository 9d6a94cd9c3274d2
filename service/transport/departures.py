"""Departures: the answers of one turn of the loop leave together.

Every answer wakes its client. Callers on the same machine would take a core from us for each, and leave it with their caches; the
answers of a batch that leave in one go are read in one go, and what comes next comes together (docs/performance.md).
Laws: the first answer of a turn leaves at once, for it may be the only one; the others leave when the turn ends, in order.
"""

from __future__ import annotations

from typing import Protocol

from service.turn import Turn


class Held(Protocol):
    """Who keeps an answer back."""

    def depart(self) -> None:
        """Let it go now; it may have gone."""


class Departures:
    """Of all connections on one loop."""

    __slots__ = ("_has_first_left", "_held", "_turn")

    def __init__(self) -> None:
        self._held: list[Held] = []
        self._has_first_left = False
        self._turn = Turn(self._end)

    def may_leave(self, held: Held) -> bool:
        """Whether an answer leaves now; if not, `depart` is called when this turn ends."""
        self._turn.ask()
        if self._has_first_left:
            self._held.append(held)
            return False
        self._has_first_left = True
        return True

    def _end(self) -> None:
        held, self._held, self._has_first_left = self._held, [], False
        for each in held:
            each.depart()
