"""Cycle: carries one request to the application and its response back, through the Flow of its connection.

Invariants: If a body turns out to be malformed half-way, the code that reads it gets the error and answers. A response never
counts as sent if the client disconnected before its end. Only the connection decides when to close.

Write coalescing (docs/internals/decisions.md): the first response of a tick is sent at once, because it may be the only one. The
others are sent in order when the tick ends, or after the inline batch that began in it. A response that closes its connection is
sent at once too.
"""

from __future__ import annotations

import asyncio
import dataclasses
import http
import logging
from collections.abc import Callable, Iterable, Sequence

from service.errors import QueueFull, ServiceError
from service.http.asgi import CYCLE, Application, ClientGone, Message, Scope
from service.http.request_parser import CRLF, TOKEN, is_clean
from service.loop_time import LoopTick

Piece = bytes | bytearray | memoryview
Field = tuple[bytes, bytes]

# Above this many unread bytes of a body, reading pauses. Most bodies are smaller, and one read returns at most as many.
MAX_AHEAD_BYTES = 256 * 1024
# A smaller piece of a body absorbs the next one.
SMALL_BYTES = 4096
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
NO_CONTENT = 204
BODILESS_STATUSES = (NO_CONTENT, 304)
_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in http.HTTPStatus}
_FAULT = b"Internal Server Error"
_FAULT_FIELDS = [
    (b"content-type", b"text/plain"),
    (b"content-length", b"%d" % len(_FAULT)),
    (b"connection", b"close"),
]
_log = logging.getLogger(__name__)


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


class Flow:
    """The transport of a connection, which pauses reading, and writing while `writable` is not set.

    Reading does not resume while `is_full`. What is written may wait for responses of other connections (`WriteCoalescer`).
    """

    def __init__(self, transport: asyncio.Transport, coalescer: WriteCoalescer) -> None:
        self.transport = transport
        self.writable = asyncio.Event()
        self.writable.set()
        self.is_full = False
        self._is_reading = True
        self._coalescer = coalescer
        self._held: list[Piece] = []

    def pause_reading(self) -> None:
        if self._is_reading:
            self._is_reading = False
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._is_reading and not self.is_full:
            self._is_reading = True
            self.transport.resume_reading()

    def write(self, pieces: list[Piece], *, begins: bool) -> None:
        """Send `pieces`, or hold them back if they begin a response, or if those before them are held back."""
        if self._held or (begins and not self._coalescer.may_send_now(self.send_held)):
            self._held += pieces
        else:
            self.transport.writelines(pieces)

    def send_held(self) -> None:
        """Send what was held back, unless the connection is lost."""
        held, self._held = self._held, []
        if not held or self.transport.is_closing():
            return
        try:
            self.transport.writelines(held)
        except Exception:  # noqa: BLE001 (no transport documents which; other connections' responses wait behind this one)
            self.transport.abort()

    def close(self) -> None:
        self.send_held()
        self.transport.close()


