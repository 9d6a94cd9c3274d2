"""RawConnection: one connection to the service, with what httpx hides: the bytes as they go and how an answer ended.

Invariants: what is sent is sent as it is; an answer is read by HTTP/1.1's rules, strictly; silence, a cut answer and a reset are
told apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import socket
import struct
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

HOST = "127.0.0.1"
HANG_S = 5.0
T = TypeVar("T")


class Silence(Exception):
    """No whole answer in time: a hang."""


class Cut(Exception):
    """The connection ended before an answer was whole; `got` is what came of it."""

    def __init__(self, why: str, got: bytes = b"") -> None:
        super().__init__(why)
        self.got = got


@dataclasses.dataclass(frozen=True, slots=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def closes(self) -> bool:
        return self.headers.get("connection", "").lower() == "close"

    def json(self):
        return json.loads(self.body)


def post(path: str, body: bytes, headers: dict[str, str] | None = None, method: str = "POST") -> bytes:
    """A request's bytes; JSON unless `headers` say otherwise."""
    told = {"Host": "torture", "Content-Type": "application/json", "Content-Length": str(len(body)), **(headers or {})}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in told.items())]
    return "\r\n".join(lines).encode("utf-8", "surrogateescape") + b"\r\n\r\n" + body


def attend(query, layer: str = "small", **headers: str) -> bytes:
    return post(f"/v1/layers/{layer}/attend", json.dumps({"query": query}).encode(), headers)


class RawConnection:
    """Opened at its first use and again after it was closed; one exchange at a time."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, request: bytes, timeout_s: float = HANG_S, *, reopen: bool = True) -> Reply:
        """One exchange; a kept-alive connection that the service closed meanwhile is opened again, once."""
        for is_last in (self._writer is None or not reopen, True):
            try:
                return await self._ask(request, timeout_s)
            except Cut as cut:
                if is_last or cut.got:
                    raise
        raise AssertionError("unreachable")

    async def outcome(self, request: bytes, timeout_s: float = HANG_S, *, reopen: bool = True) -> Reply | str:
        """The answer, or what came instead, in words."""
        try:
            return await self.ask(request, timeout_s, reopen=reopen)
        except (Silence, Cut, OSError) as error:
            return f"{type(error).__name__} {error}".strip()

    async def send(self, data: bytes) -> None:
        """Bytes without waiting for an answer."""
        writer = (await self._opened())[1]
        writer.write(data)
        with contextlib.suppress(OSError):
            await writer.drain()

    async def read(self, timeout_s: float = HANG_S, *, is_head: bool = False) -> Reply:
        reader = (await self._opened())[0]
        try:
            async with asyncio.timeout(timeout_s):
                reply = await read_reply(reader, is_head=is_head)
        except TimeoutError:
            self.close()
            raise Silence from None
        except Cut:
            self.close()
            raise
        if reply.closes:
            self.close()
        return reply

    async def read_some(self, count: int, timeout_s: float = HANG_S) -> bytes:
        reader = (await self._opened())[0]
        try:
            async with asyncio.timeout(timeout_s):
                return await reader.read(count)
        except (TimeoutError, OSError):
            return b""

    def close(self) -> None:
        """At once: what was not sent is dropped, what was not read makes a reset."""
        if self._writer is not None:
            self._writer.transport.abort()
        self._reader = self._writer = None

    def reset(self) -> None:
        """At once, with a reset in any case."""
        if self._writer is not None:
            reset_at_close(self._writer.get_extra_info("socket"))
        self.close()

    async def _ask(self, request: bytes, timeout_s: float) -> Reply:
        try:
            await self.send(request)
        except OSError as error:
            self.close()
            raise Cut(type(error).__name__) from None
        return await self.read(timeout_s, is_head=request.startswith(b"HEAD "))

    async def _opened(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(HOST, self._port, limit=2**20)
        return self._reader, self._writer


def reset_at_close(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def share_out(items: Iterable[T], num_workers: int, work: Callable[[T], Awaitable[str | None]]) -> list[str]:
    """Each item once, so many at a time; what was wrong with them."""
    left = iter(items)

    async def worker() -> list[str]:
        return [told for item in left if (told := await work(item)) is not None]

    return [told for some in await asyncio.gather(*(worker() for _ in range(num_workers))) for told in some]


async def share_connections(
    port: int, items: Iterable[T], num: int, work: Callable[[RawConnection, T], Awaitable[str | None]]
) -> list[str]:
    """The same over so many connections, one for each worker."""
    free = [RawConnection(port) for _ in range(num)]

    async def lent(item: T) -> str | None:
        connection = free.pop()
        try:
            return await work(connection, item)
        finally:
            free.append(connection)

    try:
        return await share_out(items, num, lent)
    finally:
        for connection in free:
            connection.close()


async def read_reply(reader: asyncio.StreamReader, *, is_head: bool = False) -> Reply:
    """The next answer on a connection; raises Cut."""
    while True:
        head = await _until(reader, b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")[:-2]
        version, status = first.split(" ", 2)[:2]
        assert version == "HTTP/1.1", first
        if status != "100":
            break
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if status in ("204", "304") or is_head:
        return Reply(int(status), headers, b"")
    if headers.get("transfer-encoding") == "chunked":
        return Reply(int(status), headers, await _chunked(reader))
    length = headers.get("content-length")
    body = await _exactly(reader, int(length)) if length is not None else await reader.read()
    return Reply(int(status), headers, body)


async def _chunked(reader: asyncio.StreamReader) -> bytes:
    parts = []
    while size := int((await _until(reader, b"\r\n")).strip(), 16):
        parts.append(await _exactly(reader, size))
        await _exactly(reader, 2)
    await _exactly(reader, 2)
    return b"".join(parts)


async def _until(reader: asyncio.StreamReader, separator: bytes) -> bytes:
    try:
        return await reader.readuntil(separator)
    except asyncio.IncompleteReadError as error:
        raise Cut("the connection ended", error.partial) from None
    except (OSError, asyncio.LimitOverrunError) as error:
        raise Cut(type(error).__name__) from None


async def _exactly(reader: asyncio.StreamReader, count: int) -> bytes:
    try:
        return await reader.readexactly(count)
    except asyncio.IncompleteReadError as error:
        raise Cut("the answer was cut", error.partial or b"?") from None
    except OSError as error:
        raise Cut(type(error).__name__, b"?") from None
