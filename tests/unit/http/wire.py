"""Test doubles for connections: a transport that records calls, a loop with a manual clock, and an application.

Invariant: time passes only by `clock.advance`; `turns` lets tasks run, and waits for nothing.
"""

import asyncio
import re
from collections.abc import Callable
from typing import Any, cast

import uvicorn
from starlette.routing import Route
from uvicorn.server import ServerState

from service.api.outer_middleware import OuterMiddleware
from service.http.asgi import ClientGone
from service.http.connection import CHUNK_PAUSE_S, Connection, ConnectionLimits, Shared, Stage
from service.http.listener import ConnectionSlot
from service.http.request_parser import HeadLimits
from tests.doubles import ManualClock

LIMITS = ConnectionLimits(
    head=HeadLimits(max_header_bytes=1024, max_target_bytes=256, max_headers=20),
    header_timeout_s=10,
    write_timeout_s=30,
    max_connections=9,
    max_read_ahead_bytes=2**20,
)


class ManualLoop:
    """The running event loop, with a manual clock."""

    def __init__(self, clock: ManualClock) -> None:
        self.time = clock.now
        self.call_at = clock.call_at

    def create_task(self, coroutine):
        return asyncio.get_running_loop().create_task(coroutine)

    def call_later(self, delay, callback):
        return self.call_at(self.time() + delay, callback)


class Taken:
    """A connection's socket, whose TCP state the kernel knows."""

    is_reset = False

    def fileno(self):
        return -1  # as once it is closed

    def getsockopt(self, *_):
        return bytes([7 if self.is_reset else 8])


class Wire:
    """A transport; `is_stuck` while the client reads nothing, which a write of `full_with` starts."""

    def __init__(self) -> None:
        self.written = b""
        self.num_writes = 0
        self.taken = Taken()
        self.is_tls = False
        self.events: list[str] = []
        self.is_reading = True
        self.is_stuck = False
        self.full_with: bytes | None = None
        self.when_full: Callable[[], None] = lambda: None

    def write(self, data):
        self.writelines((data,))

    def writelines(self, pieces):
        self.num_writes += 1
        for piece in pieces:
            self.written += piece
        if self.full_with in pieces:
            self.is_stuck = True
            self.when_full()

    def get_write_buffer_size(self):
        return 1 if self.is_stuck else 0

    def close(self):
        self.events.append("close")

    def abort(self):
        self.events.append("abort")

    def can_write_eof(self):
        return not self.is_tls

    def write_eof(self):
        if self.is_tls:
            raise NotImplementedError
        self.events.append("eof")

    def is_closing(self):
        return "close" in self.events or "abort" in self.events

    def pause_reading(self):
        self.is_reading = False

    def resume_reading(self):
        self.is_reading = True

    def get_extra_info(self, name, default=None):
        return self.taken if name == "socket" else default


class Ledger:
    """Records for the outer middleware how each request ended."""

    def __init__(self) -> None:
        self.ends: list[Any] = []
        self.num_received = 0

    def received(self, trace):
        self.num_received += 1

    def answered(self, trace, total_s):
        self.ends.append(trace.code or trace.status)

    def abandoned(self, trace, total_s):
        self.ends.append("gone")

    def faulted(self, trace, error):
        raise error


class Echo:
    """Echoes the body: /early at once, /held when `gate` opens, /long in pieces, /broken with only a head."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, bytes]] = []
        self.gate = asyncio.Event()

    async def __call__(self, scope, receive, send):
        body, more = b"", scope["path"] != "/early"
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            body += message["body"]
            more = message["more_body"]
        self.seen.append((scope["method"], scope["path"], body))
        if scope["path"] == "/held":
            await self.gate.wait()
        if scope["path"] == "/broken":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            raise RuntimeError("after the head")
        status = {"/early": 404, "/nothing": 204}.get(scope["path"], 200)
        headers = [(b"content-length", str(len(body)).encode())]
        pieces = [body]
        if scope["path"] == "/long":
            headers, pieces = [], [b"x" * 10, b"y" * 10]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": piece is not pieces[-1]})


class Room:
    """One connection to the outer middleware, with a manual clock."""

    def __init__(
        self, limits: ConnectionLimits = LIMITS, *, is_overflow: bool = False, shared: Shared | None = None
    ) -> None:
        self.clock, self.ledger, self.echo, self.wire = ManualClock(), Ledger(), Echo(), Wire()
        everything = Route("/{path:path}", self.echo, methods=["GET", "POST"])
        edge = OuterMiddleware(self.echo, [everything], self.ledger, self.clock.now)
        config = uvicorn.Config(
            edge, ws="none", log_config=None, access_log=False, proxy_headers=False, timeout_keep_alive=75
        )
        config.load()
        self.state = ServerState()
        loop: Any = ManualLoop(self.clock)
        self.taken = taken = self.wire.taken
        self.slots: dict[ConnectionSlot, None] = {}
        slot = ConnectionSlot(cast("Any", taken), self.slots, is_overflow=is_overflow)
        shared = shared or Shared(limits)
        self.read_ahead = shared.read_ahead
        self.connection = Connection(config, self.state, {}, loop, shared=shared, slot=slot)
        wire: Any = self.wire
        self.connection.connection_made(wire)

    async def send(self, *parts: bytes) -> None:
        for part in parts:
            self.connection.data_received(part)
            await turns()
            while self.is_pausing:
                await self.advance(CHUNK_PAUSE_S)

    @property
    def is_pausing(self) -> bool:
        """Whether chunks of a body wait for the next loop tick."""
        return self.connection._stage is Stage.BODY and bool(self.connection._pipelined_bytes)

    async def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        await turns()

    async def lose(self) -> None:
        self.connection.connection_lost(None)
        await turns()

    @property
    def statuses(self) -> list[int]:
        return [int(status) for status in re.findall(rb"HTTP/1.1 (\d{3}) ", self.wire.written)]

    @property
    def codes(self) -> list[str]:
        return [end for end in self.ledger.ends if isinstance(end, str)]


async def turns(number: int = 20) -> None:
    """Let this many loop ticks pass."""
    for _ in range(number):
        await asyncio.sleep(0)
