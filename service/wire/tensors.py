"""Tensors: decodes the tensors of a request to torch tensors and checks every value.

A tensor is nested lists of numbers, or an object with dtype, shape and data: a flat list, base64 of little-endian C-order
bytes, or such bytes of a binary body, which are writable. This module does not know which fields exist or which sizes they need.
Invariants: Sizes are Python integers and are checked before memory is allocated. Only ServiceErrors are raised, whatever the
value is. Only finite values pass, and -inf if the field is a bias. A finite number that does not fit its dtype is rejected,
never turned into infinity. Rounding is to nearest, ties to even, from float64 directly to the dtype. (A decimal of more than 17
digits is thus rounded twice: to float64, then to the dtype.) A tensor shares the memory of the decoded data if its dtype allows.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pybase64
import torch

from service.errors import BadDtype, BadEncoding, BadShape, CostLimit, InvalidInput, UnknownField
from service.wire.body_faults import base64_fault
from service.wire.field_names import instead, kind_of
from service.wire.json_document import LongText
from service.wire.number_list import Float64s, NumberList, at, index_of, nested_numbers
from service.wire.tensor_fields import BY_TORCH, FLOATS, FLOATS_ARE_A_BIAS, TensorField, TensorKind

Values: TypeAlias = npt.NDArray[np.generic]
Bits: TypeAlias = npt.NDArray[np.unsignedinteger]

MAX_RANK = 4
MAX_VALUES = 2**30  # more than a body of the largest configurable size can hold
_MEMBERS = ("dtype", "shape", "data")
_RAGGED = (
    "; all rows need one width and all sequences one length: pad the shorter ones and mask the padding with "
    '{"kind": "lengths"}, or send one request a sequence'
)
_QUAD = 4  # characters of base64 that stand for three bytes
_PIECE = 2**20  # characters of base64 that are decoded in one call: 0.2 ms
# The bits of +inf, and of -inf, which has the sign bit too.
_INFINITIES = {dtype.torch: (dtype.infinity, dtype.infinity + 2 ** (8 * dtype.torch.itemsize - 1)) for dtype in FLOATS}
_UNSIGNED = {size: np.dtype(f"<u{size}") for size in (1, 2, 4, 8)}
_SIGNED = {size: np.dtype(f"<i{size}") for size in _UNSIGNED}
_MAX_EXACT = 2**53 - 1  # above it, a float64 may stand for more than one whole number


class TensorForm(enum.Enum):
    """How JSON writes a tensor."""

    NESTED = "nested lists"
    LIST = "an object with a flat list"
    BASE64 = "an object with base64"


def decode_tensor(value: object, field: TensorField) -> torch.Tensor:
    """Return the tensor of `value`, which is part of a parsed body.

    FLOAT and BIAS give floats, BOOL gives torch.bool, INT gives integers. Nested lists give float32, bool and int64. The rank
    is at most 4, and axes may be empty. Raises UnknownField, BadDtype, BadShape, BadEncoding, NonFinite, CostLimit and
    InvalidInput. A value of another kind raises BadMask for BOOL and BadDtype otherwise.
    """
    if isinstance(value, dict):
        _check_members(value, field)
        return _decode_data(value["data"], field, _dtype(value["dtype"], field), _shape(value["shape"], field))
    numbers = _numbers(value)
    if numbers is None:
        words = f"must be nested lists of numbers, or an object with dtype, shape and data, got {kind_of(value)}"
        raise field.error(InvalidInput, words)
    if len(numbers.shape) > MAX_RANK:
        raise _rank_error(field, len(numbers.shape))
    return _numbers_to_tensor(numbers, field, field.kind.list_dtype, numbers.shape)


def rank_of(value: object) -> int | None:
    """Return the number of axes of a tensor that is not decoded yet; None if it is malformed."""
    if isinstance(value, NumberList):
        return None if value.fault is not None and value.fault.is_shape else len(value.shape)
    if isinstance(value, dict):
        shape = value.get("shape")
        return len(shape) if isinstance(shape, list | tuple) else None
    rank = 0
    while isinstance(value, list):
        rank, value = rank + 1, value[0] if value else None
    return rank


def check_fields(fields: Sequence[tuple[object, TensorField]]) -> None:
    """Check the members of all values, then the dtypes of all, in the order of the contract and before any value is decoded."""
    objects = [(value, field) for value, field in fields if isinstance(value, dict)]
    for value, field in objects:
        _check_members(value, field)
    for value, field in objects:
        _dtype(value["dtype"], field)


def answer_form(query: object, encoding: str | None) -> TensorForm:
    """Return how a JSON answer writes its tensors: as the request wrote its valid `query`, unless `encoding` says otherwise."""
    if encoding is None and isinstance(query, dict):
        encoding = "base64" if isinstance(query["data"], str | LongText | memoryview) else "list"
    if encoding == "base64":
        return TensorForm.BASE64
    return TensorForm.LIST if isinstance(query, dict) else TensorForm.NESTED


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the little-endian C-order bytes of a CPU tensor; a contiguous tensor is not copied."""
    array = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array.ravel().view(np.uint8).data


