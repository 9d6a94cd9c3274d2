"""Cycle: carries one request to the application and its response back; WriteCoalescer joins the writes of one loop tick.

Invariants: If a body turns out to be malformed half-way, the code that reads it gets the error and answers. A response never
counts as sent if the client disconnected before its end. Only the connection decides when to close.

Write coalescing: every response wakes its client, and a client on the same machine takes a core from the service. Responses that
are sent together are read together, and the next requests arrive together (docs/performance.md). The first response of a tick is
sent at once, because it may be the only one. The others are sent in order when the tick ends, or after the inline batch that
began in it. A response to HEAD, and one that closes its connection, is sent at once too.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from service.errors import QueueFull, ServiceError
from service.http.asgi import CYCLE, FIELDS, ClientGone
from service.http.request_parser import Head, HeaderFields
from service.loop_time import LoopTick

Piece = bytes | bytearray | memoryview


class WriteCoalescer:
    """Coalesces the writes of all connections on one loop."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], object]] = []
        self._has_sent_first = False
        self._tick = LoopTick(self._end)

    def may_send_now(self, send_later: Callable[[], object]) -> bool:
        """Return whether a response is sent now; if not, `send_later`, which raises nothing, is called when this tick ends."""
        self._tick.ask()
        if self._has_sent_first:
            self._waiting.append(send_later)
            return False
        self._has_sent_first = True
        return True

    def _end(self) -> None:
        waiting, self._waiting, self._has_sent_first = self._waiting, [], False
        for send_later in waiting:
            send_later()


# Above this many unread bytes of a body, reading pauses. Most bodies are smaller, and one read returns at most as many.
MAX_AHEAD_BYTES = 256 * 1024
# A smaller piece of a body absorbs the next one.
SMALL_BYTES = 4096


@dataclasses.dataclass(slots=True)
class ReadAhead:
    """The bytes of bodies that have arrived and that the application does not read yet, of all connections on one loop.

    One tick reads every socket that has something to read, thousands in an overload, before any application task runs.
    """

    max_bytes: int
    num_bytes: int = 0

    def take(self, num_bytes: int) -> None:
        """Count bytes; raise QueueFull, and count nothing, if they are too many."""
        if self.num_bytes + num_bytes > self.max_bytes:
            raise QueueFull(f"{self.num_bytes:,} of at most {self.max_bytes:,} bytes of bodies have just arrived")
        self.num_bytes += num_bytes


class CoalescingTransport:
    """The transport that a cycle writes to.

    A response head waits for the first bytes of its body and is sent with them: alone it would cost a system call and a packet,
    and wake the client. Both may also wait for responses of other connections (`WriteCoalescer`). `close` calls `on_close`.
    """

    def __init__(self, transport: asyncio.Transport, coalescer: WriteCoalescer, on_close: Callable[[], None]) -> None:
        self._transport = transport
        self._coalescer = coalescer
        self._on_close = on_close
        self._head = b""
        self._held: list[bytes] = []
        self.is_closing = transport.is_closing
        self.is_head = False  # whether the next write is the head of a response

    def write(self, data: bytes) -> None:
        if self.is_head:
            self._head, self.is_head = data, False
            return
        head, self._head = self._head, b""
        pieces = [head, data] if head else [data]
        if self._held or (head and not self._coalescer.may_send_now(self.send_held)):
            self._held += pieces
        else:
            self._transport.writelines(pieces)

    def flush(self) -> None:
        """Send a head without a body, at the end of a response."""
        if self._head:
            self._held.append(self._head)
            self._head = b""
            self.send_held()

    def send_held(self) -> None:
        """Send what was held back, unless the connection is lost."""
        if not self._held:
            return
        held, self._held = self._held, []
        if self.is_closing():
            return
        try:
            self._transport.writelines(held)
        except Exception:  # noqa: BLE001 (no transport documents which; other connections' responses wait behind this one)
            self._transport.abort()

    def close(self) -> None:
        self.flush()
        self.send_held()
        self._on_close()


class Flow(FlowControl):
    """uvicorn's flow control, except that reading does not resume while `is_full`."""

    is_full = False

    def resume_reading(self) -> None:
        if self.read_paused and not self.is_full:
            super().resume_reading()


def request_scope(head: Head) -> dict[str, Any]:
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
        FIELDS: named,
    }


