"""Connection: the protocol of one client connection: bytes in, head, body, application, bytes out.

Must not know: routes, status codes, the format of an error response. A request that is refused here goes to the application
with the error in its scope (`REFUSED`), so it is answered, counted and logged like any other.
It is a class for `uvicorn.Config(http=…)`: uvicorn makes an object with `config`, `server_state`, `app_state` and `_loop`.
Invariants: A connection serves one request at a time; pipelined bytes are buffered, and above MAX_PIPELINED_BYTES reading pauses.
Headers, idle time, writes and the close have deadlines. A connection above its age ends with its next response, never between two
requests. If the client may still send after the last response, the connection lingers for RESPONSE_LINGER_S. After a half-close,
a request is answered only if it ends the connection (`close`, HTTP/1.0).
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import math
import random
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from service.errors import BadRequest, ClientTimeout, ServiceError
from service.http.asgi import CROWDED, HEADER_FIELDS, REFUSED, Scope
from service.http.cycle import Cycle, Flow, ReadAhead, WriteCoalescer
from service.http.deadline import Deadline
from service.http.listener import ConnectionSlot, is_acknowledged, is_reset
from service.http.request_parser import (
    CRLF,
    Bytes,
    ChunkedBody,
    CountedBody,
    Head,
    HeaderFields,
    HeadLimits,
    glimpse,
    take_head,
)

# Closing with unread bytes would reset the connection, and the client might lose its response.
RESPONSE_LINGER_S = 2.0
# Up to this part of the age is left out, so that connections which began together do not end together.
AGE_SPREAD = 0.2
# The unused rest of a body is read and dropped up to this size, so that the connection can be reused.
MAX_DROPPED_BYTES = 64 * 1024
MAX_PIPELINED_BYTES = 64 * 1024
# After a half-close, or while reading is paused, the loop notices no reset, so a check at this interval looks for one.
RESET_CHECK_S = 0.05
# Pause between two ticks that each parse many small chunks, so that other threads get the interpreter.
CHUNK_PAUSE_S = 0.001


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of size and time that hold before the application reads a request; the settings of the same names explain them.

    A piece of a response counts as read at the transport's low-water mark. `max_read_ahead_bytes` are of bodies that the
    application does not read yet.
    """

    head: HeadLimits
    header_timeout_s: float
    write_timeout_s: float
    max_connections: int
    max_read_ahead_bytes: int
    min_response_bytes_per_s: int = 0
    max_age_s: float = math.inf


# Of a connection that uvicorn makes.
DEFAULT_LIMITS = ConnectionLimits(HeadLimits(16_384, 8192, 100), 10.0, 30.0, 1000, 2**24)


class Shared:
    """What all connections on one loop share; `draw` returns numbers from 0 to 1."""

    def __init__(self, limits: ConnectionLimits, *, draw: Callable[[], float] = random.random) -> None:
        self.limits = limits
        self.draw = draw
        self.read_ahead = ReadAhead(limits.max_read_ahead_bytes)
        self.coalescer = WriteCoalescer()


class Stage(enum.Enum):
    """What the next bytes belong to."""

    IDLE = enum.auto()  # the next request, of which nothing has arrived
    HEAD = enum.auto()
    BODY = enum.auto()
    PIPELINED = enum.auto()  # the next request, while the current response is unfinished
    DROP = enum.auto()  # no request: they are discarded, because the connection takes no further one


