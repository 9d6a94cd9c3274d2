"""Allowances: bytes that requests hold in a process and that no other limit counts, bounded over all of them.

There are two: bodies that have come in and are not tensors yet; and answers that are waited for, computed or sent.
Laws: all shares together never hold more than `max_bytes`; a share may hold at most as much as it leaves free (dynamic
thresholds, Choudhury and Hahne 1998), so large ones are refused first and small ones still find room; where callers are told
apart, what one holds in all its requests is bounded in the same way; what a request took is free again when it says so, and
when it ends, however it ends.
"""

from __future__ import annotations

from collections.abc import Hashable

from service.errors import QueueFull


class ByteBudget:
    """One for each process and kind of bytes; `words` say to a caller what they are."""

    def __init__(self, max_bytes: int, words: str) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.words = words
        self._held: dict[Hashable, int] = {}

    @property
    def max_share(self) -> int:
        """What one request may hold in an empty house."""
        return self.max_bytes // 2

    def share(self, caller: Hashable = None) -> Reservation:
        """A new request's, of nothing yet; callers that are told apart (None: they are not) are bounded each."""
        return Reservation(self, caller)

    def held(self, caller: Hashable) -> int:
        """What this caller's requests hold together."""
        return self._held.get(caller, 0)

    def add(self, num_bytes: int, caller: Hashable) -> None:
        """So many bytes more are held, or less."""
        self.num_bytes += num_bytes
        if caller is not None:
            self._held[caller] = self.held(caller) + num_bytes
            if not self._held[caller]:
                del self._held[caller]


class Reservation:
    """What one request holds of an allowance."""

    __slots__ = ("_byte_budget", "_caller", "_num_bytes")

    def __init__(self, byte_budget: ByteBudget, caller: Hashable = None) -> None:
        self._byte_budget = byte_budget
        self._caller = caller
        self._num_bytes = 0

    def grow(self, num_bytes: int) -> None:
        """So many bytes more; raises QueueFull, and takes nothing, where they find no room."""
        whole = self._byte_budget
        own = self._num_bytes if self._caller is None else whole.held(self._caller)
        if num_bytes and own + num_bytes > whole.max_bytes - whole.num_bytes - num_bytes:
            raise QueueFull(
                f"{whole.num_bytes:,} bytes of {whole.words}, of {whole.max_bytes:,} at most; "
                "there is no room for one of this size"
            )
        whole.add(num_bytes, self._caller)
        self._num_bytes += num_bytes

    def release(self) -> None:
        """All of it; a second time changes nothing."""
        self._byte_budget.add(-self._num_bytes, self._caller)
        self._num_bytes = 0
