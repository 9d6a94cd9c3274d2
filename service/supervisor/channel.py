"""Channel: one end of the socket pair between the supervisor and a worker; each line is one message in JSON.

Invariants: Nothing waits for the peer. A message is the whole status of its sender (`supervisor/status.py`), so only the latest
counts. At most one message waits behind a partly sent one. Of the messages that have arrived, only the last is parsed. The end of
file means the peer's death, because no other process holds its end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import socket
from typing import Any

# Time between two messages of a worker. A timer of its event loop sends them, so they serve as watchdog pings too.
PING_S = 1.0
# At this signal a worker writes the stacks of all its threads to stderr, whatever its interpreter is doing.
STACKS_SIGNAL = signal.SIGQUIT
# The longest messages of a worker, in which the digests of 14,000 layers have room, and of the supervisor.
MAX_WORKER_BYTES, MAX_SUPERVISOR_BYTES = 2**21, 2**24
_READ_BYTES = 2**16
# The most reads in one step, so that a peer that writes without end cannot keep its reader busy.
_MAX_READS = 32


class Channel:
    """This process's end of the socket pair; `max_bytes` limits a message of the peer."""

    def __init__(self, end: socket.socket, max_bytes: int) -> None:
        end.setblocking(False)
        end.set_inheritable(False)  # a child would keep it open
        self._end = end
        self._max_bytes = max_bytes
        self.is_ended = False  # whether the peer is dead, or has sent too long a message
        self._received = bytearray()
        self._unsent = b""  # the rest of a message
        self._next: Any = None

    def fileno(self) -> int:
        return self._end.fileno()

    @property
    def is_full(self) -> bool:
        """Whether a message waits until the peer reads."""
        return bool(self._unsent) or self._next is not None

    def send(self, message: Any) -> None:
        """Send a dataclass, in place of one that still waits."""
        self._next = message
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as there is room."""
        while self.is_full:
            if not self._unsent:
                message, self._next = self._next, None
                self._unsent = json.dumps(dataclasses.asdict(message)).encode("ascii") + b"\n"
            try:
                self._unsent = self._unsent[self._end.send(self._unsent) :]
            except BlockingIOError:
                return
            except OSError:  # the peer is gone, which `receive` notices
                self._unsent, self._next = b"", None

    def receive(self) -> Any:
        """Return the latest message that has arrived whole; None if there is none or it is no JSON."""
        for _ in range(_MAX_READS):
            try:
                data = self._end.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.is_ended = True
                break
            self._received += data
        whole, line_end, self._received = self._received.rpartition(b"\n")
        self.is_ended |= len(self._received) >= self._max_bytes
        if line_end:
            with contextlib.suppress(ValueError, RecursionError):
                return json.loads(whole.rpartition(b"\n")[2])
        return None

    def close(self) -> None:
        self._end.close()
