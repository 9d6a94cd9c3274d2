"""Figure 19: eight clients that read a large answer slowly, each piece in time, and others that want the room that they hold.

Invariants: the room for answers is full at first, else nothing is shown; it is free again when the slow readers have used up
their time; a client that reads fast enough, or slowly but little, has its whole answer; with any rate allowed by a planted
fault the second check fails. Rates are ten times those of the defaults, and times a seventh, so that a minute shows it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

from tests.torture import at_rest
from tests.torture.figure import Form
from tests.torture.raw_connection import HOST, RawConnection, post
from tests.torture.report import Row, at_most, fails, none_of
from tests.torture.subject import Subject

MIB = 2**20
READERS = 8
SLOW, HONEST, SMALL = 600_000, 4_000_000, 8_000
# By the rule some 9 s: 4 s, and what the bytes take, with those in the kernel's buffers. All of it would take more than 20.
MOST_S = 14.0
PROBE_S = 0.2
# Room for four of the large answers; each has 900 x 900 weights of four heads, 13 MB, and is 17 MB on the wire.
SETTINGS: dict[str, Any] = dict(
    workers=1,
    write_timeout_s=4.0,
    min_response_bytes_per_s=2_000_000,
    queue_bytes=64 * MIB,
    max_weights_bytes=16 * MIB,
    max_body_bytes=MIB,
)
CLOSE = {"Connection": "close"}
ROUTE = "/v1/layers/small/attend"
LARGE = json.dumps({"query": [[0.5] * 16] * 900, "weights": {"form": "heads"}}).encode()
LITTLE = json.dumps({"query": [[0.5] * 16] * 300}).encode()


def plant() -> None:
    """Any rate is good enough."""
    from service import limits

    made = limits.transport_limits
    limits.transport_limits = lambda settings: dataclasses.replace(made(settings), min_response_bytes_per_s=0)


@dataclasses.dataclass(frozen=True, slots=True)
class Taken:
    """What one client had: its bytes, and whether they were the whole answer."""

    num_bytes: int
    is_whole: bool


def measure(form: Form) -> Iterator[Row]:
    with Subject(form.room("slow-readers"), **SETTINGS) as subject:
        before = subject.baseline()
        is_held, free_after_s, slow = asyncio.run(_held(subject))
        what, told = f"{READERS} slow readers: room for another large answer at first", "none" if is_held else "some"
        yield Row(19, what, "none", told, is_held)
        yield at_most(19, "the same: time until another large answer is computed", free_after_s, MOST_S, " s")
        yield none_of(
            19, "the same: slow readers that got their whole answer", ["one"] * sum(taken.is_whole for taken in slow)
        )
        honest, small = asyncio.run(_honest(subject))
        cut = [f"{taken.num_bytes:,} bytes" for taken in (honest, small) if not taken.is_whole]
        yield none_of(19, "readers that were cut off: 17 MB at twice the least rate, 30 kB at 8 kB/s", cut)
        yield from at_rest.rows(19, subject, before)
    with Subject(form.room("any-rate"), plants={"modules": [__name__]}, **SETTINGS) as subject:
        _, free_after_s, _ = asyncio.run(_held(subject))
        told = f"no room in {free_after_s:.0f} s" if free_after_s > MOST_S else f"{free_after_s:.1f} s"
        yield fails(19, "a planted fault (any rate is accepted) fails the second check", told, free_after_s > MOST_S)


async def _held(subject: Subject) -> tuple[bool, float, list[Taken]]:
    """Whether the slow readers hold the room, for how long, and what each of them had."""
    started = time.monotonic()
    readers = [asyncio.ensure_future(_read(subject.port, LARGE, SLOW)) for _ in range(READERS)]
    await asyncio.sleep(1)
    is_held = await _status(subject) == 429
    while (status := await _status(subject)) != 200 and time.monotonic() - started <= MOST_S:
        await asyncio.sleep(PROBE_S)
    free_after_s = time.monotonic() - started
    if status != 200:
        free_after_s = max(free_after_s, MOST_S + PROBE_S)
        for reader in readers:
            reader.cancel()
    found = await asyncio.gather(*readers, return_exceptions=True)
    return is_held, free_after_s, [taken for taken in found if isinstance(taken, Taken)]


async def _status(subject: Subject) -> int:
    with contextlib.closing(RawConnection(subject.port)) as connection:
        reply = await connection.outcome(post(ROUTE, LARGE, CLOSE), 30)
    return 0 if isinstance(reply, str) else reply.status


async def _honest(subject: Subject) -> tuple[Taken, Taken]:
    return await asyncio.gather(_read(subject.port, LARGE, HONEST), _read(subject.port, LITTLE, SMALL))


async def _read(port: int, body: bytes, per_second: int) -> Taken:
    """Reads at this rate to the end of the connection, in ten steps a second."""
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        client.setblocking(False)
        await loop.sock_connect(client, (HOST, port))
        await loop.sock_sendall(client, post(ROUTE, body, CLOSE))
        num_bytes, head, last = 0, b"", b""
        due = time.monotonic()
        while piece := await _piece(client, per_second // 10):
            num_bytes += len(piece)
            head, last = (head + piece)[:4096], (last + piece)[-5:]
            due += len(piece) / per_second
            await asyncio.sleep(max(0.0, due - time.monotonic()))
    is_long = b"\r\ntransfer-encoding: chunked\r\n" in head
    length = None if is_long else int(head.partition(b"\r\ncontent-length: ")[2].partition(b"\r\n")[0] or -1)
    is_whole = last == b"0\r\n\r\n" if is_long else num_bytes == head.find(b"\r\n\r\n") + 4 + (length or 0)
    return Taken(num_bytes, is_whole and head.startswith(b"HTTP/1.1 200 "))


async def _piece(client: socket.socket, most: int) -> bytes:
    try:
        return await asyncio.get_running_loop().sock_recv(client, most)
    except ConnectionResetError:
        return b""
