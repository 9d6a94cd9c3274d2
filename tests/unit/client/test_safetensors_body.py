"""Safetensors body: any bytes are a body or raise ValueError, never an error of the library."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention_client.safetensors_body import read
from tests.unit.client.answering import FACTS, file_of

WHOLE = file_of({"output": torch.ones(2, 3), "weights": torch.ones(4, 2, 2)})


def readable(body: bytes) -> bool:
    try:
        tensors, metadata = read(body)
    except ValueError:
        return False
    assert isinstance(tensors, dict)
    assert isinstance(metadata, dict)
    return True


def with_header(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def test_tensors_and_metadata_are_read():
    tensors, metadata = read(WHOLE)
    assert tensors["output"].bits.shape == (2, 3)
    assert json.loads(metadata["response"]) == FACTS


@pytest.mark.parametrize("metadata", [b"", b', "__metadata__": null'])
def test_a_body_may_have_no_metadata(metadata):
    header = b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}%s}' % metadata
    assert read(with_header(header, b"\0" * 4))[1] == {}


@pytest.mark.parametrize("cut", range(0, len(WHOLE), 7))
def test_a_truncated_body_is_refused(cut):
    assert not readable(WHOLE[:cut])


@pytest.mark.parametrize("length", [0, 1, len(WHOLE), 2**24, 2**31, 2**62, 2**64 - 1])
def test_a_wrong_header_length_is_refused(length):
    assert not readable(length.to_bytes(8, "little") + WHOLE[8:])


@pytest.mark.parametrize(
    "header",
    [
        b"[]", b"null", b"7", b'"x"', b"{", b"\xff\xfe", b"{" * 5000, b'{"__metadata__": 1}',
        b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}',
        b'{"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        b'{"x": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}',
        b'{"x": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}',
        b'{"x": {"dtype": "F32", "shape": [4611686018427387904, 4], "data_offsets": [0, 4]}}',
        b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [1, 5]}}',
    ],
)  # fmt: skip
def test_a_wrong_header_is_refused(header):
    assert not readable(with_header(header, b"\0" * 4))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_body_or_a_value_error(body):
    readable(body)
    readable(with_header(body))


@given(st.integers(0, len(WHOLE) - 1), st.integers(0, 255))
def test_any_damaged_byte_gives_a_body_or_a_value_error(position, byte):
    readable(WHOLE[:position] + bytes([byte]) + WHOLE[position + 1 :])
