"""Bodies within limits: what is announced, what arrives, what it decompresses to."""

import asyncio
import gzip
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import zstandard

from service.api.request_body import Part, announced_body, decompressed, read_body
from service.api.request_context import ByteBudget, Reservation
from service.errors import (
    BadEncoding,
    BodyTooLarge,
    ClientTimeout,
    DecompressedTooLarge,
    QueueFull,
    UnsupportedContentEncoding,
)
from service.http.asgi import ClientGone
from service.http.receive_cycle import ReceiveCycle
from service.http.request_parser import HeaderFields

MAX_BYTES = 1000
SKIPPABLE = (0x184D2A53).to_bytes(4, "little") + (5).to_bytes(4, "little") + b"ready"


class Parts:
    """A caller that sends these parts, then hangs or leaves."""

    def __init__(self, *parts: bytes, then: str = "end") -> None:
        self.messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
        if then == "end":
            (self.messages or [{}])[-1]["more_body"] = False
        elif then == "leave":
            self.messages.append({"type": "http.disconnect"})
        self.taken = 0

    async def __call__(self):
        if not self.messages:
            await asyncio.get_running_loop().create_future()
        self.taken += 1
        return self.messages.pop(0)


PACKERS: dict[bytes, Callable[[bytes], bytes]] = {
    b"gzip": gzip.compress,
    b"zstd": zstandard.compress,
    b"deflate": zlib.compress,
}
packed = pytest.mark.parametrize("name", list(PACKERS), ids=lambda name: name.decode())


async def in_a_thread(work):
    return await asyncio.to_thread(work)


def read(
    receive,
    *headers: tuple[bytes, bytes],
    max_bytes: int = MAX_BYTES,
    timeout_s: float = 5,
    codings: tuple[bytes, ...] = tuple(PACKERS),
) -> bytes:
    coding, _ = announced_body(HeaderFields(headers), codings, max_bytes)
    cycle: Any = ReceiveCycle(receive)

    async def main() -> list[Part]:
        parts = await read_body(cycle, max_bytes, timeout_s, lambda _: None)
        return parts if coding is None else await decompressed(parts, coding, max_bytes, lambda _: None, in_a_thread)

    return b"".join(asyncio.run(main()))


def test_parts_are_joined():
    assert read(Parts(b"ab", b"", b"cd")) == b"abcd"


def test_a_body_of_exactly_the_limit_passes_and_one_byte_more_does_not():
    """H17."""
    assert len(read(Parts(b"x" * 600, b"x" * 400))) == 1000
    with pytest.raises(BodyTooLarge, match="1,000"):
        read(Parts(b"x" * 600, b"x" * 401))


@pytest.mark.parametrize("announced", [b"1001", b"9" * 19, b"%d" % 2**63])
def test_a_length_announced_too_large_is_refused_before_a_byte_is_read(announced):
    """H3."""
    parts = Parts(b"x")
    with pytest.raises(BodyTooLarge):
        read(parts, (b"content-length", announced))
    assert parts.taken == 0


def test_leading_zeros_of_a_length_are_ignored():
    assert read(Parts(b"x"), (b"content-length", b"0" * 18 + b"1")) == b"x"
    with pytest.raises(BodyTooLarge, match="1,001 bytes"):
        read(Parts(b"x"), (b"content-length", b"0" * 15 + b"1001"))


def test_a_body_that_never_ends_is_a_client_timeout():
    with pytest.raises(ClientTimeout):
        read(Parts(b"x", then="hang"), timeout_s=0.01)


def test_a_disconnect_during_the_body_ends_the_request():
    with pytest.raises(ClientGone):
        read(Parts(b"x", then="leave"))


class Arriving(Parts):
    """A body whose first bytes are here; it reports them to a callback, as our own transport does."""

    def __init__(self) -> None:
        super().__init__(then="hang")
        self.callback: Callable[[int], object] | None = None

    async def receive(self):
        return await self()

    def take_body(self) -> None:
        return None

    def on_bytes(self, callback: Callable[[int], object] | None) -> None:
        self.callback = callback
        if callback is not None:
            callback(600)

    def on_disconnect(self, callback: Callable[[], object] | None) -> None:
        pass


def test_the_bytes_of_a_refused_body_are_not_counted():
    """What still arrives would be added to a reservation that was released."""
    byte_budget = ByteBudget(1000, "bodies")
    cycle: Any = Arriving()
    with pytest.raises(QueueFull):
        asyncio.run(read_body(cycle, MAX_BYTES, 5, Reservation(byte_budget).grow))
    assert cycle.callback is None
    assert byte_budget.num_bytes == 0


@packed
def test_compressed_bodies_are_decompressed_up_to_the_limit(name):
    assert read(Parts(PACKERS[name](b"y" * 1000)), (b"content-encoding", name)) == b"y" * 1000
    with pytest.raises(DecompressedTooLarge):
        read(Parts(PACKERS[name](b"y" * 1001)), (b"content-encoding", name))


