"""An answer's pieces on their way out."""

import asyncio
import gzip
import itertools
import os
import zlib
from collections.abc import Awaitable, Callable, Iterable

import pytest
import zstandard

from service.api.reply import (
    COMPRESSED_BLOCK,
    MIN_COMPRESSED,
    PAUSE_BYTES,
    WHOLE_BYTES,
    Piece,
    collected,
    send_reply,
)


def open_zstd(body: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompressobj().decompress(body)


OPENERS: dict[bytes, Callable[[bytes], bytes]] = {
    b"gzip": gzip.decompress,
    b"deflate": zlib.decompress,
    b"zstd": open_zstd,
}


def sent(
    pieces: Iterable[Piece], coding: bytes | None = None, min_bytes: int = MIN_COMPRESSED
) -> tuple[dict[bytes, bytes], list[bytes]]:
    """Headers and bodies of the messages; they must be a whole answer."""
    messages: list[dict] = []

    async def send(message) -> None:
        messages.append(message)

    asyncio.run(send_reply(send, [(b"x-own", b"1")], pieces, None if coding is None else (coding, min_bytes)))
    start, *bodies = messages
    assert start["status"] == 200
    assert [message.get("more_body", False) for message in bodies] == [True] * (len(bodies) - 1) + [False]
    return dict(start["headers"]), [bytes(message["body"]) for message in bodies]


@pytest.mark.parametrize("made", [list, iter], ids=["a sequence", "one by one"])
def test_a_small_answer_is_one_message_with_its_length(made):
    headers, bodies = sent(made([b"ab", memoryview(b"cd"), b""]))
    assert headers == {b"x-own": b"1", b"content-length": b"4"}
    assert bodies == [b"abcd"]


def test_a_large_sequence_has_its_length_and_is_sent_in_parts():
    pieces: list[Piece] = [b"head", memoryview(bytes(3 * WHOLE_BYTES))]
    headers, bodies = sent(pieces)
    assert int(headers[b"content-length"]) == 4 + 3 * WHOLE_BYTES == sum(map(len, bodies))
    assert max(map(len, bodies)) <= WHOLE_BYTES
    assert b"".join(bodies) == b"".join(pieces)


def test_a_large_generated_answer_is_never_whole_in_memory():
    alive = most = 0

    def pieces():
        nonlocal alive, most
        for _ in range(40):
            alive += 1
            most = max(most, alive)
            yield bytes(WHOLE_BYTES // 4)

    async def send(message) -> None:
        nonlocal alive
        alive = 0

    asyncio.run(send_reply(send, [], pieces()))
    assert most <= 5


def turns_of_others(pieces, coding=None) -> list[int]:
    """How many turns other tasks have had at each message of an answer, and at its end."""
    seen: list[int] = []

    async def answer(turns: Callable[[], int]) -> None:
        async def send(_) -> None:
            seen.append(turns())

        await send_reply(send, [], pieces, None if coding is None else (coding, MIN_COMPRESSED))
        seen.append(turns())

    beside_others(answer)
    return seen


def beside_others(act: Callable[[Callable[[], int]], Awaitable[None]]) -> None:
    """Run `act` beside another task; it gets the number of turns that this task has had."""
    latest = 0

    async def others() -> None:
        nonlocal latest
        while True:
            latest += 1
            await asyncio.sleep(0)

    async def main() -> None:
        beside = asyncio.ensure_future(others())
        await act(lambda: latest)
        beside.cancel()

    asyncio.run(main())


@pytest.mark.parametrize("made", [list, iter], ids=["a sequence", "one by one"])
def test_other_tasks_run_between_the_parts_of_a_large_answer(made):
    _, *parts, end, _ = turns_of_others(made([bytes(WHOLE_BYTES)] * 8))
    assert len(parts) >= 7
    assert all(before < after for before, after in itertools.pairwise(parts)), (parts, end)


def test_an_answer_made_piece_by_piece_pauses_by_its_bytes_and_not_by_its_pieces():
    """Under overload each pause takes a long loop tick."""
    few, many = ([bytes(PAUSE_BYTES), b"x", *[b"y"] * number, bytes(PAUSE_BYTES // 2)] for number in (0, 50))
    assert turns_of_others(iter(few))[-1] == turns_of_others(iter(many))[-1]


@pytest.mark.parametrize("coding", list(OPENERS), ids=lambda coding: coding.decode())
@pytest.mark.parametrize("piece", [bytes(2**16), os.urandom(2**16)], ids=["zeros", "random"])
def test_a_compressed_answer_pauses_by_the_bytes_that_go_in(piece, coding):
    """Zeros give no bytes for many slices."""
    assert turns_of_others([piece] * 64, coding)[-1] >= 64 * 2**16 // COMPRESSED_BLOCK - 1


def separated(num_pieces: int) -> list[Piece]:
    """Pieces with one-byte separators between them, as lists of numbers are made."""
    return [b"[", *[b"1" * (PAUSE_BYTES // 8), b","] * num_pieces, b"]"]


def test_an_answer_with_separators_is_sent_in_blocks():
    headers, bodies = sent(iter(separated(64)))
    assert b"content-length" not in headers
    assert b"".join(bodies) == b"".join(separated(64))
    *blocks, _, end = bodies
    assert end == b""
    assert all(PAUSE_BYTES <= len(block) < 2 * PAUSE_BYTES for block in blocks)
    assert turns_of_others(iter(separated(64)))[-1] <= 8 + 4


@pytest.mark.parametrize("coding", list(OPENERS), ids=lambda coding: coding.decode())
def test_separators_do_not_make_a_compressed_answer_pause_more_often(coding):
    pieces = separated(64)
    num_blocks = sum(map(len, pieces)) // COMPRESSED_BLOCK + 1
    assert turns_of_others(iter(pieces), coding)[-1] <= num_blocks + 4


def test_pieces_that_are_made_before_their_length_is_sent_pause_too():
    async def collect(turns: Callable[[], int]) -> None:
        pieces, num_bytes = await collected(iter([b"x" * PAUSE_BYTES] * 8))
        assert b"".join(pieces) == b"x" * num_bytes == b"x" * (8 * PAUSE_BYTES)
        assert turns() >= 4

    beside_others(collect)


@pytest.mark.parametrize("coding", list(OPENERS), ids=lambda coding: coding.decode())
@pytest.mark.parametrize("made", [list, iter], ids=["a sequence", "one by one"])
@pytest.mark.parametrize("size", [MIN_COMPRESSED, 5000, 2 * WHOLE_BYTES])
def test_a_compressed_answer_decompresses_to_the_same_bytes(made, coding, size):
    whole = bytes(range(256)) * (size // 256)
    headers, bodies = sent(made([whole[:100], memoryview(whole)[100:]]), coding)
    assert headers[b"content-encoding"] == coding
    assert headers.get(b"content-length", str(len(b"".join(bodies))).encode()) == str(len(b"".join(bodies))).encode()
    assert OPENERS[coding](b"".join(bodies)) == whole


@pytest.mark.parametrize("coding", list(OPENERS), ids=lambda coding: coding.decode())
@pytest.mark.parametrize("made", [list, iter], ids=["a sequence", "one by one"])
@pytest.mark.parametrize("size", [0, 1, 300])
def test_small_answers_are_compressed_for_a_client_that_takes_no_plain_answer(made, coding, size):
    headers, bodies = sent(made([b"x" * size, b"y"]), coding, 0)
    assert headers[b"content-encoding"] == coding
    assert OPENERS[coding](b"".join(bodies)) == b"x" * size + b"y"


@pytest.mark.parametrize("made", [list, iter], ids=["a sequence", "one by one"])
def test_small_answers_are_not_compressed(made):
    headers, bodies = sent(made([b"x" * (MIN_COMPRESSED - 2), b"y"]), b"gzip")
    assert b"content-encoding" not in headers
    assert b"".join(bodies) == b"x" * (MIN_COMPRESSED - 2) + b"y"
