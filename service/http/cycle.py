"""Cycle: one request between the application and its connection.

Laws: a request that turns out broken half-way is answered by whoever reads it; an answer that its caller did not wait for is
never called sent; closing is the connection's decision.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Protocol

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.server import ServerState

from service.errors import ServiceError
from service.http.asgi import CALLER, ClientGone
from service.http.body_framing import Piece
from service.http.connection_limits import MAX_AHEAD_BYTES
from service.http.write_coalescing import WriteCoalescer

START = "http.response.start"
# A piece that is smaller takes in the next one.
SMALL_BYTES = 4096


class CoalescingTransport:
    """What a cycle sees of its connection instead of the transport.

    A head waits for the first bytes of its body and goes with them: sent apart it would be a call of the kernel and a packet of
    its own, for which the client wakes up. And both may wait for the answers of others (`departures.py`).
    """

    __slots__ = ("_departures", "_head", "_held", "_leave", "_transport", "is_closing", "is_head")

    def __init__(self, transport: asyncio.Transport, departures: WriteCoalescer, leave: Callable[[], None]) -> None:
        self._transport = transport
        self._departures = departures
        self._leave = leave
        self._head = b""
        self._held: list[bytes] = []
        self.is_closing = transport.is_closing
        self.is_head = False
        """Whether what is written next is the head of an answer."""

    def write(self, data: bytes) -> None:
        if self.is_head:
            self._head, self.is_head = data, False
            return
        head, self._head = self._head, b""
        pieces = [head, data] if head else [data]
        if self._held or (head and not self._departures.may_leave(self)):
            self._held += pieces
        else:
            self._transport.writelines(pieces)

    def flush(self) -> None:
        """At the end of an answer, which may have no body."""
        if self._head:
            self._held.append(self._head)
            self._head = b""
            self.depart()

    def depart(self) -> None:
        """What was held back leaves now, unless the connection is lost."""
        if not self._held:
            return
        held, self._held = self._held, []
        if self.is_closing():
            return
        try:
            self._transport.writelines(held)
        except Exception:  # noqa: BLE001 (no transport says which; other connections' answers wait behind this one)
            self._transport.abort()

    def close(self) -> None:
        self.flush()
        self.depart()
        self._leave()


class Flow(FlowControl):
    """uvicorn's, but while `is_full` nobody makes the connection read on."""

    is_full = False

    def resume_reading(self) -> None:
        if self.read_paused and not self.is_full:
            super().resume_reading()


class Owner(Protocol):
    """The connection, as far as a cycle needs it."""

    flow: FlowControl
    logger: logging.Logger
    access_logger: logging.Logger
    access_log: bool
    server_state: ServerState

    def goes_on(self) -> bool:
        """Whether it can be used again after the answer that begins now."""

    def on_response_complete(self) -> None: ...


