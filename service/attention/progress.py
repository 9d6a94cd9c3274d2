"""Progress: how far one batch has come on its thread, and the flag that stops it.

Lives here: the stop points of a forward pass. Independent of what is computed.
Invariants: Only the thread that computes the batch counts; another thread only raises the flag. A stop point changes no bit.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Self

_thread = threading.local()  # `batch`: the Progress of the batch that the thread computes


class Stopped(BaseException):
    """Ends a batch that no caller waits for; a BaseException, so that no handler takes it for a failure of the batch."""


@dataclasses.dataclass(slots=True, eq=False)
class Progress:
    """One batch; `with progress:` makes it the one that this thread computes."""

    num_points: int = 0
    """Stop points that the batch has passed."""
    seconds: float = 0.0
    """Time of its forward passes: the thread's processor time on a CPU, the clock's on a GPU."""
    filler_rows: int = 0
    """Filler rows that it has computed (see `projection.py`)."""
    is_stopped: bool = False

    def stop(self) -> None:
        """End the batch with Stopped at its next stop point; any thread may call it."""
        self.is_stopped = True

    def __enter__(self) -> Self:
        _thread.batch = self
        return self

    def __exit__(self, *_: object) -> None:
        _thread.batch = None


def current() -> Progress | None:
    """Return the progress of the batch that this thread computes; None outside a batch."""
    found: Progress | None = getattr(_thread, "batch", None)
    return found


def stop_point() -> None:
    """Count one more stop point of this thread's batch, and raise Stopped if it is stopped; costs 0.1 µs."""
    if (batch := current()) is not None:
        batch.num_points += 1
        if batch.is_stopped:
            raise Stopped


def note_filler(rows: int) -> None:
    """Count filler rows of this thread's batch."""
    if (batch := current()) is not None:
        batch.filler_rows += rows