class Cycle:
    """One request and its response; a RequestCycle, which the application takes from its scope.

    The rest of a body that exceeds a bound, or that is unread when the response is complete, is dropped. `may_be_reused` returns
    whether the connection takes another request after the response that begins now; `answered` is called at its end.
    """

    def __init__(
        self,
        scope: Scope,
        flow: Flow,
        read_ahead: ReadAhead,
        default_headers: Sequence[Field],
        may_be_reused: Callable[[], bool],
        answered: Callable[[], object],
        *,
        keeps_alive: bool,
    ) -> None:
        self.keeps_alive = keeps_alive
        self.expects_continue = False
        self.is_whole = False  # whether the whole body has arrived
        self.is_answered = False
        self.is_gone = False  # whether the client disconnected before that
        self.num_written = 0  # bytes of a long response so far
        self.waited_s = 0.0  # total time that the response has waited for the client to read
        self.paused_at: float | None = None  # when the last wait began
        self._scope = scope
        self._flow = flow
        self._default_headers = default_headers
        self._may_be_reused = may_be_reused
        self._answered = answered
        # What has arrived.
        self._news = asyncio.Event()
        self._read_ahead = read_ahead
        self._pieces: list[Piece] = []
        self._num_ahead = 0  # the bytes of `_pieces` that `read_ahead` counts
        self._has_failed = False  # no more of the body is read
        self._failure: ServiceError | None = None  # the error, until `receive` raises it
        self._on_disconnect: Callable[[], object] | None = None
        self._on_bytes: Callable[[int], object] | None = None
        # The response.
        self._is_started = False
        self._is_for_head = scope["method"] == "HEAD"
        self._head = b""  # it waits for the first bytes of its body: alone it would cost a system call and a packet
        self._is_chunked = False
        self._left: int | None = None  # bytes that Content-Length announced; None if it is missing
        scope[CYCLE] = self

    async def run(self, application: Application) -> None:
        """Run the application for this request, and end the response that it does not end."""
        try:
            await application(self._scope, self.receive, self.send)
            if not self.is_answered and not self.is_gone:
                raise RuntimeError("the application returned before the end of its response")  # noqa: TRY301 (logged below)
        except ClientGone:
            pass
        except Exception:  # noqa: BLE001 (the application's, whatever it is)
            _log.exception("the application raised an error")
        finally:
            # Break the reference cycle: only the garbage collector would find it, with all of the request's memory.
            self._scope.pop(CYCLE, None)
            self._take_pieces()  # free unread pieces: the cycle lives as long as its connection, which may linger
            if not self.is_answered and not self.is_gone:
                self._break_off()

    # What arrives: the connection calls these three.

    def arrived(self, piece: Piece, *, is_whole: bool) -> None:
        """Store a piece of the body. Only the end of the body wakes the reader, so that single bytes do not.

        Without an `on_bytes` callback a large amount also wakes the reader, and pauses reading. With a callback the bytes are
        bounded already, and each pause would cost two loop ticks.
        """
        self.is_whole = is_whole
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
            self._news.set()
        elif self._num_ahead > MAX_AHEAD_BYTES:
            self._flow.pause_reading()
            self._news.set()
        else:
            self._flow.resume_reading()

    def fail(self, failure: ServiceError) -> None:
        """Free the body so far, and drop the rest; `receive` raises `failure`."""
        self._failure, self._has_failed = failure.with_traceback(None), True  # its frames hold the bytes
        self._on_bytes = None
        self._take_pieces()
        self._news.set()

    def disconnect(self) -> None:
        self.is_gone = True
        self._news.set()
        if self._on_disconnect is not None:
            self._on_disconnect()

    # What the application calls, as `RequestCycle` and ASGI say.

    def on_bytes(self, callback: Callable[[int], object] | None) -> None:
        self._on_bytes = callback
        if callback is not None and self._pieces:
            self._release_ahead()
            callback(sum(map(len, self._pieces)))

    def on_disconnect(self, callback: Callable[[], object] | None) -> None:
        self._on_disconnect = callback
        if callback is not None and self.is_gone:
            callback()

    def take_body(self) -> list[Piece] | None:
        if not self.is_whole or self.is_gone or self._has_failed:
            return None
        self._news.clear()
        self._flow.resume_reading()
        return self._take_pieces()

    async def receive(self) -> Message:
        """Return what has arrived of the body; the disconnect at the end of the response too. Raises the error of `fail`."""
        if self.expects_continue:
            self.expects_continue = False
            if not self.is_whole and not self._flow.transport.is_closing():
                self._flow.write([CONTINUE], begins=False)
        if not self.is_gone and not self.is_answered:
            self._flow.resume_reading()
            await self._news.wait()
            self._news.clear()
        if self._failure is not None and not self.is_gone and not self.is_answered:
            # Do not keep the error: its frames hold the body read so far, and this cycle stays until the rest is dropped.
            failure, self._failure = self._failure, None
            try:
                raise failure
            finally:
                del failure
        if self.is_gone or self.is_answered or self._has_failed:
            return {"type": "http.disconnect"}
        pieces = self._take_pieces()
        body = pieces[0] if len(pieces) == 1 and isinstance(pieces[0], bytes) else b"".join(pieces)
        return {"type": "http.request", "body": body, "more_body": not self.is_whole}

    async def send(self, message: Message) -> None:
        """Send a part of the response. Raises ClientGone if the client disconnected before its end."""
        if not self._flow.writable.is_set() and not self.is_gone:
            await self._flow.writable.wait()
        if self.is_gone:
            raise ClientGone
        kind = message["type"]
        if kind == "http.response.start" and not self._is_started:
            self._start(message["status"], message.get("headers", ()))
        elif kind == "http.response.body" and self._is_started and not self.is_answered:
            self._write(message.get("body", b""), has_more=message.get("more_body", False))
        else:
            raise RuntimeError(f"a response has one start and then its body until the end, and this message is {kind}")

    # The response.

    def _start(self, status: int, headers: Iterable[Field]) -> None:
        if self.keeps_alive:
            self.keeps_alive = self._may_be_reused()
        self.expects_continue = self._is_chunked = False
        self._left = None
        lines = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status]
        lines += self._field_lines(status, (*self._default_headers, *headers))
        if not self.keeps_alive:
            lines.append(b"connection: close\r\n")
        if self._is_for_head or status in BODILESS_STATUSES:
            self._left = 0
        elif self._left is None and self._scope["http_version"] != "1.0":  # a client before 1.1 reads up to the end
            self._is_chunked = True
            lines.append(b"transfer-encoding: chunked\r\n")
        head = b"".join(lines) + CRLF
        if head.count(CRLF) != len(lines) + 1 or not is_clean(head):
            raise RuntimeError("a header field of a response must not have control characters")
        self._head, self._is_started = head, True

    def _field_lines(self, status: int, fields: Iterable[Field]) -> list[bytes]:
        """Return the lines of these fields without those that the connection writes itself, and note what they ask for."""
        lines = []
        for name, value in fields:
            lower = name.lower()
            if not lower or lower.translate(None, TOKEN):
                raise RuntimeError("the name of a response's header field must be a token")
            if lower == b"connection" and b"close" in value.lower():
                self.keeps_alive = False
                continue
            if lower == b"transfer-encoding" or (lower == b"content-length" and status == NO_CONTENT):
                continue
            if lower == b"content-length":
                self._left = int(value)
            lines.append(b"%b: %b\r\n" % (lower, value))
        return lines

    def _write(self, body: Piece, *, has_more: bool) -> None:
        if has_more:
            self.num_written += len(body)  # before the write, which may pause writing
        pieces = [] if self._is_for_head else self._framed(body, has_more=has_more)
        head, self._head = self._head, b""
        if head:
            pieces.insert(0, head)
        if pieces:
            self._flow.write(pieces, begins=bool(head))
        if not has_more:
            self._end()

    def _framed(self, body: Piece, *, has_more: bool) -> list[Piece]:
        """Return a part of the body as the bytes of a chunk, or of what Content-Length announced."""
        if self._is_chunked:
            pieces: list[Piece] = [b"%x\r\n" % len(body), body, CRLF] if body else []
            return pieces if has_more else [*pieces, b"0\r\n\r\n"]
        if self._left is not None:
            self._left -= len(body)
            if self._left < 0 or (self._left and not has_more):
                raise RuntimeError("the body of a response must have as many bytes as its Content-Length")
        return [body] if body else []

    def _break_off(self) -> None:
        """End the connection after a response that the application did not end: behind what there is of it, else behind a 500."""
        if not self._is_started:
            self._start(500, _FAULT_FIELDS)
            self._write(_FAULT, has_more=False)
            return
        if self._head:
            self._flow.write([self._head], begins=True)
        self.keeps_alive = False
        self._end()

    def _end(self) -> None:
        self.is_answered = True
        self._news.set()
        self._answered()

    def _take_pieces(self) -> list[Piece]:
        self._release_ahead()
        pieces, self._pieces = self._pieces, []
        return pieces

    def _release_ahead(self) -> None:
        self._read_ahead.num_bytes -= self._num_ahead
        self._num_ahead = 0
