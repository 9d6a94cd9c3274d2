"""Listener: accepts connections, never more of them than there are connection slots.

Must not know: HTTP, the protocol of a connection, what happens to open connections when the listener closes (`worker/server.py`).
Invariants: A connection has a slot from its acceptance, TLS handshake included, to its end. A new overflow connection evicts the
oldest one, so that health is answered however many connections stay silent. Without descriptors it pauses for ACCEPT_PAUSE_S.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import mmap
import socket
import ssl
import sys
import termios
from collections.abc import Callable
from typing import Any

BACKLOG = 2048
MAX_OVERFLOW = 64
# Connections accepted in one loop tick, about 30 µs each.
BATCH = 16
ACCEPT_PAUSE_S = 1.0
# One call discards at most this many bytes. Nothing writes to this mapping, so it takes no memory; a bytearray would take 4 MiB.
_DISCARDED = mmap.mmap(-1, 2**22)
_TCP_CLOSE = 7  # TCP_CLOSE in linux/tcp_states.h


class ConnectionSlot:
    """The slot of one connection; `leave` may be called more than once."""

    __slots__ = ("_others", "_socket", "is_overflow")

    def __init__(self, taken: socket.socket, others: dict[ConnectionSlot, None], *, is_overflow: bool) -> None:
        self.is_overflow = is_overflow
        self._socket = taken
        self._others = others
        others[self] = None

    @property
    def is_reset(self) -> bool:
        """Whether the client has reset the connection. Without a read or a write only the kernel knows."""
        return self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE

    @property
    def is_acknowledged(self) -> bool:
        """Whether the client has acknowledged every byte that was sent to it, or is gone."""
        try:
            unacknowledged = fcntl.ioctl(self._socket, termios.TIOCOUTQ, b"\0" * 4)
        except (OSError, ValueError):  # the socket is closed
            return True
        return int.from_bytes(unacknowledged, sys.byteorder) == 0

    def discard(self) -> int:
        """Discard the bytes that have arrived without copying them; return how many, 0 at the end of the stream.

        Raises BlockingIOError if none has arrived, and another OSError after a reset.
        """
        return self._socket.recv_into(_DISCARDED, 0, socket.MSG_DONTWAIT | socket.MSG_TRUNC)

    def leave(self) -> None:
        self._others.pop(self, None)

    def evict(self) -> None:
        self.leave()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


class Listener:
    """Accepts connections on one bound socket, on the running loop; `make` gives a connection its protocol.

    It keeps up to `max_connections` connections, and MAX_OVERFLOW more, which serve one request each. With `tls` the handshake
    may take `handshake_timeout_s`. `report_error` gets the error that pauses accepting, or ends it early in `close`.
    """

    def __init__(
        self,
        bound: socket.socket,
        max_connections: int,
        make: Callable[[ConnectionSlot], asyncio.Protocol],
        tls: ssl.SSLContext | None,
        handshake_timeout_s: float,
        report_error: Callable[[OSError], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = bound
        self._max_connections = max_connections
        self._make = make
        self._tls = tls
        self._handshake_timeout_s = handshake_timeout_s
        self._report_error = report_error
        self._kept: dict[ConnectionSlot, None] = {}
        self._overflow: dict[ConnectionSlot, None] = {}
        self._connecting: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None

    def open(self) -> None:
        self._socket.setblocking(False)
        self._socket.listen(BACKLOG)
        self._loop.add_reader(self._socket, self._take)

    def close(self) -> set[asyncio.Task[None]]:
        """Stop accepting, and return the tasks of all connections whose TLS handshake is unfinished.

        Those that wait in the kernel are accepted first, because closing the socket resets them.
        """
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._socket)
        self._accept(sys.maxsize)
        self._socket.close()
        return self._connecting.copy()

    def _take(self) -> None:
        if not self._accept(BATCH):
            self._loop.remove_reader(self._socket)
            self._pause = self._loop.call_later(ACCEPT_PAUSE_S, self._loop.add_reader, self._socket, self._take)

    def _accept(self, max_connections: int) -> bool:
        """Accept connections that wait in the kernel; return whether that ended without an error, such as no free descriptor."""
        for _ in range(max_connections):
            try:
                taken, _ = self._socket.accept()
            except ConnectionAbortedError:
                continue
            except BlockingIOError:
                break
            except OSError as error:
                self._report_error(error)
                return False
            task = self._loop.create_task(self._connect(taken))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)
        return True

    async def _connect(self, taken: socket.socket) -> None:
        """Give an accepted connection a slot and its protocol, TLS handshake included; return when it has them or has failed."""
        taken.setblocking(False)
        is_overflow = len(self._kept) >= self._max_connections
        if is_overflow and len(self._overflow) >= MAX_OVERFLOW:
            next(iter(self._overflow)).evict()
        slot = ConnectionSlot(taken, self._overflow if is_overflow else self._kept, is_overflow=is_overflow)
        tls: Any = {} if self._tls is None else {"ssl": self._tls, "ssl_handshake_timeout": self._handshake_timeout_s}
        try:
            await self._loop.connect_accepted_socket(functools.partial(self._make, slot), taken, **tls)
        except BaseException as error:
            slot.leave()
            taken.close()
            if not isinstance(error, OSError):  # a handshake failed or took too long, or the peer is gone
                raise
