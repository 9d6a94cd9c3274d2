"""Headers: what the library of the format writes is read, and what it would not is refused, for any reader."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from service.errors import BadBinary
from service.layers.safetensors_header import LENGTH_BYTES, Header, HeaderReader

READER = HeaderReader("the body", BadBinary, 10_000, repr)
FILE = save({"a": np.zeros((2, 3), np.float32), "b": np.ones(5, np.uint8)}, {"k": "v"})


def read(body: bytes) -> Header:
    length = READER.length(body, len(body))
    return READER.read(body[LENGTH_BYTES : LENGTH_BYTES + length], len(body))


@given(st.lists(st.lists(st.integers(0, 4), max_size=3), max_size=4), st.booleans())
def test_every_file_of_the_library_is_read_unchanged(shapes, has_metadata):
    tensors = {
        f"t{i}": np.arange(np.prod(shape, dtype=int), dtype=np.int64).reshape(shape) for i, shape in enumerate(shapes)
    }
    body = save(tensors, {"a": "b"} if has_metadata else None)
    header = read(body)
    assert header.metadata == ({"a": "b"} if has_metadata else {})
    assert set(header.tensors) == set(tensors)
    for name, told in header.tensors.items():
        assert told.shape == tensors[name].shape
        assert body[told.begin : told.end] == tensors[name].tobytes()


def is_read(body: bytes) -> bool:
    try:
        read(body)
    except BadBinary:
        return False
    return True


def test_every_damaged_file_that_the_library_refuses_is_refused():
    """Every cut and every flipped bit; where both read it, they read the same places."""
    for body in damaged(FILE):
        try:
            theirs = dict(deserialize(body))
        except SafetensorError:
            assert not is_read(body)
            continue
        if is_read(body):
            found = {name: body[told.begin : told.end] for name, told in read(body).tensors.items()}
            assert found == {name: bytes(told["data"]) for name, told in theirs.items()}


def damaged(body: bytes):
    yield from (body[:end] for end in range(len(body)))
    for at in range(len(body) * 8):
        flipped = bytearray(body)
        flipped[at // 8] ^= 1 << at % 8
        yield bytes(flipped)


def test_a_duplicate_key_is_refused_unlike_in_the_library():
    text = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    assert not is_read(len(text).to_bytes(8, "little") + text + b"x")


@pytest.mark.parametrize("rank", [256, 257, 3000])
def test_the_product_of_thousands_of_sizes_is_never_computed(rank):
    entry = {"dtype": "U8", "shape": [1] * rank, "data_offsets": [0, 1]}
    text = json.dumps({"a": entry}).encode()
    assert is_read(len(text).to_bytes(8, "little") + text + b"x") == (rank <= 256)