class Cycle(RequestResponseCycle):
    """uvicorn's cycle, which also reports the arrival of the body and a disconnect without a task or a timer.

    It drops the rest of a body that exceeds a bound, or that is unread when the response is complete. `send` raises ClientGone if
    the client disconnected before the end of the response, and sends no chunks to clients before HTTP/1.1. `may_be_reused`
    returns whether the connection takes another request after the response that begins now.
    """

    transport: CoalescingTransport  # type: ignore[assignment]
    num_written = 0  # bytes of a long response so far
    waited_s = 0.0  # total time that the response has waited for the client to read; the last wait began at `paused_at`
    paused_at: float | None = None

    def __init__(
        self,
        connection: HttpToolsProtocol,
        transport: CoalescingTransport,
        scope: Any,
        may_be_reused: Callable[[], bool],
        read_ahead: ReadAhead,
        *,
        keeps_alive: bool,
    ) -> None:
        super().__init__(
            scope=scope,
            transport=transport,  # type: ignore[arg-type]
            flow=connection.flow,
            logger=connection.logger,
            access_logger=connection.access_logger,
            access_log=connection.access_log,
            default_headers=connection.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=False,
            keep_alive=keeps_alive,
            on_response=connection.on_response_complete,
        )
        self._may_be_reused = may_be_reused
        self._has_failed = False  # no more of the body is read
        self._failure: ServiceError | None = None  # the error, until `receive` raises it
        self._on_disconnect: Callable[[], object] | None = None
        self._on_bytes: Callable[[int], object] | None = None
        self._pieces: list[Piece] = []
        self._read_ahead = read_ahead
        self._num_ahead = 0  # the bytes of `_pieces` that `read_ahead` counts
        scope[CYCLE] = self
        if scope["http_version"] == "1.0":
            self.chunked_encoding = False

    async def run_asgi(self, app: Any) -> None:
        await super().run_asgi(app)
        # Break the reference cycle: only the garbage collector would find it, with all of the request's memory.
        scope: Any = self.scope
        scope.pop(CYCLE, None)
        self._take_pieces()  # free unread pieces: the cycle lives as long as its connection, which may linger

    def fail(self, failure: ServiceError) -> None:
        """Free the body so far, and drop the rest; `receive` raises `failure`."""
        self._failure, self._has_failed = failure.with_traceback(None), True  # its frames hold the bytes
        self._on_bytes = None
        self._take_pieces()
        self.message_event.set()

    def report_disconnect(self) -> None:
        if self._on_disconnect is not None:
            self._on_disconnect()

    def on_bytes(self, callback: Callable[[int], object] | None) -> None:
        """Call `callback` with the number of body bytes so far, and with that of each later part; None cancels this.

        If `callback` raises a ServiceError, `receive` raises it, or this method does.
        """
        self._on_bytes = callback
        if callback is not None and self._pieces:
            self._release_ahead()
            callback(sum(map(len, self._pieces)))

    def on_disconnect(self, callback: Callable[[], object] | None) -> None:
        """Call `callback` when the client disconnects before its complete answer, at once if it already has; None cancels it."""
        self._on_disconnect = callback
        if self.disconnected and not self.response_complete:
            self.report_disconnect()

    def arrived(self, piece: Piece, *, is_whole: bool) -> None:
        """Store a piece of the body. Only the end of the body wakes the reader, so that single bytes do not.

        Without an `on_bytes` callback a large amount also wakes the reader, and pauses reading. With a callback the bytes are
        bounded already, and each pause would cost two loop ticks.
        """
        self.more_body = not is_whole
        if self._has_failed:
            return
        try:
            if self._on_bytes is not None:
                self._on_bytes(len(piece))
            else:
                self._read_ahead.take(len(piece))
                self._num_ahead += len(piece)
        except ServiceError as error:
            self.fail(error)
            return
        last = self._pieces[-1] if self._pieces else b""
        if 0 < len(last) < SMALL_BYTES:  # one object for each byte would take forty times the memory
            self._pieces[-1] = grown = last if isinstance(last, bytearray) else bytearray(last)
            grown += piece
        else:
            self._pieces.append(piece)
        if is_whole:
            self.message_event.set()
        elif self._num_ahead > MAX_AHEAD_BYTES:
            self.flow.pause_reading()
            self.message_event.set()
        else:
            self.flow.resume_reading()

    def _take_pieces(self) -> list[Piece]:
        self._release_ahead()
        pieces, self._pieces = self._pieces, []
        return pieces

    def _release_ahead(self) -> None:
        self._read_ahead.num_bytes -= self._num_ahead
        self._num_ahead = 0

    def take_body(self) -> list[Piece] | None:
        """Return the whole body in parts if it is complete and still unread; then `receive` gives only the disconnect."""
        if self.more_body or self.disconnected or self._has_failed:
            return None
        self.message_event.clear()
        self.flow.resume_reading()
        return self._take_pieces()

    async def receive(self) -> Any:
        """Like uvicorn's, but raise the error of `fail`, and do not copy a body that is one piece."""
        message: Any = await super().receive()
        if message["type"] == "http.disconnect" or (self._has_failed and self._failure is None):
            return {"type": "http.disconnect"}
        if self._failure is not None:
            # Do not keep the error: its frames hold the body read so far, and this cycle stays until the rest is dropped.
            failure, self._failure = self._failure, None
            try:
                raise failure
            finally:
                del failure
        pieces = self._take_pieces()
        message["body"] = pieces[0] if len(pieces) == 1 and isinstance(pieces[0], bytes) else b"".join(pieces)
        return message

    async def send(self, message: Any) -> None:
        if self.keep_alive and not self.response_started:
            self.keep_alive = self._may_be_reused()
        if self.scope["http_version"] == "1.0":
            # The response ends with the connection (RFC 9112, section 6.3), but uvicorn counts down an expected length.
            self.expected_content_length = len(message.get("body", b""))
        if message.get("more_body"):
            self.num_written += len(message["body"])
        self.transport.is_head = message["type"] == "http.response.start"
        await super().send(message)
        if self.response_complete:
            self.transport.flush()
        if self.disconnected and not self.response_complete:
            raise ClientGone
