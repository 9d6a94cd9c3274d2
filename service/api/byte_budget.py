"""Byte budget: limits the bytes that requests hold in this process and that no other limit counts.

There are two budgets: bodies that are received and not decoded yet; answers that are awaited, computed or sent.
Invariants: all reservations together never exceed `max_bytes`. A reservation may hold at most as much as it leaves free (dynamic
thresholds, Choudhury and Hahne 1998), so large requests are refused first and small ones still fit. If callers are distinguished,
all reservations of one caller are bounded in the same way. A request frees its bytes with `release`, at the latest when it ends,
however it ends.
"""

from __future__ import annotations

from collections.abc import Hashable

from service.errors import QueueFull


class ByteBudget:
    """One for each process and kind of bytes; `words` name that kind in the error message."""

    def __init__(self, max_bytes: int, words: str) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.words = words
        self._held: dict[Hashable, int] = {}

    @property
    def max_share(self) -> int:
        """The most bytes that one request may hold while no other holds any."""
        return self.max_bytes // 2

    def share(self, caller: Hashable = None) -> Reservation:
        """Return an empty reservation for a new request. Each `caller` has its own bound (None: not distinguished)."""
        return Reservation(self, caller)

    def held(self, caller: Hashable) -> int:
        """Return the bytes that all requests of this caller hold."""
        return self._held.get(caller, 0)

    def add(self, num_bytes: int, caller: Hashable) -> None:
        """Add `num_bytes` to the bytes held; a negative number frees them."""
        self.num_bytes += num_bytes
        if caller is not None:
            self._held[caller] = self.held(caller) + num_bytes
            if not self._held[caller]:
                del self._held[caller]


class Reservation:
    """The bytes that one request holds of a budget."""

    __slots__ = ("_byte_budget", "_caller", "_num_bytes")

    def __init__(self, byte_budget: ByteBudget, caller: Hashable = None) -> None:
        self._byte_budget = byte_budget
        self._caller = caller
        self._num_bytes = 0

    def grow(self, num_bytes: int) -> None:
        """Reserve `num_bytes` more; raise QueueFull, and reserve nothing, if they do not fit."""
        whole = self._byte_budget
        own = self._num_bytes if self._caller is None else whole.held(self._caller)
        if num_bytes and own + num_bytes > whole.max_bytes - whole.num_bytes - num_bytes:
            raise QueueFull(
                f"{whole.num_bytes:,} of at most {whole.max_bytes:,} bytes of {whole.words}; "
                "this request does not fit beside them"
            )
        whole.add(num_bytes, self._caller)
        self._num_bytes += num_bytes

    def release(self) -> None:
        """Free all bytes; a second call changes nothing."""
        self._byte_budget.add(-self._num_bytes, self._caller)
        self._num_bytes = 0