@packed
def test_a_bomb_is_refused_at_the_limit(name):
    bomb = PACKERS[name](b"\0" * 50_000_000)
    with pytest.raises(DecompressedTooLarge):
        read(Parts(bomb), (b"content-encoding", name), max_bytes=2**20)


@packed
@pytest.mark.parametrize(
    "damage", [lambda b: b[:-3], lambda b: b + b"tail", lambda b: b"", lambda b: b[: len(b) // 2] + b"\0" * 9]
)
def test_a_damaged_compressed_body_is_bad_encoding(name, damage):
    """H16."""
    body = damage(PACKERS[name](bytes(range(200))))
    with pytest.raises(BadEncoding):
        read(Parts(body), (b"content-encoding", name))


def test_a_compressed_body_of_several_parts_is_held_once():
    """Its bytes are reserved once."""
    whole, held = zlib.compress(b"y" * 1000), []
    parts: list[Part] = [whole[:5], whole[5:]]

    async def main() -> list[Part]:
        return await decompressed(parts, b"deflate", MAX_BYTES, lambda _: held.append(len(parts)), in_a_thread)

    assert b"".join(asyncio.run(main())) == b"y" * 1000
    assert held == [0]


@pytest.mark.parametrize("before", [b"", zstandard.compress(b"ab"), SKIPPABLE], ids=["first", "second", "skippable"])
def test_the_error_for_a_zstd_frame_with_a_large_window_names_the_limit(before):
    """`zstd --long` writes such frames; they are valid."""
    options = zstandard.ZstdCompressionParameters(window_log=24, write_content_size=False)
    writer = zstandard.ZstdCompressor(compression_params=options).compressobj()
    body = before + writer.compress(b"y" * 1000) + writer.flush()
    with pytest.raises(BadEncoding, match="window of a zstd frame has 16,777,216 bytes, expected at most 8,388,608"):
        read(Parts(body), (b"content-encoding", b"zstd"))


def test_a_wrong_checksum_is_bad_encoding():
    body = bytearray(gzip.compress(b"hello"))
    body[-6] ^= 1
    with pytest.raises(BadEncoding):
        read(Parts(bytes(body)), (b"content-encoding", b"gzip"))


def test_gzip_members_follow_each_other():
    assert read(Parts(gzip.compress(b"ab") + gzip.compress(b"cd")), (b"content-encoding", b"gzip")) == b"abcd"


@pytest.mark.parametrize(
    "body",
    [
        zstandard.compress(b"ab") + zstandard.compress(b"cd"),
        SKIPPABLE + zstandard.compress(b"abcd"),
        zstandard.compress(b"abc") + SKIPPABLE * 2 + zstandard.compress(b"d") + SKIPPABLE,
    ],
)
def test_zstd_frames_follow_each_other_and_skippable_ones_are_skipped(body):
    assert read(Parts(body), (b"content-encoding", b"zstd")) == b"abcd"


@pytest.mark.parametrize(
    "body", [SKIPPABLE, SKIPPABLE[:-1], SKIPPABLE * 1025, zstandard.compress(b"ab") + SKIPPABLE[:-2]]
)
def test_skippable_frames_alone_cut_or_without_end_are_bad_encoding(body):
    with pytest.raises(BadEncoding):
        read(Parts(body), (b"content-encoding", b"zstd"), max_bytes=2**20)


def test_a_body_of_very_many_members_is_refused_early():
    with pytest.raises(BadEncoding, match="1024 members"):
        read(Parts(gzip.compress(b"") * 30_000), (b"content-encoding", b"gzip"), max_bytes=2**20)


def test_nothing_may_follow_the_one_member_of_deflate():
    with pytest.raises(BadEncoding, match="at most 1 member and nothing after"):
        read(Parts(zlib.compress(b"x") + b"y"), (b"content-encoding", b"deflate"))


def test_an_empty_compressed_body_is_bad_encoding():
    with pytest.raises(BadEncoding):
        read(Parts(gzip.compress(b"")), (b"content-encoding", b"gzip"))


@pytest.mark.parametrize("size", [1, 65_535, 65_536, 65_537, 300_000])
def test_members_of_any_size_are_joined(size):
    parts = [bytes([i]) * size for i in range(3)]
    packed = b"".join(gzip.compress(part, compresslevel=0) for part in parts)
    assert read(Parts(packed), (b"content-encoding", b"gzip"), max_bytes=2**20) == b"".join(parts)


@pytest.mark.parametrize("name", [b"br", b"compress", b"zzz", b"gzip, gzip", b"deflate"])
def test_other_content_encodings_are_unsupported(name):
    """H14."""
    with pytest.raises(UnsupportedContentEncoding):
        read(Parts(zlib.compress(b"x")), (b"content-encoding", name), codings=(b"gzip", b"zstd"))


def test_deflate_without_its_zlib_frame_is_bad_encoding():
    bare = zlib.compressobj(wbits=-15)
    with pytest.raises(BadEncoding):
        read(Parts(bare.compress(b"x") + bare.flush()), (b"content-encoding", b"deflate"))


def test_identity_is_no_encoding():
    assert read(Parts(b"x"), (b"content-encoding", b"identity")) == b"x"
