"""Arrays: conversion to bytes and back keeps every bit, the dtype and the kind; any bytes are a body or raise ValueError."""

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from attention_client.arrays import FLOATS, VALUES, made_like, raw, read, write
from attention_client.errors import BadDtype, InvalidInput
from tests.unit.client.answering import FACTS, file_of

TORCH = {name: getattr(torch, name) for name in VALUES}
NUMPY = {name: np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name) for name in VALUES}


@st.composite
def arrays(draw):
    """Draw arrays of any bits and any dtype of the contract, NumPy or torch, contiguous, transposed or reversed."""
    dtype = draw(st.sampled_from(sorted(VALUES)))
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=0, max_size=4)))
    data = np.random.default_rng(draw(st.integers(0, 2**32))).bytes(int(np.prod(shape, dtype=int)) * 8)
    count = int(np.prod(shape, dtype=int))
    array = np.frombuffer(data, dtype=NUMPY[dtype] if dtype != "bool" else np.uint8)[:count].reshape(shape)
    array = np.asarray((array % 2).astype(bool)) if dtype == "bool" else array
    array = array[..., ::-1] if shape and draw(st.booleans()) else array
    array = array.T if draw(st.booleans()) else array
    if draw(st.booleans()):
        return array
    plain = np.ascontiguousarray(array).reshape(array.shape)
    tensor = torch.frombuffer(bytearray(plain.tobytes()), dtype=TORCH[dtype]).reshape(plain.shape)
    return tensor.T.contiguous().T if tensor.ndim == 2 and draw(st.booleans()) else tensor


def bits(array) -> Any:
    if isinstance(array, torch.Tensor):
        return array.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return array.tobytes()


@given(arrays())
def test_every_bit_of_every_dtype_survives_the_way_there_and_back(array):
    tensors, metadata = read(write({"x": raw(array, "/x", VALUES)}, {"request": "{}"}))
    back = made_like(array, tensors["x"])
    assert type(back) is type(array)
    assert (back.dtype, tuple(back.shape)) == (array.dtype, tuple(array.shape))
    assert bits(back) == bits(array)
    assert metadata == {"request": "{}"}


def test_a_returned_array_is_writable():
    likes: list[Any] = [np.zeros(3, np.float32), torch.zeros(3)]
    for like in likes:
        back = made_like(like, read(write({"x": raw(like, "/x", FLOATS)}, {}))[0]["x"])
        back[0] = 1
        assert float(back.sum()) == 1


def test_a_contiguous_array_is_read_without_a_copy():
    array, tensor = np.zeros((3, 4), np.float16), torch.zeros(3, 4, dtype=torch.bfloat16)
    assert raw(array, "/x", FLOATS).bits.ctypes.data == array.ctypes.data
    assert raw(tensor, "/x", FLOATS).bits.ctypes.data == tensor.data_ptr()


def test_a_big_endian_array_is_sent_little_endian():
    found = raw(np.array([1.5, -2.0], ">f4"), "/x", FLOATS)
    assert found.bits.tobytes() == np.array([1.5, -2.0], "<f4").tobytes()
    assert found.dtype == "float32"


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "uint32"])
def test_small_integers_are_widened_where_integers_are_allowed(dtype):
    for array in (np.array([0, 1], dtype), torch.tensor([0, 1], dtype=getattr(torch, dtype))):
        assert raw(array, "/x", VALUES).dtype == "int64"
        with pytest.raises(BadDtype, match=rf"query must be .*, got {dtype}"):
            raw(array, "/query", FLOATS)


@pytest.mark.parametrize(
    "array",
    [np.zeros(2, complex), np.array(["a"]), np.array([None]), torch.zeros(2, dtype=torch.complex64),
     torch.zeros(2, dtype=torch.float8_e4m3fn)],
)  # fmt: skip
def test_a_dtype_that_the_contract_lacks_is_refused(array):
    with pytest.raises(BadDtype) as raised:
        raw(array, "/query", VALUES)
    assert raised.value.param == "/query"
    assert str(raised.value).endswith(f", got {getattr(array.dtype, 'name', str(array.dtype).removeprefix('torch.'))}")


@pytest.mark.parametrize(
    "thing",
    [[[1.0]], None, 3, "x", np.ma.masked_array([1.0, 2.0], [True, False]), torch.zeros(2, 2).to_sparse(),
     torch.zeros(2, device="meta")],
)  # fmt: skip
def test_an_array_without_plain_bytes_is_refused(thing):
    with pytest.raises(InvalidInput):
        raw(thing, "/query", FLOATS)


class Wrapped(torch.Tensor):
    """Wraps another tensor, as distributed and quantised ones do, and has no memory of its own."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner) -> None:
        self.held = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):  # type: ignore[override]
        found = function(*(arg.held if isinstance(arg, Wrapped) else arg for arg in args), **(kwargs or {}))
        return Wrapped(found) if isinstance(found, torch.Tensor) else found


class OtherArray(np.ndarray):
    """Misreports its shape, dtype and size."""

    shape = property(lambda self: (1000, 1000))
    dtype = property(lambda self: np.dtype(float))
    nbytes = property(lambda self: 8_000_000)


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(3, 4)


def shrunk(num_bytes: int, tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(num_bytes)
    return tensor


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "make",
    [fake, lambda: Wrapped(torch.ones(3, 4)), lambda: shrunk(0, torch.ones(3, 4)),
     lambda: shrunk(8, torch.ones(3, 4)), lambda: shrunk(8, torch.ones(3, 4).T),
     lambda: torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)]), lambda: torch.ones(3, 4).to_mkldnn()],
    ids=["fake", "wrapped", "freed", "shrunk", "shrunk and turned", "nested", "mkldnn"],
)  # fmt: skip
def test_a_tensor_without_memory_of_its_own_is_never_read(make):
    with pytest.raises(InvalidInput, match="query must be a dense tensor with values in memory"):
        raw(make(), "/query", FLOATS)


def test_a_tensor_within_a_transform_or_a_mode_is_refused():
    def within(tensor):
        with pytest.raises(InvalidInput, match="in memory"):
            raw(tensor, "/query", FLOATS)
        return tensor

    torch.vmap(within)(torch.ones(2, 3))
    with FakeTensorMode():
        within(ONES)


ONES = torch.ones(3, 4)


def test_the_methods_of_a_subclass_are_not_called():
    found = raw(np.ones((3, 4), np.float32).view(OtherArray), "/x", FLOATS)
    assert (found.dtype, found.bits.shape, found.bits.nbytes) == ("float32", (3, 4), 48)
    assert read(write({"x": found}, {}))[0]["x"].bits.tobytes() == np.ones((3, 4), np.float32).tobytes()


def test_a_tensor_with_gradients_is_sent_without_them():
    weight = torch.ones(2, 3, requires_grad=True)
    assert raw(weight, "/x", FLOATS).bits.shape == (2, 3)


def test_an_array_without_elements_is_written():
    for empty in (np.zeros((0, 4), np.float32), torch.zeros(0, 4)):
        assert read(write({"x": raw(empty, "/x", FLOATS)}, {}))[0]["x"].bits.shape == (0, 4)


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
