"""Intake: the bytes of bodies that have come in and are not tensors yet, bounded over all requests of the process.

Laws: all bodies together never hold more than `max_bytes`; a body may hold at most as much as is still free (dynamic
thresholds, Choudhury and Hahne 1998), so large ones are refused first and small ones still find room; what a request took
is free again when it has been decoded, and when it ends, however it ends.
"""

from __future__ import annotations

from service.errors import QueueFull


class Intake:
    """One for each process."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0

    def share(self) -> Share:
        """A new request's, of nothing yet."""
        return Share(self)


class Share:
    """What one request holds of the intake."""

    __slots__ = ("_intake", "_num_bytes")

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._num_bytes = 0

    def grow(self, num_bytes: int) -> None:
        """So many bytes more; raises QueueFull, and takes nothing, where they find no room."""
        intake = self._intake
        if self._num_bytes + num_bytes > intake.max_bytes - intake.num_bytes:
            raise QueueFull(
                f"{intake.num_bytes:,} bytes of bodies are being received and decoded, of {intake.max_bytes:,} at most; "
                "there is no room for one of this size"
            )
        intake.num_bytes += num_bytes
        self._num_bytes += num_bytes

    def release(self) -> None:
        """All of it; a second time changes nothing."""
        self._intake.num_bytes -= self._num_bytes
        self._num_bytes = 0