class Connection(asyncio.Protocol):
    """One client connection, with the slot that the Listener gave it.

    A connection that uvicorn makes shares nothing with others: its DEFAULT_LIMITS are its own, and it has no slot.
    """

    transport: asyncio.Transport
    flow: Flow
    cycle: Cycle  # of the current request, or of the last one; there is none before the first head

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        shared: Shared | None = None,
        slot: ConnectionSlot | None = None,
    ) -> None:
        self.app = config.loaded_app
        self.loop = _loop or asyncio.get_running_loop()
        self.is_busy = False  # whether a request has begun whose response is incomplete
        self._config = config
        self._server_state = server_state
        self._connections: set[Any] = server_state.connections
        self._app_state = app_state
        self._shared = shared or Shared(DEFAULT_LIMITS)
        self._limits = self._shared.limits
        self._slot = slot
        self._is_overflow = slot is not None and slot.is_overflow
        self._stage = Stage.HEAD
        self._partial_head = b""
        # They wait for the end of this request, or for CHUNK_PAUSE_S if they are chunks of its body.
        self._pipelined_bytes = b""
        self._body: CountedBody | ChunkedBody = CountedBody(0)
        self._is_half_closed = False
        # Whether this request, or a buffered one, says that it is the last.
        self._is_last = self._pipelined_is_last = False
        self._ends_at = math.inf  # from then on the next response is the last
        self._read_deadline = Deadline(self.loop, self._on_read_deadline)
        self._write_deadline = Deadline(self.loop, self._on_write_deadline)

    # What the transport calls, in the order of a connection's life.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # TCP's or TLS's
        self.transport, self.flow = transport, Flow(transport, self._shared.coalescer)
        self._connections.add(self)
        self._scope = _connection_scope(self._config, transport)
        self._ends_at = self.loop.time() + self._limits.max_age_s * (1 - AGE_SPREAD * self._shared.draw())
        self._read_deadline.set(self._limits.header_timeout_s)

    def data_received(self, data: Bytes) -> None:
        while data:
            if self._pipelined_bytes or self._stage is Stage.PIPELINED:
                self._keep_pipelined(data)
                return
            if self._stage is Stage.BODY:
                data = self._take_body(data)
            elif self._stage is Stage.DROP:
                return
            else:
                data = self._take_head(data)

    def pause_writing(self) -> None:
        self.flow.writable.clear()
        left_s, rate = 0.0, self._limits.min_response_bytes_per_s
        # A response that is written in one piece has only `write_timeout_s`.
        if rate and self.is_busy and self.cycle.num_written:
            self.cycle.paused_at = self.loop.time()
            left_s = self.cycle.num_written / rate - self.cycle.waited_s
        self._write_deadline.set(self._limits.write_timeout_s + min(0.0, left_s))

    def resume_writing(self) -> None:
        self.flow.writable.set()
        if not self.is_busy:
            self._write_deadline.set(self._limits.write_timeout_s)  # for the rest of the response
            return
        self._write_deadline.clear()
        if self.cycle.paused_at is not None:  # else the previous response's pause is over
            self.cycle.waited_s += self.loop.time() - self.cycle.paused_at

    def eof_received(self) -> bool:
        """Return whether the connection stays open because the client still waits. TLS has no half-close."""
        self._is_half_closed = True
        self.flow.send_held()  # uvloop may close the connection at once
        pipelined = self._pipelined_bytes.lower()
        self._pipelined_is_last = b"close" in pipelined or b"http/1.0" in pipelined
        return self.transport.can_write_eof() and self._client_waits()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 (asyncio's)
        self._connections.discard(self)
        self._read_deadline.stop()
        self._write_deadline.stop()
        self._stage, self._partial_head, self._pipelined_bytes = Stage.DROP, b"", b""
        if self._slot is not None:
            self._slot.leave()
        self.flow.writable.set()
        if self.is_busy:
            self.is_busy = False
            self.cycle.disconnect()

    # What the server calls.

    def shutdown(self) -> None:
        """Close now if no request is being answered, else after its response."""
        if self._stage is Stage.DROP:
            return
        if self.is_busy:
            self.cycle.keeps_alive = False
        elif self._stage is Stage.BODY:
            self._end()
        else:
            self.flow.close()

    def shed(self) -> None:
        """Close after the next response. An idle connection stays open, because a request may be arriving."""
        self._ends_at = -math.inf

    @property
    def is_acknowledged(self) -> bool:
        """Whether the client has acknowledged every byte that was written to it, or is gone."""
        return self.transport.get_write_buffer_size() == 0 and is_acknowledged(self.transport.get_extra_info("socket"))

    # A request.

    def _take_head(self, data: Bytes) -> Bytes:
        self._partial_head += data
        try:
            head, rest = take_head(self._partial_head, self._limits.head)
        except ServiceError as error:
            self._refuse(error)
            return b""
        if head is None:
            self._partial_head = bytes(rest)
            if self._stage is Stage.IDLE:
                self._stage = Stage.HEAD
                self._read_deadline.set(self._limits.header_timeout_s)
            return b""
        self._is_last = not head.keeps_alive
        if self.flow.writable.is_set():  # else the deadline is the previous response's
            self._write_deadline.clear()
        self._body = ChunkedBody() if head.length is None else CountedBody(head.length)
        cycle = self._start(head)
        if self._body.is_complete:
            self._stage = Stage.PIPELINED
            cycle.arrived(b"", is_whole=True)
        else:
            self._stage = Stage.BODY
            cycle.expects_continue = head.expects_continue
        return rest

    def _refuse(self, error: ServiceError) -> None:
        """Answer the request that has begun with an error and discard further bytes. The connection then closes."""
        self._stage = Stage.DROP
        self._start(Head(glimpse(self._partial_head)), error.with_traceback(None))  # its frames hold the bytes

    def _start(self, head: Head, refusal: ServiceError | None = None) -> Cycle:
        """Hand the request to the application, which starts in the next loop tick."""
        self._partial_head = b""
        self._read_deadline.clear()
        scope = {**self._scope, **request_scope(head), "state": self._app_state.copy()}
        if refusal is not None:
            scope[REFUSED] = refusal
        if self._is_overflow:
            scope[CROWDED] = True
        self.cycle = Cycle(
            scope,
            self.flow,
            self._shared.read_ahead,
            self._server_state.default_headers,
            self._may_be_reused,
            self._answered,
            keeps_alive=head.keeps_alive and not self._is_overflow,
        )
        self.is_busy = True
        task = self.loop.create_task(self.cycle.run(self.app))
        self._server_state.tasks.add(task)
        task.add_done_callback(self._server_state.tasks.discard)
        return self.cycle

    def _take_body(self, data: Bytes) -> Bytes:
        cycle, body = self.cycle, self._body
        try:
            piece, rest = body.take(data)
        except BadRequest as error:
            self._stage, cycle.keeps_alive = Stage.DROP, False
            cycle.fail(error)
            return b""
        if self.is_busy:
            cycle.arrived(piece, is_whole=body.is_complete)
        if not body.is_complete and rest:
            self._keep_pipelined(rest)
            self.loop.call_later(CHUNK_PAUSE_S, self._take_pipelined)
            return b""
        if body.is_complete:
            self._stage = Stage.PIPELINED
            if not self.is_busy:
                self._await_next()
        return rest

    def _take_pipelined(self) -> None:
        data, self._pipelined_bytes, self.flow.is_full = self._pipelined_bytes, b"", False
        self.data_received(data)
        if self._is_half_closed and not self._client_waits():
            self.flow.close()

    def _keep_pipelined(self, data: Bytes) -> None:
        self._pipelined_bytes += data
        if len(self._pipelined_bytes) > MAX_PIPELINED_BYTES:
            self.flow.is_full = True
            self.flow.pause_reading()
            if self._stage is Stage.PIPELINED:
                self._read_deadline.set(RESET_CHECK_S)

    # The end of a response, and of the connection.

    def _may_be_reused(self) -> bool:
        """Return whether the connection takes another request: the body is complete, or its rest is small and sure to come."""
        if self._is_overdue() and not self._pipelined_bytes:  # requests that have arrived are answered first
            return False
        if self._stage is not Stage.BODY:
            return True
        left = self._body.left
        return left is not None and left <= MAX_DROPPED_BYTES and not self.cycle.expects_continue

    def _is_overdue(self) -> bool:
        return self.loop.time() >= self._ends_at

    def _answered(self) -> None:
        self.is_busy = False
        self._server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if not self.cycle.keeps_alive:
            self._end()
            return
        self._write_deadline.set(self._limits.write_timeout_s)
        self.flow.resume_reading()
        if self._stage is Stage.BODY:
            self._read_deadline.set(self._limits.header_timeout_s)
        else:
            self._await_next()

    def _await_next(self) -> None:
        self._stage = Stage.IDLE
        self._read_deadline.set(self._config.timeout_keep_alive)
        if self._pipelined_bytes:
            self._take_pipelined()
            self.flow.resume_reading()

    def _end(self) -> None:
        """Close after the last response: at once if the client has nothing more to send, else after RESPONSE_LINGER_S."""
        # Unless it asked for the end itself, the client of an overdue connection may have pipelined another request.
        was_expected = self._is_last or not self._is_overdue()
        has_asked_all = self._stage is Stage.PIPELINED and not self._pipelined_bytes and was_expected
        is_finished = self._is_half_closed or has_asked_all
        self._stage, self._pipelined_bytes, self.flow.is_full = Stage.DROP, b"", False
        self._read_deadline.clear()
        self._write_deadline.set(self._limits.write_timeout_s)
        if is_finished:
            self.flow.close()
            return
        self._read_deadline.set(RESPONSE_LINGER_S)
        self.flow.send_held()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()

    def _on_read_deadline(self) -> None:
        """Handle the read deadline of the current stage. While the loop would notice no reset, check for one."""
        if (self._is_half_closed or self.flow.is_full) and self._client_waits():
            return
        if self._stage is Stage.HEAD and self._partial_head not in (b"", CRLF):
            self._refuse(ClientTimeout(f"the headers did not arrive within {self._limits.header_timeout_s:g} s"))
        else:
            self.flow.close()

    def _on_write_deadline(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()

    def _client_waits(self) -> bool:
        """Return whether a client from which nothing is read still waits for a response; if so, check again later."""
        if not self.is_busy or self.transport.is_closing():
            return False
        if self._stage is Stage.BODY:
            may_wait = bool(self._pipelined_bytes)  # decided when these bytes are parsed
        else:
            is_pipelined_last = self._pipelined_is_last and bool(self._pipelined_bytes)
            may_wait = not self._is_half_closed or self._stage is Stage.DROP or self._is_last or is_pipelined_last
        if not may_wait or is_reset(self.transport.get_extra_info("socket")):
            return False
        self._read_deadline.set(RESET_CHECK_S)
        return True


def _connection_scope(config: uvicorn.Config, transport: asyncio.Transport) -> Scope:
    """Return the part of an ASGI scope that all requests of a connection share."""
    server, client = (transport.get_extra_info(name) for name in ("sockname", "peername"))
    return {
        "type": "http",
        "asgi": {"version": config.asgi_version, "spec_version": "2.3"},
        "scheme": "https" if transport.get_extra_info("sslcontext") else "http",
        "server": server[:2] if isinstance(server, tuple) else None,
        "client": client[:2] if isinstance(client, tuple) else None,
        "root_path": config.root_path,
    }


def request_scope(head: Head) -> Scope:
    """Return the part of a request's ASGI scope that its head decides."""
    # A copy of the fields, because an application may change its scope.
    line, fields, named = head.line, list(head.fields), head.named
    if head.authority:
        fields = [*(field for field in fields if field[0] != b"host"), (b"host", head.authority)]
        named = HeaderFields(fields)
    return {
        "http_version": line.version,
        "method": line.method,
        "path": line.path,
        "raw_path": line.raw_path,
        "query_string": line.query,
        "headers": fields,
        HEADER_FIELDS: named,
    }
