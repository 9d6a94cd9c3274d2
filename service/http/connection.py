"""Connection: uvicorn's protocol of one client connection, with its own parser, states, deadlines and close.

Must not know: routes, status codes, the format of an error response. A request that is refused here goes to the application
with the error in its scope (`REFUSED`), so it is answered, counted and logged like any other.
Invariants: A connection serves one request at a time; pipelined bytes are buffered, and above MAX_PIPELINED_BYTES reading pauses.
Headers, idle time, writes and the close have deadlines. If the last response precedes its request's end, the connection lingers
for LINGER_S. After a half-close, a request is answered only if it ends the connection (`close`, HTTP/1.0).
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import math
from collections.abc import Callable
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from service.errors import BadRequest, ClientTimeout, ServiceError
from service.http.asgi import CROWDED, REFUSED
from service.http.cycle import CoalescingTransport, Cycle, Flow, ReadAhead, WriteCoalescer, request_scope
from service.http.listener import ConnectionSlot
from service.http.request_parser import CRLF, Bytes, ChunkedBody, CountedBody, Head, HeadLimits, glimpse, take_head

# Closing with unread bytes would reset the connection, and the client might lose its response.
LINGER_S = 2.0
# Most clients stop sending when they read an answer. What arrives before that is discarded later, in a few large pieces: under
# overload, reading refused bodies as they arrived took half of a process's time (docs/log.md).
DISCARD_DELAY_S = 0.05
DISCARD_PAUSE_S = 0.01
# Reads in one step of discarding: enough for what a client has sent, and for its end, which follows if it has stopped sending.
MAX_DISCARDS = 4
MAX_LINGER_BYTES = 64 * 2**20
# The unused rest of a body is read and dropped up to this size, so that the connection can be reused.
MAX_DROPPED_BYTES = 64 * 1024
MAX_PIPELINED_BYTES = 64 * 1024
# After a half-close, or while reading is paused, the loop notices no reset, so a check at this interval looks for one.
RESET_CHECK_S = 0.05
# Pause between two ticks that each parse many small chunks, so that other threads get the interpreter.
PAUSE_S = 0.001


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of size and time that hold before the application reads a request.

    The headers must be complete `header_timeout_s` after the connection opened, or after the first byte of a later request. The
    client must read each piece of a long response, or a short one, down to the transport's low-water mark within
    `write_timeout_s`, and the rest of a response in that time again. All waits of a response for its client may take
    `write_timeout_s` plus the time of its bytes at `min_response_bytes_per_s` (0: any time). A process keeps at most
    `max_connections` connections, and `max_read_ahead_bytes` of bodies that the application does not read yet.
    """

    head: HeadLimits
    header_timeout_s: float
    write_timeout_s: float
    max_connections: int
    max_read_ahead_bytes: int
    min_response_bytes_per_s: int = 0


class Stage(enum.Enum):
    """What the next bytes belong to."""

    HEAD = enum.auto()
    BODY = enum.auto()
    PIPELINED = enum.auto()  # the next request, while the current response is unfinished
    DROP = enum.auto()  # no request: they are discarded, because the connection takes no further one


