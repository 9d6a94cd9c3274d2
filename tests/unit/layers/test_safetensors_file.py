"""Safetensors files: what is read, bit by bit, and forged, malformed or shrinking files."""

from __future__ import annotations

import os
import random as stdlib_random
from collections.abc import Mapping
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch

from service.errors import LayerError
from service.layers.safetensors_file import BITS, FILE_DTYPES, Header, open_regular, read_header, read_tensor
from tests.unit.layers.checkpoints import entry, random, raw_file


def header_of(path: Path, content: bytes, **options) -> Header:
    path.write_bytes(content)
    with open_regular(path) as file:
        return read_header(file, **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_files_of_the_library_are_read_bit_by_bit(tmp_path, dtype):
    """Same names, shapes and bits as the safetensors library gives, in every dtype a layer may have."""
    tensors = {"a": random(3, 5, dtype=dtype), "b": random(7, dtype=dtype), "c": random(1, 1, 2, dtype=dtype)}
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors.torch.save(tensors, metadata={"k": "v"}))
    with open_regular(path) as file:
        header = read_header(file)
        read = {name: read_tensor(file, name, found) for name, found in header.tensors.items()}
    assert header.metadata == {"k": "v"}
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) and read[name].dtype == dtype for name in tensors)


def test_a_data_section_at_an_odd_offset_reads_the_same(tmp_path):
    """The format does not promise alignment; the tensor's own memory is aligned anyway."""
    value = random(4, 4)
    path = tmp_path / "odd.safetensors"
    text = b'{"a":{"dtype":"F32","shape":[4,4],"data_offsets":[0,64]}}'
    path.write_bytes(raw_file(text + b" " * (1 - len(text) % 2), value.numpy().tobytes()))
    assert (8 + len(text) + 1 - len(text) % 2) % 2 == 1
    with open_regular(path) as file:
        tensor = read_tensor(file, "a", read_header(file).tensors["a"])
    assert torch.equal(tensor, value)
    assert tensor.data_ptr() % 64 == 0


