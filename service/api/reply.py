"""Reply: chooses the type and the coding of an answer (RFC 9110, section 12.5), and sends it in pieces.

Invariants: a header that allows nothing that the service can write raises NotAcceptable. Of equal weights the first offered wins.
A weight that is no finite number counts as 0, one outside 0 to 1 as the nearer limit. By default a list of several codings
requests none: libraries add it by themselves. A client that wants a compressed answer names one coding, or gives `identity` a
lower weight.

An answer of at most `WHOLE_BYTES` is sent whole. A larger answer is joined in memory only in blocks, after each of which the
event loop runs. A known length is always sent.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import zstandard

from service.errors import NotAcceptable, UnsupportedMediaType
from service.http.asgi import Send
from service.http.request_parser import HeaderFields

JSON = b"application/json"
SAFETENSORS = b"application/vnd.safetensors"
OCTET_STREAM = b"application/octet-stream"
MIN_COMPRESSED = 1024
# A parameter: a token, then a token or a quoted string (RFC 9110, section 5.6.6).
_PARAMETER = re.compile(rb';[ \t]*([^\s;="]+)[ \t]*=[ \t]*("(?:[^"\\]|\\.)*"|[^\s;"]*)')
_WEIGHT = re.compile(rb";\s*q\s*(?:=([^;]*))?(?:;|$)")


def body_type(fields: HeaderFields, taken: tuple[bytes, ...]) -> bytes:
    """Return the type in `taken` that Content-Type names; raise UnsupportedMediaType. Text must be UTF-8."""
    values = fields[b"content-type"]
    value = values[0] if len(values) == 1 else b""
    if value in taken:
        return value
    media = value.partition(b";")[0].strip().lower()
    charsets = [text.strip(b'"').lower() for name, text in _PARAMETER.findall(value) if name.lower() == b"charset"]
    if media not in taken or not set(charsets) <= {b"utf-8", b"utf8"}:
        raise UnsupportedMediaType(f"Content-Type must be {b' or '.join(taken).decode()}, with text in UTF-8")
    return media


def answer_type(fields: HeaderFields, offered: tuple[bytes, ...]) -> bytes:
    """Return the type in `offered` to which Accept gives the highest weight; raise NotAcceptable if it allows none."""
    weights = _weights(fields[b"accept"])
    if not weights:
        return offered[0]

    def quality(media: bytes) -> float:
        """Return the weight of the most specific range that matches, 0 if none does."""
        ranges = (media, media.partition(b"/")[0] + b"/*", b"*/*")
        return next((weights[name] for name in ranges if name in weights), 0.0)

    best = max(offered, key=quality)  # max keeps the first of equals
    if not quality(best) > 0:
        raise NotAcceptable(f"Accept must allow {b' or '.join(offered).decode()}")
    return best


def answer_coding(fields: HeaderFields, offered: tuple[bytes, ...], *, take_offers: bool) -> Coding | None:
    """Return the content coding in `offered` that Accept-Encoding asks for, or None for a plain answer.

    A small answer stays plain if that is allowed. With `take_offers`, a list of several codings counts as asking. Raises
    NotAcceptable if neither a coding in `offered` nor the plain answer is allowed.
    """
    weights = _weights(fields[b"accept-encoding"])
    wildcard = weights.pop(b"*", None)
    plain = weights.pop(b"identity", wildcard)
    best = max(offered, key=lambda coding: weights.get(coding, wildcard or 0.0))
    quality = weights.get(best, wildcard or 0.0)
    if plain == quality == 0:
        raise NotAcceptable(f"Accept-Encoding must allow {b' or '.join((b'identity', *offered)).decode()}")
    is_asked = quality > plain if plain is not None else quality > 0 and (len(weights) == 1 or take_offers)
    return (best, 0 if plain == 0 else MIN_COMPRESSED) if is_asked else None


def _weights(values: Sequence[bytes]) -> dict[bytes, float]:
    """Map the entries of a header, in lower case, to their weights from 0 to 1 (RFC 9110, section 12.4.2).

    Every finite number is taken, because clients send weights that the RFC does not allow: Java's HttpURLConnection sends `q=.2`.
    """
    found: dict[bytes, float] = {}
    for entry in b",".join(values).lower().split(b","):
        name, parameter = entry.partition(b";")[0].strip(), _WEIGHT.search(entry)
        try:
            weight = 1.0 if parameter is None else float(parameter[1] or b"")
        except ValueError:
            weight = 0.0
        if name:
            found[name] = min(max(weight, 0.0), 1.0) if math.isfinite(weight) else 0.0
    return found


WHOLE_BYTES = 2**20
# An answer that is made piece by piece pauses for other work after this many bytes, which take 2 ms as lists of numbers.
# It does not pause more often, because under overload each pause takes a loop tick of more than 2 ms.
PAUSE_BYTES = 2**19
# Compressing a block takes up to 7 ms (gzip).
COMPRESSED_BLOCK = 2**17
# Numbers as text shrink to about half at any level, and the lowest level costs least.
ZLIB_LEVEL = ZSTD_LEVEL = 1

Piece = bytes | memoryview
Headers = list[tuple[bytes, bytes]]
Coding = tuple[bytes, int]  # the name of a content coding, and the fewest bytes of an answer that are compressed


async def send_reply(send: Send, headers: Headers, pieces: Iterable[Piece], coding: Coding | None = None) -> None:
    """Send a 200 with `headers` (without length) and the bytes of `pieces`, compressed with `coding` if given and worth it.

    A sequence gives its length in advance; pieces that are made one by one are counted up to `WHOLE_BYTES`.
    """
    pause_bytes = PAUSE_BYTES
    if coding is not None:
        (name, min_bytes), rest = coding, iter(pieces)
        pieces, size = await collected(rest, min_bytes - 1)
        if size >= min_bytes:
            headers = [*headers, (b"content-encoding", name)]
            # A block may give no bytes for a while, so each one pauses.
            pieces, pause_bytes = _compressed(itertools.chain(pieces, rest), name), 0
    rest = iter(() if isinstance(pieces, Sequence) else pieces)
    if isinstance(pieces, Sequence):
        begun, size = pieces, sum(map(len, pieces))
    else:
        begun, size = await collected(rest, WHOLE_BYTES, pause_bytes)
    if size <= WHOLE_BYTES or isinstance(pieces, Sequence):
        headers = [*headers, (b"content-length", str(size).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    if size <= WHOLE_BYTES:
        await send({"type": "http.response.body", "body": b"".join(begun)})
        return
    unsent = itertools.chain(begun, rest)
    for block in _blocks(unsent, pause_bytes) if pause_bytes else unsent:
        if block:
            await send({"type": "http.response.body", "body": block, "more_body": True})
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b""})


async def collected(
    pieces: Iterable[Piece], max_bytes: float = math.inf, pause_bytes: int = PAUSE_BYTES
) -> tuple[Sequence[Piece], int]:
    """Return the pieces up to the one that exceeds `max_bytes`, and their bytes.

    The event loop runs after every `pause_bytes`, or after each piece if that is 0.
    """
    made: list[Piece] = []
    size = work = 0
    for piece in pieces:
        made.append(piece)
        size += len(piece)
        if size > max_bytes:
            break
        work += len(piece)
        if work >= pause_bytes:
            work = 0
            await asyncio.sleep(0)
    return made, size


def _blocks(pieces: Iterable[Piece], num_bytes: int) -> Iterator[Piece]:
    """Yield the bytes of `pieces` in blocks of at least `num_bytes` and less than twice as many; the last may be smaller."""
    parts: list[Piece] = []
    size = 0
    for piece in pieces:
        for at in range(0, len(piece), num_bytes):
            parts.append(piece[at : at + num_bytes])
            size += len(parts[-1])
            if size >= num_bytes:
                block = parts[0] if len(parts) == 1 else b"".join(parts)
                parts, size = [], 0  # freed before the block is sent
                yield block
    if parts:
        yield b"".join(parts)


_COMPRESSORS: dict[bytes, Callable[[], Any]] = {
    b"zstd": lambda: zstandard.ZstdCompressor(level=ZSTD_LEVEL).compressobj(),  # RFC 8878
    b"gzip": lambda: zlib.compressobj(ZLIB_LEVEL, wbits=31),  # RFC 1952
    b"deflate": lambda: zlib.compressobj(ZLIB_LEVEL, wbits=15),  # zlib's format, RFC 1950
}


def _compressed(pieces: Iterable[Piece], coding: bytes) -> Iterator[bytes]:
    compressor = _COMPRESSORS[coding]()
    for block in _blocks(pieces, COMPRESSED_BLOCK):
        yield compressor.compress(block)
    yield compressor.flush()
