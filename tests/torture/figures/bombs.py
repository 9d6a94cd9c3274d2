"""Figure 8: small requests that want to become large: compressed, nested, endless headers, a million chunks.

Invariants: each is refused within a second of its last byte that the service would read; memory never rises by more than the
body limit and 16 MiB; a hundred of them leave nothing behind.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import time
import zlib
from collections.abc import Callable, Iterator

import zstandard

from service.settings import Settings
from tests.torture import answer_rules, at_rest
from tests.torture.canary import Song, singing
from tests.torture.figure import Form
from tests.torture.raw_connection import Cut, RawConnection, Reply, Silence, post
from tests.torture.report import Row, not_yet
from tests.torture.subject import Subject

MIB = 2**20
ATTEND, INFER = "/v1/layers/small/attend", "/v2/models/small/infer"
MAX_S = 1.0
PATIENCE_S = 20.0
HUGE_SHAPE = b'{"query":{"dtype":"float32","shape":[4294967296,4294967296],"data":""}}'
REPEATS = 100
BOMB_BYTES, PIECE_BYTES = 10**9, 10**7
GZIP, ZLIB = 31, 15  # the windows that ask zlib for either form
LIMIT_BYTES = Settings.model_fields["max_body_bytes"].default


@dataclasses.dataclass(frozen=True, slots=True)
class Bomb:
    """`write` makes the bytes; `needs` is a setting; a version without it does not get this bomb."""

    name: str
    write: Callable[[], bytes]
    statuses: tuple[int, ...]
    needs: str | None = None


def _packed(write: Callable[[], bytes], coding: str, path: str = ATTEND) -> Callable[[], bytes]:
    return lambda: post(path, write(), {"Content-Encoding": coding})


def _deflated(wbits: int) -> bytes:
    """A gigabyte of spaces, 1:1000: blocks that are whole after a full flush may be repeated. Its end is never reached."""
    packer, piece = zlib.compressobj(9, zlib.DEFLATED, wbits), b" " * PIECE_BYTES
    first, other = (packer.compress(piece) + packer.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    return first + other * (BOMB_BYTES // PIECE_BYTES - 1)


def _zstd() -> bytes:
    packer, piece = zstandard.ZstdCompressor().compressobj(), b" " * PIECE_BYTES
    return b"".join(packer.compress(piece) for _ in range(BOMB_BYTES // PIECE_BYTES)) + packer.flush()


def _nested(_: int = 0) -> bytes:
    """3 MB that a parser could make hundreds of: `[[],[],…]`."""
    return post(ATTEND, b'{"query":[' + b"[]," * 10**6 + b"[]]}")


def _zeros() -> bytes:
    return b'{"query":[' + b"0," * 7_800_000 + b"0]}"


def _chunks() -> bytes:
    head = post(ATTEND, b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    return head + b"1\r\n \r\n" * 10**6 + b"0\r\n\r\n"


def _endless_chunks() -> bytes:
    head = post(ATTEND, b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    return head + (b"100000\r\n" + b" " * MIB + b"\r\n") * 40


BOMBS = [
    Bomb("gzip, 1 MB of 1 GB", _packed(lambda: _deflated(GZIP), "gzip"), (413,)),
    Bomb("gzip, 7.8 million numbers", _packed(lambda: gzip.compress(_zeros()), "gzip"), (413,)),
    Bomb("gzip in gzip", _packed(lambda: gzip.compress(_deflated(GZIP)), "gzip"), (400, 413)),
    Bomb("zstd, 1 GB", _packed(_zstd, "zstd"), (413,)),
    Bomb("deflate on /v2, 1 GB", _packed(lambda: _deflated(ZLIB), "deflate", INFER), (413,)),
    Bomb("3 MB of [[],[],…]", _nested, (413,)),
    Bomb("3 MB of [[[[…", lambda: post(ATTEND, b'{"query":' + b"[" * 3_000_000), (400,)),
    Bomb("3 MB of empty objects", lambda: post(ATTEND, b'{"masks":[' + b"{}," * 10**6 + b"{}]}"), (413,)),
    Bomb("200,000 fields", lambda: post(ATTEND, b"{" + b",".join(b'"%d":0' % i for i in range(200_000)) + b"}"), (413,)),
    Bomb("200,000 wrong elements", lambda: post(ATTEND, b'{"query":[' + b'"x",' * 200_000 + b'"x"]}'), (413,)),
    Bomb("a million digits", lambda: post(ATTEND, b'{"query":[[' + b"9" * 10**6 + b"]]}"), (400,)),
    Bomb("a shape of 2^64 elements", lambda: post(ATTEND, HUGE_SHAPE), (413, 422)),
    Bomb("1 M chunks of one byte", _chunks, (400, 413, 422)),
    Bomb("40 MiB in chunks", _endless_chunks, (413,)),
    Bomb("announced 2^63 bytes", lambda: post(ATTEND, b"", {"Content-Length": str(2**63)}), (400, 413)),
    Bomb("a header of 10 MB", lambda: post(ATTEND, b"", {"X-Big": "x" * 10_000_000}), (400, 431), "max_header_bytes"),
    Bomb("100,000 headers", lambda: post(ATTEND, b"", {f"X-{i}": "x" for i in range(100_000)}), (400, 431), "max_header_bytes"),
    Bomb("a target of 1 MiB", lambda: post("/" + "a" * MIB, b""), (400, 404, 414), "max_header_bytes"),
]  # fmt: skip


def measure(form: Form) -> Iterator[Row]:
    songs: list[Song] = []
    with Subject(form.room("bombs"), workers=1) as subject:
        wires = {bomb.name: bomb.write() for bomb in BOMBS if bomb.needs is None or bomb.needs in Settings.model_fields}
        for wire in wires.values():  # the first time some memory comes to stay: arenas, imports
            asyncio.run(throw(subject, wire))
        before = subject.baseline()
        with singing(subject.port, songs):
            for bomb in BOMBS:
                yield _row(subject, bomb, wires.get(bomb.name), form.count(REPEATS, 3))
        yield songs[0].row(8)
        yield from at_rest.rows(8, subject, before, 32)


def _row(subject: Subject, bomb: Bomb, wire: bytes | None, num: int) -> Row:
    if wire is None:
        return not_yet(8, bomb.name, f"needs the setting {bomb.needs}")
    quiet = subject.vitals().resident_bytes
    subject.forget_peaks()
    replies, slowest_s = asyncio.run(throw(subject, wire, num))
    peak_mib = (subject.peak_bytes() - quiet) / MIB
    wrong = [told for told in (what_is_wrong(reply, bomb) for reply in replies) if told]
    is_met = not wrong and slowest_s <= MAX_S and peak_mib * MIB <= LIMIT_BYTES + 16 * MIB
    statuses = ", ".join(sorted({str(reply.status) if isinstance(reply, Reply) else reply for reply in replies}))
    told = f"{statuses} in {slowest_s:.2f} s, peak +{peak_mib:.0f} MiB {'; '.join(dict.fromkeys(wrong))}"
    limit = f"{'/'.join(map(str, bomb.statuses))} in {MAX_S:g} s, peak ≤ +{LIMIT_BYTES // MIB + 16} MiB"
    return Row(8, f"bomb: {bomb.name}", limit, told.strip(), is_met)


def what_is_wrong(reply: Reply | str, bomb: Bomb) -> str | None:
    if isinstance(reply, str):
        # A connection that was closed while we still sent is a refusal too, where the answer could not be read.
        return None if bomb.needs and reply == "closed" else reply
    # /v2 answers with status 400 instead of 422.
    return answer_rules.violation(reply, is_inference="/v2" in bomb.name) or (
        None if reply.status in bomb.statuses else f"status {reply.status}"
    )


async def throw(subject: Subject, wire: bytes, num: int = 1) -> tuple[list[Reply | str], float]:
    """One after another; the answers (or what came instead) and the slowest time from the last byte to the answer."""
    replies: list[Reply | str] = []
    slowest_s = 0.0
    for _ in range(num):
        connection = RawConnection(subject.port)
        sent = time.monotonic()
        try:
            await connection.send(b"")
            reading = asyncio.ensure_future(connection.read(PATIENCE_S))
            await asyncio.wait(
                [asyncio.ensure_future(connection.send(wire)), reading], return_when=asyncio.FIRST_COMPLETED
            )
            sent = time.monotonic()
            replies.append(await reading)
        except Silence:
            replies.append("silence")
        except (Cut, OSError):
            replies.append("closed")
        slowest_s = max(slowest_s, time.monotonic() - sent)
        connection.close()
    return replies, slowest_s