def _check_members(value: Mapping[str, object], field: TensorField) -> None:
    if surplus := len(value.keys() - _MEMBERS):
        raise field.error(UnknownField, f"has {surplus} unknown members; the members are dtype, shape and data")
    if missing := [name for name in _MEMBERS if name not in value]:
        raise field.error(InvalidInput, f"lacks {', '.join(missing)}")


def _dtype(name: object, field: TensorField) -> torch.dtype:
    found = field.kind.dtypes.get(name) if isinstance(name, str) else None
    if found is None:
        known = field.kind.dtypes
        words = f"the dtype of {field.words} must be one of {', '.join(known)}{instead(name, known)}"
        if field.kind is TensorKind.BOOL and isinstance(name, str) and name in TensorKind.FLOAT.dtypes:
            words += f"; {FLOATS_ARE_A_BIAS}"
        raise BadDtype(words, param=f"{field.param}/dtype")
    return found


def _shape(value: object, field: TensorField) -> tuple[int, ...]:
    param = f"{field.param}/shape"
    if isinstance(value, NumberList):  # a nested list, or one of more than 64 entries
        raise BadShape(f"the shape of {field.words} must be a list of at most {MAX_RANK} whole numbers", param=param)
    if not isinstance(value, list | tuple) or any(type(size) is not int or size < 0 for size in value):
        raise BadShape(f"the shape of {field.words} must be a list of whole numbers of at least 0", param=param)
    if len(value) > MAX_RANK:
        raise _rank_error(field, len(value))
    # The data of an empty tensor does not limit its other axes, and torch computes strides from them.
    if (num_values := math.prod(max(size, 1) for size in value)) > MAX_VALUES:
        raise too_many_values(field.words, num_values, param)
    return tuple(value)


def too_many_values(words: str, num_values: int, param: str) -> CostLimit:
    found = f"{num_values:,}" if num_values < 2**63 else "2^63 or more"
    return CostLimit(
        f"the shape of {words} has {found} values, expected at most {MAX_VALUES:,}; no setting raises this limit",
        param=param,
    )


def _rank_error(field: TensorField, rank: int) -> BadShape:
    return field.error(BadShape, f"has {rank} axes, expected at most {MAX_RANK}")


def _check_count(got: int, shape: tuple[int, ...], field: TensorField, *, what: str, each: int = 1) -> None:
    expected = math.prod(shape) * each
    if got != expected:
        raise field.error(BadShape, f"has {got} {what}, its shape needs {expected}")