class Deadline:
    """Calls `passed` once for each `set` that is neither cleared nor set again in time.

    It has at most one timer on the loop, set again if it fires too early, because every request of a connection moves it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, passed: Callable[[], None]) -> None:
        self._loop = loop
        self._passed = passed
        self._due = math.inf
        self._fires_at = math.inf
        self._timer: asyncio.TimerHandle | None = None

    def set(self, seconds: float) -> None:
        """Move the deadline to `seconds` from now."""
        self._due = self._loop.time() + seconds
        if self._due < self._fires_at:
            self._arm()

    def clear(self) -> None:
        self._due = math.inf

    def stop(self) -> None:
        """Cancel the timer, at the end of the connection."""
        self._due = self._fires_at = math.inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._fires_at = self._due
        self._timer = self._loop.call_at(self._due, self._fire)

    def _fire(self) -> None:
        self._timer, self._fires_at = None, math.inf
        if self._loop.time() >= self._due:
            self._due = math.inf
            self._passed()
        elif self._due < math.inf:
            self._arm()


class Connection(HttpToolsProtocol):
    """One client connection; keeps uvicorn's tasks, flow control and shutdown, on which `worker/server.py` relies."""

    cycle: Cycle
    flow: Flow

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        limits: ConnectionLimits,
        coalescer: WriteCoalescer,
        read_ahead: ReadAhead,
        slot: ConnectionSlot,
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.parser = None  # type: ignore[assignment]  # `request_parser.py` parses
        self._limits = limits
        self._slot = slot
        self._coalescer = coalescer
        self._read_ahead = read_ahead
        self._stage = Stage.HEAD
        self._partial_head = b""
        # They wait for the end of this request, or for PAUSE_S if they are chunks of its body.
        self._pipelined_bytes = b""
        self._body: CountedBody | ChunkedBody = CountedBody(0)
        self._is_half_closed = False
        # Whether this request, or a buffered one, says that it is the last.
        self._is_last = self._pipelined_is_last = False
        self._is_shedding = False
        self._num_dropped_bytes = 0
        self._linger_ends_at = 0.0
        self._read_deadline = Deadline(self.loop, self._on_read_deadline)
        self._write_deadline = Deadline(self.loop, self._on_write_deadline)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.on_message_begin()  # makes uvicorn's scope, with what all requests of a connection share
        self.flow = Flow(transport)
        self._coalescing = CoalescingTransport(transport, self._coalescer, self._lingering_close)
        self._read_deadline.set(self._limits.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._read_deadline.stop()
        self._write_deadline.stop()
        self._stage, self._partial_head, self._pipelined_bytes = Stage.DROP, b"", b""
        self._slot.leave()
        super().connection_lost(exc)
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.report_disconnect()

    def data_received(self, data: Bytes) -> None:
        while data:
            if self._pipelined_bytes or self._stage is Stage.PIPELINED:
                self._keep_pipelined(data)
                return
            if self._stage is Stage.HEAD:
                data = self._take_head(data)
            elif self._stage is Stage.BODY:
                data = self._take_body(data)
            else:
                self._count_dropped(len(data))
                return

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio's says bool
        """Return whether the connection stays open because the client still waits. TLS has no half-close."""
        self._is_half_closed = True
        self._coalescing.send_held()  # send these responses now, before the connection may close
        pipelined = self._pipelined_bytes.lower()
        self._pipelined_is_last = b"close" in pipelined or b"http/1.0" in pipelined
        return self.transport.can_write_eof() and self._client_waits()

    def shutdown(self) -> None:
        self._coalescing.send_held()
        if self._stage is Stage.BODY and self.cycle.response_complete:
            self._lingering_close()
        elif self._stage is not Stage.DROP:
            super().shutdown()

    @property
    def is_acknowledged(self) -> bool:
        """Whether the client has acknowledged every byte that was written to it, or is gone."""
        return self.transport.get_write_buffer_size() == 0 and self._slot.is_acknowledged

    def shed(self) -> None:
        """Close after the next response. An idle connection stays open, because a request may be arriving."""
        self._is_shedding = True

    def pause_writing(self) -> None:
        super().pause_writing()
        cycle, limits, left_s = self.cycle, self._limits, 0.0
        # Else the bytes may be those of the previous response, which was held back.
        if limits.min_response_bytes_per_s and cycle.num_written:
            cycle.paused_at = self.loop.time()
            left_s = cycle.num_written / limits.min_response_bytes_per_s - cycle.waited_s
        self._write_deadline.set(limits.write_timeout_s + min(0.0, left_s))

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.cycle.response_complete:
            self._write_deadline.set(self._limits.write_timeout_s)  # for the rest of the response
            return
        self._write_deadline.clear()
        if self.cycle.paused_at is not None:  # else the previous response's pause is over
            self.cycle.waited_s += self.loop.time() - self.cycle.paused_at

    def _take_head(self, data: Bytes) -> Bytes:
        is_next = not self._partial_head and self.cycle is not None  # whether a later request than the first begins
        self._partial_head += data
        try:
            head, rest = take_head(self._partial_head, self._limits.head)
        except ServiceError as error:
            self._refuse(error)
            return b""
        if head is None:
            self._partial_head = bytes(rest)
            if is_next:
                self._read_deadline.set(self._limits.header_timeout_s)
            return b""
        self._is_last = not head.keeps_alive
        if not self.flow.write_paused:  # else the deadline is the previous response's
            self._write_deadline.clear()
        self._body = ChunkedBody() if head.length is None else CountedBody(head.length)
        self._stage = Stage.PIPELINED if self._body.is_complete else Stage.BODY
        cycle = self._start(head)
        if self._body.is_complete:
            cycle.more_body = False
            cycle.message_event.set()
        else:
            cycle.waiting_for_100_continue = head.expects_continue
        return rest

    def _take_body(self, data: Bytes) -> Bytes:
        cycle, body = self.cycle, self._body
        try:
            piece, rest = body.take(data)
        except BadRequest as error:
            self._stage, cycle.keep_alive = Stage.DROP, False
            cycle.fail(error)
            return b""
        if not cycle.response_complete:
            cycle.arrived(piece, is_whole=body.is_complete)
        if not body.is_complete and rest:
            self._keep_pipelined(rest)
            self.loop.call_later(PAUSE_S, self._take_pipelined)
            return b""
        if body.is_complete:
            self._stage = Stage.PIPELINED
            if cycle.response_complete:
                self._await_next()
        return rest

    def _take_pipelined(self) -> None:
        data, self._pipelined_bytes, self.flow.is_full = self._pipelined_bytes, b"", False
        self.data_received(data)
        if self._is_half_closed and not self._client_waits():
            self._coalescing.send_held()
            self.transport.close()

    def _keep_pipelined(self, data: Bytes) -> None:
        self._pipelined_bytes += data
        if len(self._pipelined_bytes) > MAX_PIPELINED_BYTES:
            self.flow.is_full = True
            self.flow.pause_reading()
            if self._stage is Stage.PIPELINED:
                self._read_deadline.set(RESET_CHECK_S)

    def _count_dropped(self, num_bytes: int) -> None:
        self._num_dropped_bytes += num_bytes
        if self._num_dropped_bytes > MAX_LINGER_BYTES:
            self.transport.abort()

    def _on_read_deadline(self) -> None:
        """Handle the read deadline of the current stage. While the loop would notice no reset, check for one."""
        if (self._is_half_closed or self.flow.is_full) and self._client_waits():
            return
        if self._stage is Stage.DROP and self.loop.time() < self._linger_ends_at:
            self._discard()
        elif self._stage is Stage.HEAD and self._partial_head not in (b"", CRLF):
            error = ClientTimeout(f"the headers did not arrive within {self._limits.header_timeout_s:g} s")
            self._refuse(error)
        else:
            self._coalescing.send_held()
            self.transport.close()

    def _client_waits(self) -> bool:
        """Return whether a client from which nothing is read still waits for a response; if so, check again later."""
        if self._stage is Stage.HEAD or self.cycle.response_complete or self.transport.is_closing():
            return False
        if self._stage is Stage.BODY:
            may_wait = bool(self._pipelined_bytes)  # decided when these bytes are parsed
        else:
            is_pipelined_last = self._pipelined_is_last and bool(self._pipelined_bytes)
            may_wait = not self._is_half_closed or self._stage is Stage.DROP or self._is_last or is_pipelined_last
        if not may_wait or self._slot.is_reset:
            return False
        self._read_deadline.set(RESET_CHECK_S)
        return True

    def _on_write_deadline(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()

    def _refuse(self, error: ServiceError) -> None:
        """Answer the request that has begun with an error and discard further bytes. The connection then closes."""
        self._stage = Stage.DROP
        self._start(Head(glimpse(self._partial_head)), error.with_traceback(None))  # its frames hold the bytes

    def _start(self, head: Head, refusal: ServiceError | None = None) -> Cycle:
        """Hand the request to the application, which starts in the next loop tick."""
        self._partial_head = b""
        self._read_deadline.clear()
        scope = {**self.scope, **request_scope(head), "state": self.app_state.copy()}
        if refusal is not None:
            scope[REFUSED] = refusal
        if self._slot.is_overflow:
            scope[CROWDED] = True
        keeps_alive = head.keeps_alive and not self._slot.is_overflow
        self.cycle = Cycle(self, self._coalescing, scope, self.may_be_reused, self._read_ahead, keeps_alive=keeps_alive)
        self._start_asgi_task(self.cycle, self.app)
        return self.cycle

    def may_be_reused(self) -> bool:
        """Return whether the connection takes another request: the body is complete, or its rest is small and sure to come."""
        if self._is_shedding and not self._pipelined_bytes:  # requests that have arrived are answered first
            return False
        if self._stage is not Stage.BODY:
            return True
        left = self._body.left
        return left is not None and left <= MAX_DROPPED_BYTES and not self.cycle.waiting_for_100_continue

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing() or self._stage is Stage.DROP:
            return
        self._write_deadline.set(self._limits.write_timeout_s)
        self.flow.resume_reading()
        if self._stage is Stage.BODY:
            self._read_deadline.set(self._limits.header_timeout_s)
        else:
            self._await_next()

    def _await_next(self) -> None:
        self._stage = Stage.HEAD
        self._read_deadline.set(self.timeout_keep_alive)
        if self._pipelined_bytes:
            self._take_pipelined()
            self.flow.resume_reading()

    def _lingering_close(self) -> None:
        """Close after the last response: at once if the client has nothing more to send, else after LINGER_S."""
        is_finished = self._is_half_closed or (self._stage is Stage.PIPELINED and not self._pipelined_bytes)
        self._stage, self._pipelined_bytes, self.flow.is_full = Stage.DROP, b"", False
        self._read_deadline.clear()
        self._write_deadline.set(self._limits.write_timeout_s)
        if is_finished or self.transport.is_closing():
            self.transport.close()
            return
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self._linger_ends_at = self.loop.time() + LINGER_S
            self.flow.pause_reading()
            self._read_deadline.set(DISCARD_DELAY_S)
        else:
            self.flow.resume_reading()
            self._read_deadline.set(LINGER_S)

    def _discard(self) -> None:
        """Discard what has arrived in the kernel, and close if the end has arrived too; else repeat until the lingering ends."""
        try:
            for _ in range(MAX_DISCARDS):
                num_bytes = self._slot.discard()
                if not num_bytes:
                    self.transport.close()
                    return
                self._count_dropped(num_bytes)
        except BlockingIOError:  # no more has arrived
            pass
        except OSError:  # reset
            self.transport.close()
        if not self.transport.is_closing():
            self._read_deadline.set(min(DISCARD_PAUSE_S, self._linger_ends_at - self.loop.time()))


class ConnectionSet(set[Connection]):
    """uvicorn's set of connections, which shrinks by `discard` only; whenever that empties it, `emptied` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.emptied = asyncio.Event()

    def discard(self, item: object) -> None:
        super().discard(item)
        if not self:
            self.emptied.set()
