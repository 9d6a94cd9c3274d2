"""Reply: sends the pieces of an answer to the caller, compressed on request.

Invariants: an answer of at most `WHOLE_BYTES` is sent whole, with its length. A larger answer is never joined in memory, and the
event loop is free between two of its pieces. A known length is always sent. Compression works on slices, so that no answer
blocks the loop.
"""

from __future__ import annotations

import asyncio
import itertools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import zstandard

from service.http.asgi import Send

WHOLE_BYTES = 2**20
COMPRESSED_SLICE = 2**16
MIN_COMPRESSED = 1024
# Numbers as text shrink to about half at any level, and the lowest level costs least.
ZLIB_LEVEL = 1
ZSTD_LEVEL = 1

Piece = bytes | memoryview
Headers = list[tuple[bytes, bytes]]


async def send_reply(send: Send, headers: Headers, pieces: Iterable[Piece], coding: bytes | None = None) -> None:
    """Send a 200 with `headers` (without length) and the bytes of `pieces`, compressed with `coding` if given.

    The length of a sequence is known in advance; pieces that are made one by one are counted up to `WHOLE_BYTES`.
    """
    if coding is not None:
        is_worth_it, pieces = _weighed(pieces)
        if is_worth_it:
            headers, pieces = [*headers, (b"content-encoding", coding)], _compressed(pieces, coding)
    if isinstance(pieces, Sequence):
        await _send_sequence(send, headers, pieces)
    else:
        await _send_counted(send, headers, iter(pieces))


def _weighed(pieces: Iterable[Piece]) -> tuple[bool, Iterable[Piece]]:
    """Return whether there are enough bytes to be worth compressing, and the same pieces."""
    begun: list[Piece] = []
    rest = iter(pieces)
    for piece in rest:
        begun.append(piece)
        if sum(map(len, begun)) >= MIN_COMPRESSED:
            return True, itertools.chain(begun, rest)
    return False, begun


async def _send_sequence(send: Send, headers: Headers, pieces: Sequence[Piece]) -> None:
    size = sum(map(len, pieces))
    if size <= WHOLE_BYTES:
        await _send_whole(send, headers, pieces)
        return
    await send(_start([*headers, (b"content-length", str(size).encode())]))
    for piece in pieces:
        for start in range(0, len(piece), WHOLE_BYTES):
            part = piece[start : start + WHOLE_BYTES]
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b""})


async def _send_counted(send: Send, headers: Headers, pieces: Iterator[Piece]) -> None:
    ready: list[Piece] = []
    size = 0
    for piece in pieces:
        ready.append(piece)
        size += len(piece)
        if size > WHOLE_BYTES:
            break
        if size > WHOLE_BYTES // 4:
            await asyncio.sleep(0)
    else:
        await _send_whole(send, headers, ready)
        return
    await send(_start(headers))
    await send({"type": "http.response.body", "body": b"".join(ready), "more_body": True})
    for piece in pieces:
        await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def _send_whole(send: Send, headers: Headers, pieces: Sequence[Piece]) -> None:
    body = b"".join(pieces)
    await send(_start([*headers, (b"content-length", str(len(body)).encode())]))
    await send({"type": "http.response.body", "body": body})


def _start(headers: Headers) -> dict[str, object]:
    return {"type": "http.response.start", "status": 200, "headers": headers}


class _Compressor(Protocol):
    def compress(self, data: Piece, /) -> bytes: ...

    def flush(self) -> bytes: ...


def _compressor(coding: bytes) -> _Compressor:
    if coding == b"zstd":
        return zstandard.ZstdCompressor(level=ZSTD_LEVEL).compressobj()
    return zlib.compressobj(ZLIB_LEVEL, wbits=31 if coding == b"gzip" else 15)


def _compressed(pieces: Iterable[Piece], coding: bytes) -> Iterator[bytes]:
    """Compress as `gzip` (RFC 1952), `deflate` (which is zlib's format, RFC 1950) or `zstd` (RFC 8878)."""
    compressor = _compressor(coding)
    for piece in pieces:
        for start in range(0, len(piece), COMPRESSED_SLICE):
            yield compressor.compress(piece[start : start + COMPRESSED_SLICE])
    yield compressor.flush()