def _decode_data(data: object, field: TensorField, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor of bytes, a base64 string or a flat list, whose dtype and shape are known."""
    if isinstance(data, str | LongText | memoryview):
        content = data if isinstance(data, memoryview) else _decode_base64(data, field)
        _check_count(len(content), shape, field, what="bytes", each=dtype.itemsize)
        return bytes_to_tensor(content, field, dtype, shape)
    numbers = _numbers(data) if isinstance(data, list | NumberList) else None
    if numbers is None:
        raise field.error(InvalidInput, f"must have a flat list or a base64 string as data, got {kind_of(data)}")
    if numbers.fault is None:
        if len(numbers.shape) != 1:
            raise field.error(BadShape, f"must have a flat list as data, got {len(numbers.shape)} levels")
        _check_count(numbers.shape[0], shape, field, what="values")
    return _numbers_to_tensor(numbers, field, dtype, shape)


def _decode_base64(data: str | LongText, field: TensorField) -> bytearray:
    """Return the bytes of strict base64 (RFC 4648): exactly one text is accepted for each byte string. Raises BadEncoding."""
    text = data.text if isinstance(data, LongText) else memoryview(data.encode("ascii", "replace"))  # base64 has no "?"
    decoded, end = bytearray(len(text) // _QUAD * 3), 0
    for start in range(0, len(text), _PIECE):  # in pieces, between which other threads run
        if end * _QUAD != start * 3:  # padding within the text
            break
        try:
            piece = pybase64.b64decode(text[start : start + _PIECE], validate=True)
        except ValueError:
            break
        decoded[end : end + len(piece)] = piece
        end += len(piece)
    else:
        del decoded[end:]
        # The last quad of padded text carries 2 or 4 bits that belong to no byte and must be zero.
        tail = end % 3
        if tail and pybase64.b64encode(decoded[-tail:]) != text[-_QUAD:]:
            raise field.error(BadEncoding, "must be base64: the bits after the last byte must be zero")
        return decoded
    words = "must be base64 (standard alphabet, no white space)"
    if len(text) % _QUAD:
        words = f"has {len(text)} base64 characters, expected a multiple of 4"
    raise field.error(BadEncoding, f"{words}{base64_fault(text[start : start + _PIECE])}")


def _numbers(value: object) -> NumberList | None:
    """Return the numbers of lists, or of one number, which has no axes; None for anything else."""
    if isinstance(value, NumberList):
        return value
    return nested_numbers(value) if isinstance(value, list | int | float) else None


def _numbers_to_tensor(
    numbers: NumberList, field: TensorField, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    """Return the tensor of `numbers`, whose count matches `shape`; raises for the first item, in text order, of another kind."""
    fault, kind = numbers.fault, field.kind
    if fault is not None and fault.is_shape:
        raise field.error(BadShape, f"has {fault.what}{at(fault.index)}{_RAGGED if kind is TensorKind.FLOAT else ''}")
    odd: list[tuple[tuple[int, ...], str]] = [] if fault is None else [(fault.index, fault.what)]
    if numbers.first_boolean is not None and kind is not TensorKind.BOOL:
        odd.append((index_of(numbers.first_boolean, numbers.shape), "a boolean"))
    if numbers.first_minus_inf is not None and kind is not TensorKind.BIAS:
        odd.append((index_of(numbers.first_minus_inf, numbers.shape), 'the string "-inf"'))
    if odd:
        index, what = min(odd)
        raise field.wrong(what, index)
    convert = _to_floats if kind.list_dtype.is_floating_point else _to_whole
    tensor = torch.from_numpy(convert(numbers, field, dtype))
    return (tensor.view(dtype) if dtype == torch.bfloat16 else tensor).reshape(shape)


def _to_whole(numbers: NumberList, field: TensorField, dtype: torch.dtype) -> Values:
    """Return the numbers in the dtype, or for BOOL as booleans; raises an error for the first that is not whole, or too large."""
    values = numbers.values
    if field.kind is TensorKind.BOOL:
        dtype, refused = torch.bool, {"a number other than 0 and 1": (values != 0) & (values != 1)}
    else:
        limit = min(torch.iinfo(dtype).max, _MAX_EXACT)
        refused = {"a fraction": np.trunc(values) != values, f"a number beyond {limit}": np.abs(values) > limit}
    for what, wrong in refused.items():
        if wrong.any():
            raise field.wrong(what, index_of(int(wrong.argmax()), numbers.shape))
    if not numbers.is_whole:
        raise field.wrong("a number written with a fraction or an exponent", ())
    return values.astype(BY_TORCH[dtype].stored)


def _to_floats(numbers: NumberList, field: TensorField, dtype: torch.dtype) -> Values:
    """Return the numbers rounded to the dtype; raises NonFinite for one beyond its range."""
    values = numbers.values
    if dtype == torch.float64:
        return values.copy()  # simdjson's is read-only
    with np.errstate(over="ignore", under="ignore"):
        stored = _bfloat16_bits(values) if dtype == torch.bfloat16 else values.astype(BY_TORCH[dtype].stored)
    bits, (infinity, minus_infinity) = stored.view(_UNSIGNED[dtype.itemsize]), _INFINITIES[dtype]
    if len(values) and not _is_finite(bits, infinity, minus_infinity):
        lost = ((bits == infinity) | (bits == minus_infinity)) != np.isinf(values)
        if lost.any():
            what = f"a number beyond the range of {str(dtype).removeprefix('torch.')}"
            raise field.not_finite(what, index_of(int(lost.argmax()), numbers.shape))
    return stored


def _bfloat16_bits(values: Float64s) -> npt.NDArray[np.uint16]:
    """Return bfloat16 bits, rounded once, to nearest, ties to even: first truncate to float32 with a sticky last bit."""
    singles = values.astype(np.float32)
    back = singles.astype(np.float64)
    bits = singles.view(np.uint32)
    bits -= np.abs(back) > np.abs(values)
    bits |= back != values
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def bytes_to_tensor(
    data: bytearray | memoryview, field: TensorField, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    """Return the tensor of little-endian C-order bytes, whose count must match `shape`; raises the errors of `field`.

    The tensor shares the memory of `data` if that is aligned; booleans share it only with one byte per value.
    """
    if not data:
        return torch.empty(shape, dtype=dtype)
    bits: Bits = np.frombuffer(data, _UNSIGNED[dtype.itemsize])
    if not bits.flags.aligned:
        bits = bits.copy()
    if field.kind is TensorKind.BOOL:
        if np.maximum.reduce(bits) > 1:
            raise field.wrong("a byte other than 0 and 1", index_of(int((bits > 1).argmax()), shape))
        flags = bits.view(np.bool_) if bits.itemsize == 1 else bits.astype(np.bool_)
        return torch.from_numpy(flags.reshape(shape))
    if field.kind is not TensorKind.INT:
        _check_finite(bits, _INFINITIES[dtype], field, shape)
    # An array until the end, because calls on tensors cost more than calls on arrays.
    stored = torch.from_numpy(bits.view(BY_TORCH[dtype].stored).reshape(shape))
    return stored.view(dtype) if dtype == torch.bfloat16 else stored


def _check_finite(bits: Bits, infinities: tuple[int, int], field: TensorField, shape: tuple[int, ...]) -> None:
    """Raise NonFinite for the first value that is not finite; -inf is allowed in a bias."""
    infinity, minus_infinity = infinities
    is_bias = field.kind is TensorKind.BIAS
    if not _is_finite(bits, infinity, minus_infinity + is_bias):
        bad = (bits & infinity) == infinity
        if is_bias:
            bad &= bits != minus_infinity
        place = int(bad.argmax())
        what = "inf" if bits[place] == infinity else "-inf" if bits[place] == minus_infinity else "NaN"
        raise field.not_finite(what, index_of(place, shape))


def _is_finite(bits: Bits, infinity: int, minus_infinity: int) -> bool:
    """Return whether no value is infinite or NaN; to allow -inf, pass one more than its bits as `minus_infinity`.

    As signed integers, the bits of positive values grow with the value. As unsigned integers, the bits of negative values grow
    with the magnitude and exceed all positive ones. So two maxima decide in every dtype, and no sum can overflow.
    """
    return bool(
        np.maximum.reduce(bits.view(_SIGNED[bits.itemsize])) < infinity and np.maximum.reduce(bits) < minus_infinity
    )
