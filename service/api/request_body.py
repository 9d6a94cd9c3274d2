"""Request body: reads it from the caller within limits of size and time, and decompresses it within the same size limit.

Invariants: an announced length above the limit is refused before a byte is read. The limit counts the bytes that arrive, never
the announced ones. Decompression stops at the step that exceeds the limit, and the event loop is free between its steps.
A disconnect is reported once, on the event loop.
"""

from __future__ import annotations

import asyncio
import functools
import zlib
from collections.abc import Awaitable, Callable, Iterator

import zstandard

from service.errors import (
    BadEncoding,
    BodyTooLarge,
    ClientTimeout,
    DecompressedTooLarge,
    ServiceError,
    UnsupportedContentEncoding,
)
from service.http.asgi import ClientGone, RequestCycle
from service.http.request_parser import HeaderFields

Part = bytes | bytearray | memoryview
PIECE = 2**20
CHEAPER = "send the sequences in several requests; tensors take fewer bytes as safetensors or in base64"
GZIP_STEP = 2**16
# Larger bodies are decompressed in a thread. The first MiB of one of this size takes at most 2.5 ms (zeros in gzip), even if the
# body is damaged or expands to nothing.
HERE_BYTES = 2**16
# Each member costs a new decompressor. Ordinary bodies have one; concatenated files and the output of `pigz -i` have a few.
MAX_FRAMES = 1024
# Four bytes of a zstd frame can expand to 128 KiB, so one step yields at most 8 MiB.
ZSTD_STEP = 256
# RFC 8878, section 3.1.1.1.2, recommends to take windows of 8 MiB. Larger ones, as of `zstd --long`, cost their size in memory.
MAX_WINDOW_BYTES = 2**23
# The longest header of a zstd frame.
ZSTD_HEADER_BYTES = 18
# A function that runs work in a thread, in the order of the calls.
RunOffLoop = Callable[[Callable[[], list[bytes]]], Awaitable[list[bytes]]]


async def read_body(
    cycle: RequestCycle, max_bytes: int, timeout_s: float, reserve: Callable[[int], object]
) -> list[Part]:
    """Return the whole body in parts, as sent.

    `reserve` is called with each number of bytes as they arrive, and raises QueueFull. Raises BodyTooLarge, ClientTimeout or
    ClientGone.
    """
    num_arrived = 0

    def count(num_bytes: int) -> None:
        nonlocal num_arrived
        num_arrived += num_bytes
        if num_arrived > max_bytes:
            raise _too_large(BodyTooLarge, f"the body has more than {max_bytes:,} bytes")
        reserve(num_bytes)

    if (parts := cycle.take_body()) is not None:
        count(sum(map(len, parts)))
        return parts
    parts, has_more = [], True
    try:
        cycle.on_bytes(count)
        async with asyncio.timeout(timeout_s):
            while has_more:
                message = await cycle.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                parts.append(message.get("body", b""))
                has_more = message.get("more_body", False)
    except TimeoutError:
        raise ClientTimeout(f"the body did not arrive within {timeout_s:g} s") from None
    finally:
        cycle.on_bytes(None)
    return parts


def joined(parts: list[Part]) -> bytearray:
    """Join `parts` and empty the list, so that the caller holds the only, writable copy; other threads run between the parts."""
    body, end = bytearray(sum(map(len, parts))), 0
    parts.reverse()
    while parts:
        part = parts.pop()
        body[end : end + len(part)] = part
        end += len(part)
    return body


def announced_body(fields: HeaderFields, codings: tuple[bytes, ...], max_bytes: int) -> tuple[bytes | None, int]:
    """Return the content coding of the body (None if it has none) and its announced length (0 if there is none).

    The length is that of the body as sent, compressed or not. Raises UnsupportedContentEncoding or BodyTooLarge.
    """
    names = [name.strip().lower() for value in fields[b"content-encoding"] for name in value.split(b",")]
    names = [name for name in names if name not in (b"", b"identity")]
    if len(names) > 1 or not set(names) <= set(codings):
        raise UnsupportedContentEncoding(f"a body may be compressed once, with {b' or '.join(codings).decode()}")
    lengths = fields[b"content-length"]  # the transport has checked that there is at most one, of at most 19 digits
    num_bytes = int(lengths[0]) if lengths else 0
    if num_bytes > max_bytes:
        raise _too_large(BodyTooLarge, f"the body has {num_bytes:,} bytes, expected at most {max_bytes:,}")
    return names[0] if names else None, num_bytes


