"""Allowances: bytes that requests hold in a process and that no other limit counts, bounded over all of them.

There are two: bodies that have come in and are not tensors yet; and answers that are waited for, computed or sent.
Laws: all shares together never hold more than `max_bytes`; a share may hold at most as much as it leaves free (dynamic
thresholds, Choudhury and Hahne 1998), so large ones are refused first and small ones still find room; what a request took
is free again when it says so, and when it ends, however it ends.
"""

from __future__ import annotations

from service.errors import QueueFull


class Allowance:
    """One for each process and kind of bytes; `words` say to a caller what they are."""

    def __init__(self, max_bytes: int, words: str) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.words = words

    @property
    def max_share(self) -> int:
        """What one request may hold in an empty house."""
        return self.max_bytes // 2

    def share(self) -> Share:
        """A new request's, of nothing yet."""
        return Share(self)


class Share:
    """What one request holds of an allowance."""

    __slots__ = ("_allowance", "_num_bytes")

    def __init__(self, allowance: Allowance) -> None:
        self._allowance = allowance
        self._num_bytes = 0

    def grow(self, num_bytes: int) -> None:
        """So many bytes more; raises QueueFull, and takes nothing, where they find no room."""
        whole = self._allowance
        if num_bytes and self._num_bytes + num_bytes > whole.max_bytes - whole.num_bytes - num_bytes:
            raise QueueFull(
                f"{whole.num_bytes:,} bytes of {whole.words}, of {whole.max_bytes:,} at most; "
                "there is no room for one of this size"
            )
        whole.num_bytes += num_bytes
        self._num_bytes += num_bytes

    def release(self) -> None:
        """All of it; a second time changes nothing."""
        self._allowance.num_bytes -= self._num_bytes
        self._num_bytes = 0
