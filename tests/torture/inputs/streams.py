"""Raw bytes for a socket: HTTP as a careless or hostile client writes it.

Invariants: everything is drawn from the given generator; lengths, codings, chunks and requests that the parser must refuse are
those of `tests/raw_inputs.py`, here behind other bytes, cut or changed once more.
"""

from __future__ import annotations

import random

from tests import raw_inputs
from tests.torture.answer_rules import MARK
from tests.torture.inputs import valid

LENGTHS = [
    *raw_inputs.LENGTHS.values(), b"0", b"9223372036854775808", b"1" + b"0" * 25, b"\xb2", b"5\r\nContent-Length: 6", b"16777217",
    MARK.encode(),
]  # fmt: skip
REQUEST_LINES = [
    b"GET / HTTP/1.0", b"GET / HTTP/2.0", b"GET http://other/v1/layers HTTP/1.1", b"CONNECT other:443 HTTP/1.1",
    b"TRACE / HTTP/1.1", b"FOO /v1/layers HTTP/1.1", b"GET /%00 HTTP/1.1", b"GET /" + b"a" * 70_000 + b" HTTP/1.1",
    b"", b"\0\0\0", b"GET /v1/layers?" + b"&" * 9000 + b" HTTP/1.1",
]  # fmt: skip
HEADER_LINES = [
    *(b"Transfer-Encoding: " + coding for coding in [b"chunked", *raw_inputs.CODINGS.values()]), b"Transfer-Encoding : chunked",
    b"Content-Length: 5\r\nTransfer-Encoding: chunked", b"Host: a", b"Host: a\r\nHost: b", b"Expect: 100-continue",
    b"Connection: close", b"Connection: keep-alive, close", b"Connection: upgrade\r\nUpgrade: h2c", b"Keep-Alive: timeout=99999",
    b"X: \0", b"X\0: 1", b" folded: 1", b"NoColon", b": empty", b"\xff\xfe: 1", b"X: 1\nY: 2", b"Content-Type: \xff",
    b"X: " + b"y" * 20_000, b"X-Big: " + b"z" * 70_000, b"X-Request-ID: a\rb", b"X-Request-ID: \xc3\xa9",
]  # fmt: skip
CHUNKS = [
    *raw_inputs.CHUNKS.values(), b"0\r\n\r\n", b"5\r\nhello\r\n0\r\n\r\n", b"5;x=y\r\nhello\r\n0\r\n\r\n",
    b"0\r\nTrailer: x\r\n\r\n", b"ffffffffffffffff\r\n", b"1" * 40 + b"\r\n", b"1\r\na\r\n" * 500 + b"0\r\n\r\n",
]  # fmt: skip
KNOWN = list(raw_inputs.BAD_REQUESTS.values())


def draw(rng: random.Random) -> bytes:
    """One connection's bytes."""
    wire = valid.draw(rng).wire()
    return rng.choice(_KINDS)(wire, rng)


def _cut(wire: bytes, rng: random.Random) -> bytes:
    return wire[: rng.randint(0, len(wire))]


def _flip(wire: bytes, rng: random.Random) -> bytes:
    bad = bytearray(wire)
    for _ in range(rng.randint(1, 6)):
        # In the head more often than not: that is where framing is decided.
        at = rng.randrange(min(len(bad), 200) if rng.random() < 0.7 else len(bad))
        bad[at] = rng.randrange(256)
    return bytes(bad)


def _length(wire: bytes, rng: random.Random) -> bytes:
    head, _, body = wire.partition(b"\r\n\r\n")
    lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"content-length")]
    return b"\r\n".join([*lines, b"Content-Length: " + rng.choice(LENGTHS)]) + b"\r\n\r\n" + body


def _request_line(wire: bytes, rng: random.Random) -> bytes:
    return rng.choice(REQUEST_LINES) + wire[wire.find(b"\r\n") :]


def _header_line(wire: bytes, rng: random.Random) -> bytes:
    first, _, rest = wire.partition(b"\r\n")
    return first + b"\r\n" + rng.choice(HEADER_LINES) + b"\r\n" + rest


def _many_headers(wire: bytes, rng: random.Random) -> bytes:
    first, _, rest = wire.partition(b"\r\n")
    return first + b"\r\n" + b"X-A: b\r\n" * rng.choice([10, 101, 1000, 10_000]) + rest


def _chunked(wire: bytes, rng: random.Random) -> bytes:
    head = wire.partition(b"\r\n\r\n")[0]
    lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"content-length")]
    return b"\r\n".join([*lines, b"Transfer-Encoding: chunked"]) + b"\r\n\r\n" + rng.choice(CHUNKS)


def _pipelined(wire: bytes, rng: random.Random) -> bytes:
    return wire * rng.randint(2, 20)


def _followed(wire: bytes, rng: random.Random) -> bytes:
    """A whole request and then something that is none."""
    return wire + rng.choice([rng.randbytes(40), b"\r\n\r\n\r\n", b"GET", _flip(wire, rng), _chunked(wire, rng)])


def _known(wire: bytes, rng: random.Random) -> bytes:
    """One of the requests that the parser's own tests refuse, behind a whole one or changed once more."""
    return rng.choice([wire, b""]) + rng.choice([_cut, _flip, _followed])(rng.choice(KNOWN), rng)


def _noise(_: bytes, rng: random.Random) -> bytes:
    return rng.randbytes(rng.randint(1, 3000))


def _endings(wire: bytes, rng: random.Random) -> bytes:
    head, _, body = wire.partition(b"\r\n\r\n")
    return head.replace(b"\r\n", rng.choice([b"\n", b"\r", b"\r\n\r", b"\n\r"]), rng.randint(1, 4)) + b"\r\n\r\n" + body


_KINDS = [
    _cut, _flip, _flip, _flip, _length, _request_line, _header_line, _header_line,
    _many_headers, _chunked, _chunked, _pipelined, _followed,
    _noise, _endings, _known, _known,
]  # fmt: skip