def _too_large(error_class: type[ServiceError], found: str) -> ServiceError:
    return error_class(f"{found} (ATTENTION_MAX_BODY_BYTES); {CHEAPER}")


async def decompressed(
    parts: list[Part], coding: bytes, max_bytes: int, reserve: Callable[[int], object], run_off_loop: RunOffLoop
) -> list[Part]:
    """Return the decompressed body in parts, and empty `parts`; `reserve` is called with each number of bytes that it adds.

    The first MiB of a small body, which is all of most bodies, is decompressed on the event loop; everything else in a thread.
    Raises DecompressedTooLarge, BadEncoding, or QueueFull from `reserve`.
    """
    body = b"".join(parts)
    parts.clear()  # the reservation covers one copy
    pieces: list[Part] = []
    total = 0
    read = _DECOMPRESSORS[coding](body)
    try:
        more = _next_mebibyte(read) if len(body) <= HERE_BYTES else await run_off_loop(lambda: _next_mebibyte(read))
        while more:
            num_bytes = sum(map(len, more))
            total += num_bytes
            if total > max_bytes:
                raise _too_large(DecompressedTooLarge, f"the decompressed body has more than {max_bytes:,} bytes")
            reserve(num_bytes)
            pieces += more
            more = await run_off_loop(lambda: _next_mebibyte(read)) if num_bytes >= PIECE else []
    except (zlib.error, zstandard.ZstdError):
        raise BadEncoding(f"the body is damaged, or is not compressed with {coding.decode()}") from None
    if not total:
        raise BadEncoding("the compressed body is empty")
    return pieces


def _next_mebibyte(read: Iterator[bytes]) -> list[bytes]:
    """Return pieces of PIECE bytes in total, or more by less than one piece (of at most 8 MiB); fewer only at the end."""
    pieces, num_bytes = [], 0
    for piece in read:
        pieces.append(piece)
        num_bytes += len(piece)
        if num_bytes >= PIECE:
            break
    return pieces


def _members(body: bytes, *, wbits: int, most: int) -> Iterator[bytes]:
    """Decompress zlib streams in sequence; each must be complete and nothing may follow the last."""
    view, start, members = memoryview(body), 0, 0
    while start < len(body):
        members += 1
        if members > most:
            plural = "s" * (most > 1)
            raise BadEncoding(f"a compressed body may have at most {most} member{plural} and nothing after that")
        member = zlib.decompressobj(wbits=wbits)
        while not member.eof:
            # One slice at a time: each call copies the input that it leaves, which must not be the rest of the body.
            piece = member.decompress(member.unconsumed_tail or view[start : start + GZIP_STEP], PIECE)
            if not member.unconsumed_tail:
                start = min(start + GZIP_STEP, len(body))
            if not piece and start == len(body) and not member.unconsumed_tail and not member.eof:
                raise BadEncoding("the compressed body is truncated")
            yield piece
        start -= len(member.unused_data)


def _unzstd(body: bytes) -> Iterator[bytes]:
    """Decompress zstd frames in sequence, skippable ones too (RFC 8878), with windows of at most MAX_WINDOW_BYTES."""
    start = members = 0
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
    while start < len(body):
        members += 1
        if members > MAX_FRAMES:
            raise BadEncoding(f"a compressed body may have at most {MAX_FRAMES} frames")
        frame, header = decompressor.decompressobj(), body[start : start + ZSTD_HEADER_BYTES]
        while not frame.eof:
            if start == len(body):
                raise BadEncoding("the zstd body is truncated")
            try:
                piece = frame.decompress(body[start : start + ZSTD_STEP])
            except zstandard.ZstdError:
                window_bytes = zstandard.get_frame_parameters(header).window_size
                if window_bytes <= MAX_WINDOW_BYTES:
                    raise
                found = f"{window_bytes:,} bytes, expected at most {MAX_WINDOW_BYTES:,}"
                raise BadEncoding(f"the window of a zstd frame has {found}") from None
            yield piece
            start = min(start + ZSTD_STEP, len(body))
        start -= len(frame.unused_data)


_DECOMPRESSORS: dict[bytes, Callable[[bytes], Iterator[bytes]]] = {
    b"gzip": functools.partial(_members, wbits=31, most=MAX_FRAMES),  # RFC 1952
    b"deflate": functools.partial(_members, wbits=15, most=1),  # RFC 9110, section 8.4.1.2
    b"zstd": _unzstd,
}
