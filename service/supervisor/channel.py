"""Channel: one end of the socket pair between the supervisor and a worker; each line is one message in JSON.

Invariants: Nothing waits for the peer. While the peer does not read, only the latest message waits, because a message is the
whole status of its sender (`supervisor/status.py`). The end of file is the peer's death: no other process holds its end.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import socket
from typing import Any

# Time between two messages of a worker, sent by a timer of its event loop: they are the watchdog pings too.
PING_S = 1.0
# At this signal a worker writes the stacks of all its threads to stderr, whatever its interpreter is doing.
STACKS_SIGNAL = signal.SIGQUIT
# A peer that sends more than this without a line end is no peer of ours.
MAX_MESSAGE_BYTES = 2**24
_READ_BYTES = 2**16


class Channel:
    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
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
            except OSError:  # the peer is gone, which `receive` reports
                self._unsent, self._next = b"", None

    def receive(self) -> list[Any] | None:
        """Return the messages that have arrived, None for one that is no JSON; return None at the end of file."""
        try:
            data = self._end.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            return None
        self._received += data
        if not data or len(self._received) > MAX_MESSAGE_BYTES:
            return None
        *messages, self._received = self._received.split(b"\n") if b"\n" in data else [self._received]
        return [_parse(message) for message in messages]

    def close(self) -> None:
        self._end.close()


def _parse(text: bytearray) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
