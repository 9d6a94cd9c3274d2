"""Line writer: log lines to a standard stream, and none of them waits for a reader.

Lives here for the supervisor too, which cannot afford what `logs.py` loads.
Must not know: what a line is about, who reads.
Laws: the stream does not block (`processes.unblock`). A line that finds no room waits in memory and is written before any
later one. Beyond MAX_WAITING_BYTES a line is dropped and counted; one line reports how many, behind those that waited. A line
that was written in part (a full disk) is finished before the next one.
"""

from __future__ import annotations

import collections
import contextlib
import os
import select
import threading
import time

from service import __version__
from service.timestamp import timestamp

MAX_WAITING_BYTES = 2**16
# How long the end of a process waits for a reader that is there and slow.
FINISH_S = 0.2


def log_line(level: str, event: str, **fields: object) -> str:
    """One JSON line like those of `logs.py`, without what structlog costs (17 MB)."""
    import json  # noqa: PLC0415 (memory: shared by all lines)

    head = {"timestamp": timestamp(time.time_ns()), "level": level, "event": event, "version": __version__}
    return json.dumps({**head, **fields}) + "\n"


class LineWriter:
    """Writes to `descriptor`. Any thread may call it, also within a call of its own: a finalizer may log."""

    def __init__(self, descriptor: int) -> None:
        self.num_dropped = 0
        self._num_reported = 0
        self._descriptor = descriptor
        self._waiting: collections.deque[bytes] = collections.deque()
        self._waiting_bytes = 0
        self._lock = threading.RLock()

    def write(self, text: str) -> None:
        """Writes whole lines, at most PIPE_BUF bytes of them: a pipe takes all or nothing of that."""
        data = text.encode()
        with self._lock:
            if self._waiting:
                self.flush()
            if self._waiting_bytes + len(data) > MAX_WAITING_BYTES:
                self.num_dropped += text.count("\n")
                return
            self._waiting.append(data)
            self._waiting_bytes += len(data)
            if len(self._waiting) == 1:  # else what is before it has just found no room
                self.flush()

    def flush(self) -> None:
        """Writes what waits, as far as there is room."""
        with self._lock:
            while data := self._next():
                num_written = 0
                with contextlib.suppress(OSError):  # no room, no space, no reader: it waits
                    num_written = os.write(self._descriptor, data)
                self._waiting_bytes -= num_written
                if num_written < len(data):
                    self._waiting.appendleft(data[num_written:])
                    return

    def finish(self) -> None:
        """Writes what waits before the process ends; a slow reader has FINISH_S to make room for it."""
        end = time.monotonic() + FINISH_S
        self.flush()
        while self._waiting and select.select([], [self._descriptor], [], max(0.0, end - time.monotonic()))[1]:
            before = self._waiting_bytes
            self.flush()
            if self._waiting_bytes >= before:
                return  # room is not what it lacks

    def _next(self) -> bytes:
        if self._waiting:
            return self._waiting.popleft()
        num_unreported = self.num_dropped - self._num_reported
        if not num_unreported:
            return b""
        self._num_reported += num_unreported
        report = log_line("warning", "log_lines_dropped", lines=num_unreported).encode()
        self._waiting_bytes += len(report)
        return report
