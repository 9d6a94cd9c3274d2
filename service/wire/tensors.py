"""Tensor decoding: converts the tensors of a request body to torch tensors.

A tensor is nested lists of numbers, an object with dtype, shape and data (a flat list, or base64 of little-endian C-order
bytes), or bytes of a binary body. This module does not know which fields exist or which sizes they need. Invariants: Sizes are
Python integers and are checked before memory is allocated. Only ServiceErrors are raised, whatever the value is. Large tensors
are decoded in short steps.
"""

from __future__ import annotations

import binascii
import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pybase64
import torch

from service.errors import BadDtype, BadEncoding, BadShape, CostLimit, InvalidInput, UnknownField
from service.wire.number_list import NumberList, nested_numbers
from service.wire.tensor_fields import (
    FLOATS,
    FLOATS_ARE_A_BIAS,
    WHOLES,
    TensorField,
    TensorKind,
    bytes_to_tensor,
    numbers_to_tensor,
)

__all__ = [
    "DecodedTensor",
    "RawTensor",
    "TensorForm",
    "TensorKind",
    "bytes_of",
    "check_fields",
    "decode_tensor",
    "rank_of",
]

MAX_RANK = 4
MAX_VALUES = 2**30  # more than a body of the largest configurable size can hold
_MEMBERS = ("dtype", "shape", "data")
_QUAD = 4  # characters of base64 that stand for three bytes
_FLOATS = {dtype.name: dtype.torch for dtype in FLOATS}
_WHOLES = {dtype.name: dtype.torch for dtype in WHOLES}
_DTYPES: dict[TensorKind, dict[str, torch.dtype]] = {
    TensorKind.FLOAT: _FLOATS,
    TensorKind.BIAS: _FLOATS,
    TensorKind.BOOL: {"bool": torch.bool, **_WHOLES},
    TensorKind.INT: _WHOLES,
}
_LIST_DTYPES = {
    TensorKind.FLOAT: torch.float32,
    TensorKind.BIAS: torch.float32,
    TensorKind.BOOL: torch.bool,
    TensorKind.INT: torch.int64,
}


class TensorForm(enum.Enum):
    """How a request writes a tensor; the answer follows the form of the query."""

    NESTED = "nested lists"
    LIST = "an object with a flat list"
    BASE64 = "an object with base64"
    BINARY = "bytes of a binary body"


class RawTensor(NamedTuple):
    """A tensor of a binary body: its dtype by the contract's name, and its writable little-endian C-order bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


class DecodedTensor(NamedTuple):
    tensor: torch.Tensor
    form: TensorForm


def decode_tensor(value: object, *, param: str, kind: TensorKind) -> DecodedTensor:
    """Return the tensor of `value`, which is part of a parsed body; `param` is the JSON pointer of its field.

    FLOAT and BIAS give floats, BOOL gives torch.bool, INT gives integers. Nested lists give float32, bool and int64. The rank
    is at most 4, and axes may be empty. Raises UnknownField, BadDtype, BadShape, BadEncoding, NonFinite, CostLimit and
    InvalidInput. A value of another kind raises BadMask for BOOL and BadDtype otherwise.
    """
    field = TensorField(param, kind)
    if isinstance(value, RawTensor):
        return _decode_raw(value, field)
    if isinstance(value, dict):
        return _decode_object(value, field)
    numbers = _numbers(value)
    if numbers is None:
        raise InvalidInput(
            f"{field.words} must be nested lists of numbers, or an object with dtype, shape and data", param=param
        )
    if len(numbers.shape) > MAX_RANK:
        raise _rank_error(field, len(numbers.shape))
    tensor = numbers_to_tensor(numbers, field, _LIST_DTYPES[kind], numbers.shape)
    return DecodedTensor(tensor, TensorForm.NESTED)


def rank_of(value: object) -> int | None:
    """Return the number of axes of a tensor that is not decoded yet; None if it is malformed."""
    if isinstance(value, RawTensor):
        return len(value.shape)
    if isinstance(value, NumberList):
        return None if value.fault is not None and value.fault.is_shape else len(value.shape)
    if isinstance(value, dict):
        shape = value.get("shape")
        return len(shape) if isinstance(shape, list) else None
    rank = 0
    while isinstance(value, list):
        rank, value = rank + 1, value[0] if value else None
    return rank


def check_fields(fields: Sequence[tuple[object, TensorField]]) -> None:
    """Check the members of all values, then the dtypes of all, before any value is decoded.
    So a request with two errors reports the one that the contract puts first.
    """
    pairs = [(value, field) for value, field in fields if isinstance(value, dict | RawTensor)]
    for value, field in pairs:
        if isinstance(value, dict):
            _check_members(value, field)
    for value, field in pairs:
        _dtype(value["dtype"] if isinstance(value, dict) else value.dtype, field)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the little-endian C-order bytes of a CPU tensor; a contiguous tensor is not copied."""
    array = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array.ravel().view(np.uint8).data