GOOD = {"a": entry("F32", [2, 2], 0, 16), "b": entry("F32", [1], 16, 20)}
FORGED: dict[str, tuple[Mapping[str, object], int, str]] = {
    "hole before b": ({**GOOD, "b": entry("F32", [1], 20, 24)}, 24, "hole or an overlap"),
    "hole at the start": ({"a": entry("F32", [1], 4, 8)}, 8, "hole or an overlap"),
    "overlap": ({**GOOD, "b": entry("F32", [1], 12, 16)}, 16, "hole or an overlap"),
    "same bytes twice": ({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 0, 4)}, 4, "hole or an overlap"),
    "trailing bytes": (GOOD, 21, "end at byte"),
    "too few bytes": (GOOD, 19, "end at byte"),
    "no tensor but bytes": ({}, 1, "end at byte"),
    "size does not fit the shape": ({"a": entry("F32", [2, 3], 0, 16)}, 16, "spans 16 bytes"),
    "backwards": ({"a": entry("F32", [1], 4, 0)}, 4, "spans -4 bytes"),
    "shape overflows 64 bits to 0": ({"a": entry("F32", [2**32, 2**32], 0, 0)}, 0, "spans 0 bytes"),
    "F5: 2, 2^63-1": ({"a": entry("F32", [2, 2**63 - 1], 0, 16)}, 16, "spans 16 bytes"),
    "F5: 2, 2^64-2": ({"a": entry("F32", [2, 2**64 - 2], 0, 16)}, 16, "spans 16 bytes"),
    "negative dimension": ({"a": entry("F32", [-2, -2], 0, 16)}, 16, "not lists of counts"),
    "fraction": ({"a": {"dtype": "F32", "shape": [2.0, 2], "data_offsets": [0, 16]}}, 16, "not lists of counts"),
    "true is no count": ({"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, 4, "not lists of counts"),
    "three offsets": ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 4]}}, 4, "not lists of counts"),
    "shape is text": ({"a": {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]}}, 4, "not lists of counts"),
    "unknown dtype": ({"a": entry("F33", [1], 0, 4)}, 4, "unknown to safetensors"),
    "dtype is a list": ({"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}, 4, "unknown to safetensors"),
    "no dtype": ({"a": {"shape": [1], "data_offsets": [0, 4]}}, 4, "must have dtype"),
    "surplus field": ({"a": {**entry("F32", [1], 0, 4), "x": 1}}, 4, "nothing else"),
    "entry is a list": ({"a": []}, 0, "must have dtype"),
    "metadata is a list": ({"__metadata__": []}, 0, "__metadata__"),
    "metadata holds numbers": ({"__metadata__": {"a": 1}}, 0, "__metadata__"),
}


@pytest.mark.parametrize("case", FORGED)
def test_a_forged_header_is_refused(tmp_path, case):
    header, size, why = FORGED[case]
    with pytest.raises(LayerError, match=why) as caught:
        header_of(tmp_path / "x", raw_file(header, bytes(size)))
    assert len(caught.value.message) <= 500


@pytest.mark.parametrize("size", range(8))
def test_f1_a_file_shorter_than_a_length_is_refused(tmp_path, size):
    with pytest.raises(LayerError, match=f"has {size} bytes"):
        header_of(tmp_path / "x", bytes(size))


@pytest.mark.parametrize("length", [0, 3, 21, 10**6, 2**31, 2**32 - 1000, 10**8 + 1, 2**63, 2**64 - 1])
def test_f1_a_wrong_header_length_is_refused(tmp_path, length):
    """Before anything of that size is allocated."""
    with pytest.raises(LayerError, match=r"header"):
        header_of(tmp_path / "x", raw_file(b'{"a":{}}    ', b"", length))


def test_the_header_limit_is_the_callers(tmp_path):
    content = raw_file(b"{}" + b" " * 998)
    assert header_of(tmp_path / "x", content, max_bytes=1000).tensors == {}
    with pytest.raises(LayerError, match="limit is 999"):
        header_of(tmp_path / "x", content, max_bytes=999)


@pytest.mark.parametrize(
    "header",
    [
        b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
        b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
        b'{"\xff":1}',
        b" {}",
        b"[]",
        b"{}x",
        b"",
    ],
    ids=["key twice", "depth", "utf-8", "space first", "list", "junk after", "empty"],
)
def test_f15_a_malformed_header_is_refused(tmp_path, header):
    with pytest.raises(LayerError, match="header"):
        header_of(tmp_path / "x", raw_file(header))


def test_integers_are_refused_when_read(tmp_path):
    """A file may also contain them, but a layer may not have them."""
    path = tmp_path / "x"
    found = header_of(path, raw_file({"whole": entry("I64", [1], 0, 8)}, bytes(8)))
    with open_regular(path) as file, pytest.raises(LayerError, match="whole"):
        read_tensor(file, "whole", found.tensors["whole"])


def test_a_file_that_shrinks_after_its_header_was_read_is_refused(tmp_path):
    """Not a SIGBUS, not a tensor of zeros."""
    path = tmp_path / "x"
    found = header_of(path, raw_file(GOOD, bytes(20)))
    os.truncate(path, 30)
    with open_regular(path) as file, pytest.raises(LayerError, match="ended while"):
        read_tensor(file, "a", found.tensors["a"])


def test_only_regular_files_are_opened(tmp_path):
    """A pipe would wait for ever, a device would never end."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "loop")
    (tmp_path / "loop").symlink_to(tmp_path / "link")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(LayerError, match="not a regular file"):
            open_regular(path)
    for path in ("a\0b", tmp_path / "loop", tmp_path / ("x" * 5000)):
        with pytest.raises(LayerError, match="cannot be opened"):
            open_regular(path)
    with pytest.raises(LayerError, match="does not exist"):
        open_regular(tmp_path / "nothing")


def test_links_are_followed_only_if_allowed(tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    open_regular(tmp_path / "link").close()
    with pytest.raises(LayerError, match="cannot be opened"):
        open_regular(tmp_path / "link", follow_links=False)


def test_every_dtype_of_a_layer_has_its_true_size():
    assert {name: BITS[name] for name in FILE_DTYPES} == {
        name: 8 * dtype.itemsize for name, dtype in FILE_DTYPES.items()
    }


def test_every_file_that_the_library_refuses_is_refused(tmp_path):
    """3,000 mutated headers: ours may be stricter than the safetensors library, never laxer, and raises only LayerError."""
    generator = stdlib_random.Random(5)
    tensors = {"a": random(2, 3), "bb": random(4), "c": random(2, 2, dtype=torch.bfloat16)}
    good = safetensors.torch.save(tensors, metadata={"k": "v"})
    header_end = 8 + int.from_bytes(good[:8], "little")
    path, refused = tmp_path / "x", 0
    for _ in range(3000):
        mutated = bytearray(good)
        for _ in range(generator.choice([1, 1, 1, 2, 3])):
            mutated[generator.randrange(header_end)] = generator.choice(b'0123456789{}[]":, aF\\\xff\x00')
        try:
            header_of(path, bytes(mutated))
        except LayerError:
            refused += 1
        else:
            safetensors.deserialize(bytes(mutated))  # raises if the library refuses what we took
    assert 2000 < refused < 3000
