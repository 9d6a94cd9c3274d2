"""Safetensors headers: what the safetensors library writes is read, what it refuses is refused; and JSON objects, strictly."""

import contextlib
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from service.errors import BadBinary, LayerError
from service.layers.safetensors_file import LENGTH_BYTES, Header, HeaderReader, parse_object

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
    for name, entry in header.tensors.items():
        assert entry.shape == tensors[name].shape
        assert body[entry.begin : entry.end] == tensors[name].tobytes()


def test_metadata_that_is_null_is_no_metadata():
    """The library reads such a file, and some writers make one."""
    body = FILE.replace(b'"__metadata__":{"k":"v"}', b'"__metadata__":null     ')
    assert len(deserialize(body)) == 2
    assert read(body).metadata == {}


def is_read(body: bytes) -> bool:
    try:
        read(body)
    except BadBinary:
        return False
    return True


def test_every_damaged_file_that_the_library_refuses_is_refused():
    """Every cut and every flipped bit; if both read a file, they read the same bytes of it."""
    for body in damaged(FILE):
        try:
            theirs = dict(deserialize(body))
        except SafetensorError:
            assert not is_read(body)
            continue
        if is_read(body):
            found = {name: body[entry.begin : entry.end] for name, entry in read(body).tensors.items()}
            assert found == {name: bytes(tensor["data"]) for name, tensor in theirs.items()}


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


def test_a_valid_object_is_parsed_as_in_json():
    assert parse_object(b' {"a": [1, 2.5, "\xc3\xa9", null, true]} ', "it", LayerError) == {
        "a": [1, 2.5, "é", None, True]
    }


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b'{"a": 1, "a": 2}', "duplicate key"),
        (b'{"b": {"a": 1, "\\u0061": 2}}', "duplicate key"),
        (b'{"a": NaN}', "not finite"),
        (b'{"a": -Infinity}', "not finite"),
        (b'{"a": 1e999}', "not finite"),
        (b'{"a": "\\ud800", "b": 1e-999, "c": -1e999}', "not finite"),
        (b'{"a": 18446744073709551616}', "integer that is too large"),
        (b'{"a": ' + b"9" * 5000 + b"}", "integer that is too large"),
        (b'{"a": ' * 100_000, "too deeply"),
        (b"[" * 100_000 + b"]" * 100_000, "too deeply"),
        (b"[1]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b"", "not valid JSON"),
        (b'{"a": 1} x', "not valid JSON"),
        (b'{"a": 1,}', "not valid JSON"),
        (b"{'a': 1}", "not valid JSON"),
        (b'{"a": "\xff"}', "not valid JSON"),
        (b'\xef\xbb\xbf{"a": 1}', "not valid JSON"),
        ('{"a": 1}'.encode("utf-16"), "not valid JSON"),
        (b'{"a": "\x01"}', "not valid JSON"),
    ],
    ids=range(20),
)
def test_ambiguous_json_is_refused(raw, why):
    """One LayerError that says what was parsed and repeats nothing of it."""
    with pytest.raises(LayerError, match=why) as caught:
        parse_object(raw, "the header", LayerError)
    assert caught.value.message.startswith("the header ")
    assert len(caught.value.message) < 100


@pytest.mark.parametrize("opening", ['{"a":', "[", '[{"a":'])
@pytest.mark.parametrize("depth", [1, 2, 127, 128, 253, 254, 255, 256, 300, 500, 700, 1000, 1024, 1025, 2000, 5000])
def test_any_depth_is_an_object_or_one_clean_refusal(opening, depth):
    closing = opening.translate(str.maketrans("[{", "]}", '"a:'))[::-1]
    text = b'{"a":' + (opening * depth + "1" + closing * depth).encode() + b"}"
    if depth <= 100:
        assert parse_object(text, "the header", LayerError) == json.loads(text)
    with contextlib.suppress(LayerError):
        assert parse_object(text, "the header", LayerError) == json.loads(text)