def _decode_data(data: object, field: TensorField, dtype: torch.dtype, shape: tuple[int, ...]) -> DecodedTensor:
    """Return the tensor of a flat list or a base64 string, whose dtype and shape are known."""
    if isinstance(data, str):
        content = _decode_base64(data, field)
        _check_count(len(content), shape, field, what="bytes", each=dtype.itemsize)
        tensor = bytes_to_tensor(content, field, dtype, shape)
        return DecodedTensor(tensor, TensorForm.BASE64)
    numbers = _numbers(data) if isinstance(data, list | NumberList) else None
    if numbers is None:
        raise InvalidInput(f"{field.words} must have a flat list or a base64 string as data", param=field.param)
    if numbers.fault is None:
        if len(numbers.shape) != 1:
            raise BadShape(
                f"{field.words} must have a flat list as data, got {len(numbers.shape)} levels", param=field.param
            )
        _check_count(math.prod(numbers.shape), shape, field, what="values")
    return DecodedTensor(numbers_to_tensor(numbers, field, dtype, shape), TensorForm.LIST)


def _decode_base64(text: str, field: TensorField) -> bytearray:
    """Return the bytes of strict base64 (RFC 4648): exactly one text is accepted for each byte string. Raises BadEncoding."""
    if len(text) % _QUAD:
        raise BadEncoding(
            f"{field.words} has {len(text)} base64 characters, expected a multiple of 4", param=field.param
        )
    try:
        data = pybase64.b64decode_as_bytearray(text, validate=True)
    except (binascii.Error, ValueError):  # ValueError: not ASCII
        raise BadEncoding(
            f"{field.words} must be base64 (standard alphabet, no white space)", param=field.param
        ) from None
    # The last quad of padded text carries 2 or 4 bits that belong to no byte and must be zero.
    tail = len(data) % 3
    if tail and pybase64.b64encode(data[-tail:]) != text[-_QUAD:].encode("ascii"):
        raise BadEncoding(f"{field.words} must be base64: the bits after the last byte must be zero", param=field.param)
    return data


def _decode_object(value: Mapping[str, object], field: TensorField) -> DecodedTensor:
    _check_members(value, field)
    dtype = _dtype(value["dtype"], field)
    shape = _shape(value["shape"], field)
    return _decode_data(value["data"], field, dtype, shape)


def _decode_raw(raw: RawTensor, field: TensorField) -> DecodedTensor:
    dtype = _dtype(raw.dtype, field)
    shape = _checked_shape(raw.shape, field)
    _check_count(len(raw.data), shape, field, what="bytes", each=dtype.itemsize)
    return DecodedTensor(bytes_to_tensor(raw.data, field, dtype, shape), TensorForm.BINARY)


def _check_members(value: Mapping[str, object], field: TensorField) -> None:
    if surplus := len(value.keys() - set(_MEMBERS)):
        raise UnknownField(
            f"{field.words} has {surplus} unknown members; the members are dtype, shape and data", param=field.param
        )
    if missing := [name for name in _MEMBERS if name not in value]:
        raise InvalidInput(f"{field.words} lacks {', '.join(missing)}", param=field.param)


def _dtype(name: object, field: TensorField) -> torch.dtype:
    found = _DTYPES[field.kind].get(name) if isinstance(name, str) else None
    if found is None:
        words = f"the dtype of {field.words} must be one of {', '.join(_DTYPES[field.kind])}"
        if field.kind is TensorKind.BOOL and isinstance(name, str) and name in _FLOATS:
            words += f"; {FLOATS_ARE_A_BIAS}"
        raise BadDtype(words, param=f"{field.param}/dtype")
    return found


def _rank_error(field: TensorField, rank: int) -> BadShape:
    return BadShape(f"{field.words} has {rank} axes, expected at most {MAX_RANK}", param=field.param)


def _numbers(value: object) -> NumberList | None:
    if isinstance(value, NumberList):
        return value
    if isinstance(value, list):
        return nested_numbers(value)
    if not isinstance(value, int | float):
        return None
    scalar = nested_numbers([value])
    fault = scalar.fault and dataclasses.replace(scalar.fault, index=())
    return dataclasses.replace(scalar, shape=(), fault=fault)


def _shape(value: object, field: TensorField) -> tuple[int, ...]:
    param = f"{field.param}/shape"
    if isinstance(value, NumberList):  # a nested list, or one of more than 64 entries
        raise BadShape(f"the shape of {field.words} must be a list of at most {MAX_RANK} whole numbers", param=param)
    if not isinstance(value, list) or any(type(size) is not int or size < 0 for size in value):
        raise BadShape(f"the shape of {field.words} must be a list of whole numbers of at least 0", param=param)
    return _checked_shape(tuple(value), field)


def _checked_shape(shape: tuple[int, ...], field: TensorField) -> tuple[int, ...]:
    if len(shape) > MAX_RANK:
        raise _rank_error(field, len(shape))
    # The data of an empty tensor does not limit its other axes, and torch computes strides from them.
    if math.prod(max(size, 1) for size in shape) > MAX_VALUES:
        raise CostLimit(f"the shape of {field.words} has more than {MAX_VALUES:,} values", param=f"{field.param}/shape")
    return shape


def _check_count(got: int, shape: tuple[int, ...], field: TensorField, *, what: str, each: int = 1) -> None:
    expected = math.prod(shape) * each
    if got != expected:
        raise BadShape(f"{field.words} has {got} {what}, its shape needs {expected}", param=field.param)