class Cycle(RequestResponseCycle):
    """uvicorn's, with six differences: `fail`, ClientGone, a body that may be left behind, no chunks before HTTP/1.1, a head that
    goes with its body, and what `api/caller.py` asks.
    """

    transport: CoalescingTransport  # type: ignore[assignment]
    num_written = 0
    """Bytes of a long answer so far."""
    waited_s = 0.0
    """How long it has waited for the client to take more of it, in all; the last wait began at `paused_at`."""
    paused_at: float | None = None

    def __init__(self, owner: Owner, outlet: CoalescingTransport, scope: Any, *, keeps_alive: bool) -> None:
        super().__init__(
            scope=scope,
            transport=outlet,  # type: ignore[arg-type]
            flow=owner.flow,
            logger=owner.logger,
            access_logger=owner.access_logger,
            access_log=owner.access_log,
            default_headers=owner.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=False,
            keep_alive=keeps_alive,
            on_response=owner.on_response_complete,
        )
        self._goes_on = owner.goes_on
        self._has_failed = False  # the body is read no further
        self._failure: ServiceError | None = None  # why, until it is told
        self._tell_gone: Callable[[], object] | None = None
        self._tell_come: Callable[[int], object] | None = None
        self._pieces: list[Piece] = []
        self._num_bytes = 0
        scope[CALLER] = self
        self._is_old = scope["http_version"] == "1.0"
        if self._is_old:
            self.chunked_encoding = False

    async def run_asgi(self, app: Any) -> None:
        await super().run_asgi(app)
        # A circle that only the garbage collector would find, with all that a request has.
        scope: Any = self.scope
        scope.pop(CALLER, None)

    def fail(self, failure: ServiceError) -> None:
        """The rest of the body cannot be read: whoever waits for it hears why, and the answer is the last."""
        self._failure, self._has_failed = failure, True
        self.keep_alive = False
        self.message_event.set()

    def leave(self) -> None:
        """The connection is lost."""
        if self._tell_gone is not None:
            tell, self._tell_gone = self._tell_gone, None
            tell()

    def when_come(self, tell: Callable[[int], object] | None) -> None:
        self._tell_come = tell
        if tell is not None and self._num_bytes:
            tell(self._num_bytes)

    def when_gone(self, tell: Callable[[], object] | None) -> None:
        self._tell_gone = tell
        if self.disconnected and not self.response_complete:
            self.leave()

    def arrived(self, piece: Piece, *, is_whole: bool) -> None:
        """A piece of the body; much of it, or its end, wakes who waits for it, so a byte a second wakes nobody."""
        self.more_body = not is_whole
        if not self._is_taken(len(piece)):
            return
        last = self._pieces[-1] if self._pieces else b""
        if 0 < len(last) < SMALL_BYTES:  # an object for every byte would take forty times as much
            self._pieces[-1] = grown = last if isinstance(last, bytearray) else bytearray(last)
            grown += piece
        else:
            self._pieces.append(piece)
        self._num_bytes += len(piece)
        if self._num_bytes > MAX_AHEAD_BYTES:
            self.flow.pause_reading()
            self.message_event.set()
        elif is_whole:
            self.message_event.set()
        else:
            self.flow.resume_reading()

    def _is_taken(self, num_bytes: int) -> bool:
        """Whether whoever counts the body has room for so much more; if not, what is here is let go and the rest dropped."""
        if self._tell_come is not None:
            try:
                self._tell_come(num_bytes)
            except ServiceError as error:
                self._failure, self._has_failed, self._tell_come = error.with_traceback(None), True, None
                self._take_pieces()
                self.message_event.set()
        return not self._has_failed

    def _take_pieces(self) -> list[Piece]:
        pieces, self._pieces, self._num_bytes = self._pieces, [], 0
        return pieces

    def take_body(self) -> list[Piece] | None:
        if self.more_body or self.disconnected or self._has_failed:
            return None
        self.message_event.clear()
        self.flow.resume_reading()
        return self._take_pieces()

    async def receive(self) -> Any:
        """As uvicorn's, but for `fail`, and a piece that came alone is not copied."""
        if self.waiting_for_100_continue and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.waiting_for_100_continue = False
        if not self.disconnected and not self.response_complete:
            self.flow.resume_reading()
            await self.message_event.wait()
            self.message_event.clear()
        if self.disconnected or self.response_complete or (self._has_failed and self._failure is None):
            return {"type": "http.disconnect"}
        if self._failure is not None:
            # Not kept: its frames hold what has been read of the body, and this stays until the rest of it is dropped.
            failure, self._failure = self._failure, None
            try:
                raise failure
            finally:
                del failure
        pieces = self._take_pieces()
        body = pieces[0] if len(pieces) == 1 and isinstance(pieces[0], bytes) else b"".join(pieces)
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    async def send(self, message: Any) -> None:
        if self.keep_alive and not self.response_started:
            self.keep_alive = self._goes_on()
        if self._is_old:
            # Its answer ends with the connection (RFC 9112, section 6.3); uvicorn counts down to what it thinks is the length.
            self.expected_content_length = len(message.get("body", b""))
        if message.get("more_body"):
            self.num_written += len(message["body"])
        self.transport.is_head = message["type"] == START
        await super().send(message)
        if self.response_complete:
            self.transport.flush()
        if self.disconnected and not self.response_complete:
            raise ClientGone
