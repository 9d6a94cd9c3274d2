"""Progress: one line on a terminal during a long run; nothing in a file or a pipe."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

PATIENCE_S = 2.0


class Progress:
    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._began = clock()

    def show(self, text: str) -> None:
        """From two seconds on replaces the line; the next log line goes over it."""
        if self._clock() - self._began > PATIENCE_S and self._stream.isatty():
            self._stream.write(f"\r\x1b[K{text}\r")
            self._stream.flush()
