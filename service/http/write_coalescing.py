"""WriteCoalescer: sends the responses of one loop tick together.

Every response wakes its client. Each client on the same machine takes a core from the service, and its caches. Responses that
are sent together are read together, and the next requests arrive together (docs/performance.md).
Invariants: The first response of a tick is sent at once, because it may be the only one. The others are sent in order when the
tick ends, or after the inline batch that began in it.
"""

from __future__ import annotations

from typing import Protocol

from service.loop_tick import LoopTick


class Outgoing(Protocol):
    """Holds a response back."""

    def depart(self) -> None:
        """Send the response now, unless it was sent. Raises nothing: others wait behind it."""


class WriteCoalescer:
    """Coalesces the writes of all connections on one loop."""

    __slots__ = ("_has_first_left", "_turn", "_waiting")

    def __init__(self) -> None:
        self._waiting: list[Outgoing] = []
        self._has_first_left = False
        self._turn = LoopTick(self._end)

    def may_leave(self, answer: Outgoing) -> bool:
        """Return whether a response is sent now; if not, `depart` is called when this tick ends."""
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
