"""Body framing: where a body ends, however its bytes are split, and the cost of chunks."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import BadRequest
from service.http.request_parser import FREE_FRAMING_BYTES, Bytes, ChunkedBody, CountedBody
from tests.raw_inputs import CHUNKS


def chunks(*datas: bytes, extension: bytes = b"", trailer: bytes = b"") -> bytes:
    framed = [b"%X%b\r\n%b\r\n" % (len(data), extension, data) for data in datas]
    return b"".join(framed) + b"0\r\n" + trailer + b"\r\n"


def take_all(body: CountedBody | ChunkedBody, data: Bytes) -> tuple[bytes, Bytes]:
    """Call `take` until the body is complete or the data is used up."""
    taken = b""
    while True:
        piece, data = body.take(data)
        taken += piece
        if body.is_complete or not data:
            return taken, data


def take_cut(body: CountedBody | ChunkedBody, raw: bytes, step: int) -> None:
    for start in range(0, len(raw), step):
        take_all(body, raw[start : start + step])


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=20), st.lists(st.integers(0, 400)), st.binary(max_size=20))
def test_a_chunked_body_may_arrive_in_any_pieces_and_the_rest_belongs_to_the_next_request(datas, cuts, rest):
    raw = chunks(*datas, extension=b' ; a="b"', trailer=b"A: b\r\nC:\r\n") + rest
    edges = [0, *sorted(cut for cut in cuts if cut < len(raw)), len(raw)]
    body, taken, left = ChunkedBody(), b"", b""
    for start, end in itertools.pairwise(edges):
        if body.is_complete:
            left += raw[start:end]
        else:
            piece, over = take_all(body, raw[start:end])
            taken, left = taken + piece, left + over
    assert body.is_complete
    assert (taken, left) == (b"".join(datas), rest)


@given(st.integers(0, 50), st.lists(st.binary(max_size=20)))
def test_a_counted_body_ends_at_its_length(length, parts):
    body, taken, left = CountedBody(length), b"", b""
    for part in parts:
        piece, over = body.take(part)
        taken, left = taken + piece, left + over
    assert taken + left == b"".join(parts)
    assert len(taken) == min(length, len(taken + left))
    assert body.left == length - len(taken)
    assert body.is_complete == (not body.left)


@pytest.mark.parametrize("raw", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("step", [1, 2**20])
def test_a_malformed_chunked_body_is_refused_in_any_pieces(raw, step):
    with pytest.raises(BadRequest):
        take_cut(ChunkedBody(), raw, step)


def test_a_million_chunks_of_one_byte_are_refused_early():
    num_chunks = FREE_FRAMING_BYTES // 4
    with pytest.raises(BadRequest, match="larger chunks"):
        take_cut(ChunkedBody(), b"1\r\nx\r\n" * num_chunks, 6)


def test_any_number_of_chunks_of_ten_bytes_is_accepted():
    raw = chunks(*[b"0123456789"] * 20_000)
    body = ChunkedBody()
    assert len(take_all(body, raw)[0]) == 200_000
    assert body.is_complete


def test_one_loop_tick_reads_a_limited_number_of_chunks():
    body = ChunkedBody()
    piece, rest = body.take(chunks(*[b"0123456789"] * 2000))
    assert 0 < len(piece) < 10_000
    assert rest
    assert not body.is_complete


def test_the_length_of_a_chunked_body_is_unknown():
    assert ChunkedBody().left is None
