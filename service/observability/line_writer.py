"""Line writer: writes log lines, with their time, to a standard stream without ever waiting for a reader.

It does not use structlog, so that the supervisor stays small: `observability/logs.py` loads it (17 MB), and a terminal's console.
Invariants: The stream does not block (`processes.set_nonblocking`). A line that finds no room waits in memory and is written
before any later one. Beyond MAX_WAITING_BYTES a line is dropped and counted; after the lines that waited, one line reports the
number. A line written in part (a full disk) is finished before the next one.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from service import __version__


def timestamp(at_ns: int) -> str:
    """Return a time in nanoseconds since the epoch as ISO 8601 in UTC, to the microsecond."""
    second, micros = divmod(at_ns // 1000, 10**6)
    return f"{_to_the_second(second)}.{micros:06d}Z"


# Cached, because many lines share a second.
_to_the_second = functools.lru_cache(2)(lambda second: time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second)))


MAX_WAITING_BYTES = 2**16
# How long a process waits at its end for a slow reader.
FINISH_S = 0.2


console: Callable[[Mapping[str, Any]], bytes] | None = None
"""Renders the lines of this process for a person; None: they are JSON."""


def use_format(name: str) -> None:
    """Write the lines of this process in the form `console`, `plain` or else JSON; call it before the first one."""
    global console  # noqa: PLW0603 (the streams of a process are global as well)
    if name in ("console", "plain"):
        from service.observability.console import console_renderer  # noqa: PLC0415 (it loads structlog)

        console = console_renderer(colours=name == "console")


def log_line(level: str, event: str, **fields: object) -> bytes:
    """Return one line like those of `observability/logs.py`, or none for what a person does not see; None is left out."""
    head = {"timestamp": timestamp(time.time_ns()), "level": level, "event": event, "version": __version__}
    line = {name: value for name, value in {**head, **fields}.items() if value is not None}
    if console is not None:
        return console(line)
    return json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


class LineWriter:
    """Writes to `descriptor`. Any thread may call it, even during a call of the same thread: a finalizer may log."""

    def __init__(self, descriptor: int) -> None:
        self.num_dropped = 0
        self._num_unreported = 0
        self._descriptor = descriptor
        self._waiting: collections.deque[bytes] = collections.deque()
        self._waiting_bytes = 0
        self._lock = threading.RLock()

    def write(self, lines: bytes) -> None:
        """Write whole lines (or none), at most PIPE_BUF bytes together: a pipe takes all of them or none."""
        if not lines:
            return
        with self._lock:
            if self._waiting or self._num_unreported:
                self.flush()
            if self._waiting_bytes + len(lines) > MAX_WAITING_BYTES:
                num_lines = lines.count(b"\n")
                self.num_dropped += num_lines
                self._num_unreported += num_lines
                return
            self._waiting.append(lines)
            self._waiting_bytes += len(lines)
            self.flush()

    def flush(self) -> None:
        """Write what waits, as far as there is room."""
        with self._lock:
            while data := self._next():
                rest = data
                with contextlib.suppress(OSError):  # no room in the pipe, no space, or no reader
                    rest = data[os.write(self._descriptor, data) :]
                self._waiting_bytes -= len(data) - len(rest)
                if rest:
                    self._waiting.appendleft(rest)
                    return

    def finish(self) -> None:
        """Write what waits before the process ends; a slow reader has FINISH_S to make room for it."""
        end = time.monotonic() + FINISH_S
        room = select.poll()
        room.register(self._descriptor, select.POLLOUT)
        self.flush()
        while self._waiting and room.poll(max(0.0, end - time.monotonic()) * 1000):
            before = self._waiting_bytes
            self.flush()
            if self._waiting_bytes >= before:
                return  # it had room and took nothing: the disk is full or the reader is gone

    def _next(self) -> bytes:
        if self._waiting:
            return self._waiting.popleft()
        if not self._num_unreported:
            return b""
        num_lines, self._num_unreported = self._num_unreported, 0
        report = log_line("warning", "log_lines_dropped", lines=num_lines)
        self._waiting_bytes += len(report)
        return report
