"""WriteCoalescer: the answers of one turn of the loop leave together.

Every answer wakes its client. Callers on the same machine would take a core from us for each, and leave it with their caches; the
answers of a batch that leave in one go are read in one go, and what comes next comes together (docs/performance.md).
Laws: the first answer of a turn leaves at once, for it may be the only one; the others leave in order when the turn ends, or
behind the brief batch that was begun in it.
"""

from __future__ import annotations

from typing import Protocol

from service.loop_tick import LoopTick


class Outgoing(Protocol):
    """Who keeps an answer back."""

    def depart(self) -> None:
        """Let it go now; it may have gone. Raises nothing: others wait behind it."""


class WriteCoalescer:
    """Of all connections on one loop."""

    __slots__ = ("_has_first_left", "_turn", "_waiting")

    def __init__(self) -> None:
        self._waiting: list[Outgoing] = []
        self._has_first_left = False
        self._turn = LoopTick(self._end)

    def may_leave(self, answer: Outgoing) -> bool:
        """Whether an answer leaves now; if not, `depart` is called when this turn ends."""
        self._turn.ask()
        if self._has_first_left:
            self._waiting.append(answer)
            return False
        self._has_first_left = True
        return True

    def _end(self) -> None:
        waiting, self._waiting, self._has_first_left = self._waiting, [], False
        for answer in waiting:
            answer.depart()
