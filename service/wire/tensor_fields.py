"""Tensor values: the table of dtypes, and the conversion of checked numbers or raw bytes to a tensor of a dtype.

Every other module of `wire` takes its dtype names from the table. This module knows neither JSON nor the order of fields.
Invariants: Every value is checked. Only finite values pass, and -inf if the field is a bias. A finite number that does not fit
its dtype is rejected, never turned into infinity. Rounding is to nearest, ties to even, from float64 directly to the dtype. (A
decimal of more than 17 digits is thus rounded twice: to float64, then to the dtype.) The tensor shares the memory of the decoded
data if the dtype allows it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from service.errors import BadDtype, BadMask, BadShape, InvalidInput, NonFinite
from service.wire.number_list import BEYOND_FLOAT64, Float64s, NumberList


class Dtype(NamedTuple):
    """A dtype with its names in the contract (those of torch), in safetensors and in Open Inference.

    `stored` is NumPy's dtype for its values, of bfloat16 their bits. `infinity` is the bits of +inf: all exponent bits and no
    other. Without their sign, the bits of a finite value are smaller.
    """

    name: str
    torch: torch.dtype
    safetensors: str
    inference: str
    stored: npt.DTypeLike
    infinity: int = 0


DTYPES = (
    Dtype("float16", torch.float16, "F16", "FP16", np.float16, 0x7C00),
    Dtype("bfloat16", torch.bfloat16, "BF16", "BF16", np.uint16, 0x7F80),
    Dtype("float32", torch.float32, "F32", "FP32", np.float32, 0x7F80_0000),
    Dtype("float64", torch.float64, "F64", "FP64", np.float64, 0x7FF0_0000_0000_0000),
    Dtype("bool", torch.bool, "BOOL", "BOOL", np.bool_),
    Dtype("int32", torch.int32, "I32", "INT32", np.int32),
    Dtype("int64", torch.int64, "I64", "INT64", np.int64),
)
FLOATS = tuple(dtype for dtype in DTYPES if dtype.torch.is_floating_point)
WHOLES = tuple(dtype for dtype in DTYPES if dtype.name in ("int32", "int64"))
BY_TORCH = {dtype.torch: dtype for dtype in DTYPES}
_STORED = {dtype.torch: dtype.stored for dtype in DTYPES}
_INFINITIES = {dtype.torch: dtype.infinity for dtype in FLOATS}
_UNSIGNED = {size: np.dtype(f"<u{size}") for size in (1, 2, 4, 8)}
_SIGNED = {size: np.dtype(f"<i{size}") for size in _UNSIGNED}
BY_SAFETENSORS = {dtype.safetensors: dtype for dtype in DTYPES}
BY_INFERENCE = {dtype.inference: dtype for dtype in DTYPES}


Values: TypeAlias = npt.NDArray[np.generic]
Bits: TypeAlias = npt.NDArray[np.unsignedinteger]

_SLICE_VALUES = 128 * 1024  # of 4 bytes: a slice is small enough to stay in the cache for a second pass
_MAX_EXACT = 2**53 - 1  # above it, a float64 may stand for more than one whole number
FLOATS_ARE_A_BIAS = 'a mask of floats is a "bias"'


class TensorKind(enum.Enum):
    """The kinds of values that a field may hold, with their description in error messages."""

    FLOAT = "a number"
    BIAS = 'a number or "-inf"'
    BOOL = f"true, false, 0 or 1 ({FLOATS_ARE_A_BIAS})"
    INT = "a whole number"


class TensorField(NamedTuple):
    """The field of a tensor: its JSON pointer and its kind."""

    param: str
    kind: TensorKind

    @property
    def words(self) -> str:
        return words_of(self.param)

    def wrong(self, what: str, index: tuple[int, ...]) -> InvalidInput:
        """Return the error for `what`, found at `index`."""
        kind_error = BadMask if self.kind is TensorKind.BOOL else BadDtype
        error = NonFinite if what == BEYOND_FLOAT64 else kind_error
        return error(f"{self.words} has {what}{_at(index)}, expected {self.kind.value}", param=self.param)

    def not_finite(self, what: str, index: tuple[int, ...]) -> NonFinite:
        return NonFinite(f"{self.words} has {what}{_at(index)}", param=self.param)


def words_of(param: str) -> str:
    """Return a JSON pointer in readable form: `/masks/0/values` becomes masks[0].values."""
    first, *rest = param.strip("/").split("/")
    return first + "".join(f"[{name}]" if name.isdigit() else f".{name}" for name in rest)


def numbers_to_tensor(
    numbers: NumberList, field: TensorField, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    """Return the tensor of `numbers`, whose count must match `shape`; raises the errors of `field`."""
    _check_kind(numbers, field)
    values = numbers.values
    if field.kind is TensorKind.BOOL or dtype == torch.bool:
        return _to_bool(numbers, field, shape)
    if not dtype.is_floating_point:
        return _to_whole(numbers, field, dtype, shape)
    if dtype == torch.float64:
        # simdjson's arrays are read-only, and torch has no read-only tensors.
        return torch.from_numpy(values if values.flags.writeable else values.copy()).reshape(shape)
    stored: Values = np.empty(len(values), dtype=_STORED[dtype])
    bits, infinity = stored.view(f"u{dtype.itemsize}"), _INFINITIES[dtype]
    for part in _parts(len(values)):
        _store(values[part], stored[part], dtype)
        if not _is_finite(bits[part], infinity):
            lost = _is_infinite(bits[part], infinity) != np.isinf(values[part])
            if lost.any():
                what = f"a number beyond the range of {str(dtype).removeprefix('torch.')}"
                raise field.not_finite(what, index_of(part.start + int(lost.argmax()), numbers.shape))
    tensor = torch.from_numpy(stored)
    return (tensor.view(dtype) if dtype == torch.bfloat16 else tensor).reshape(shape)


def bytes_to_tensor(
    data: bytearray | memoryview,
    field: TensorField,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    as_shape: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """Return the tensor of little-endian C-order bytes, whose count must match `shape`; raises the errors of `field`.

    Numbers take the shape `as_shape` if it is given; errors name the index in `shape`.
    The tensor shares the memory of `data` if that is aligned; booleans share it only with one byte per value.
    """
    if not data:
        return torch.empty(shape, dtype=dtype)
    bits: Bits = np.frombuffer(data, dtype=_UNSIGNED[dtype.itemsize])
    if not bits.flags.aligned:
        return bytes_to_tensor(bytearray(data), field, dtype, shape, as_shape)
    if field.kind is TensorKind.BOOL:
        return torch.from_numpy(_flags(bits, field, shape)).reshape(shape)
    if field.kind is not TensorKind.INT:
        if len(bits) <= _SLICE_VALUES:
            _check_slice(bits, 0, _INFINITIES[dtype], field, shape)
        else:
            _check_finite(bits, _INFINITIES[dtype], field, shape)
    # An array until the end, because calls on tensors cost more than calls on arrays. NumPy has no bfloat16.
    stored = torch.from_numpy(bits.view(_STORED[dtype]).reshape(as_shape or shape))
    return stored.view(dtype) if dtype == torch.bfloat16 else stored


def _check_finite(bits: Bits, infinity: int, field: TensorField, shape: tuple[int, ...]) -> None:
    """Call `_check_slice` for each slice of a large tensor."""
    for start in range(0, len(bits), _SLICE_VALUES):
        _check_slice(bits[start : start + _SLICE_VALUES], start, infinity, field, shape)


def _check_slice(part: Bits, start: int, infinity: int, field: TensorField, shape: tuple[int, ...]) -> None:
    """Raise NonFinite for the first value that is not finite; -inf is allowed in a bias."""
    is_bias = field.kind is TensorKind.BIAS
    if not _is_finite(part, infinity, but_minus_inf=is_bias):
        bad = (part & infinity) == infinity
        if is_bias:
            bad &= part != _negative(infinity)
        raise field.not_finite("a value that is not finite", index_of(start + int(bad.argmax()), shape))


def index_of(position: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index of a flat position, one number per axis."""
    return tuple(int(axis) for axis in np.unravel_index(position, shape)) if shape else ()


def _at(index: tuple[int, ...]) -> str:
    return " at index " + "".join(f"[{axis}]" for axis in index) if index else ""


def _parts(count: int) -> Iterator[slice]:
    for start in range(0, count, _SLICE_VALUES):
        yield slice(start, start + _SLICE_VALUES)


def _check_kind(numbers: NumberList, field: TensorField) -> None:
    """Raise an error for the first item, in text order, that is not of the field's kind."""
    fault, kind = numbers.fault, field.kind
    if fault is not None and fault.is_shape:
        raise BadShape(f"{field.words} has {fault.what}{_at(fault.index)}", param=field.param)
    odd: list[tuple[tuple[int, ...], str]] = [] if fault is None else [(fault.index, fault.what)]
    if numbers.first_boolean is not None and kind is not TensorKind.BOOL:
        odd.append((index_of(numbers.first_boolean, numbers.shape), "a boolean"))
    if numbers.first_minus_inf is not None and kind is not TensorKind.BIAS:
        odd.append((index_of(numbers.first_minus_inf, numbers.shape), "a string"))
    if odd:
        index, what = min(odd)
        raise field.wrong(what, index)


def _to_bool(numbers: NumberList, field: TensorField, shape: tuple[int, ...]) -> torch.Tensor:
    values = numbers.values
    flags = np.empty(len(values), dtype=np.bool_)
    for part in _parts(len(values)):
        wrong = (values[part] != 0) & (values[part] != 1)
        if wrong.any():
            raise field.wrong("a number other than 0 and 1", index_of(part.start + int(wrong.argmax()), numbers.shape))
        flags[part] = values[part]
    if not numbers.is_whole:
        raise field.wrong("a number written with a fraction or an exponent", ())
    return torch.from_numpy(flags).reshape(shape)


def _to_whole(numbers: NumberList, field: TensorField, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    values = numbers.values
    limit = min(torch.iinfo(dtype).max, _MAX_EXACT)
    stored: Values = np.empty(len(values), dtype=_STORED[dtype])
    for part in _parts(len(values)):
        for wrong, what in (
            (np.trunc(values[part]) != values[part], "a fraction"),
            (np.abs(values[part]) > limit, f"a number beyond {limit}"),
        ):
            if wrong.any():
                raise field.wrong(what, index_of(part.start + int(wrong.argmax()), numbers.shape))
        stored[part] = values[part].astype(stored.dtype)
    if not numbers.is_whole:
        raise field.wrong("a number written with a fraction or an exponent", ())
    return torch.from_numpy(stored).reshape(shape)


def _is_finite(bits: Bits, infinity: int, *, but_minus_inf: bool = False) -> bool:
    """Return whether no value is infinite or NaN (`but_minus_inf` allows -inf); `infinity` is the bits of +inf.

    As signed integers, the bits of positive values grow with the value. As unsigned integers, the bits of negative values grow
    with the magnitude and exceed all positive ones. So two maxima decide in every dtype, and no sum can overflow.
    """
    return bool(
        np.maximum.reduce(bits.view(_SIGNED[bits.itemsize])) < infinity
        and np.maximum.reduce(bits) < _negative(infinity) + but_minus_inf
    )


def _is_infinite(bits: Bits, infinity: int) -> npt.NDArray[np.bool_]:
    infinite: npt.NDArray[np.bool_] = (bits == infinity) | (bits == _negative(infinity))
    return infinite


def _negative(infinity: int) -> int:
    """Return the bits of -inf: +inf has no bit above its exponent, so the sign is the next power of two."""
    return infinity + (1 << infinity.bit_length())


def _flags(bits: Bits, field: TensorField, shape: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    flags: npt.NDArray[np.bool_] = bits.view(np.bool_) if bits.itemsize == 1 else np.empty(len(bits), dtype=np.bool_)
    for part in _parts(len(bits)):
        if np.maximum.reduce(bits[part]) > 1:
            first = int((bits[part] > 1).argmax())
            raise field.wrong("a byte other than 0 and 1", index_of(part.start + first, tuple(shape)))
        if bits.itemsize > 1:
            flags[part] = bits[part]
    return flags


def _store(values: Float64s, stored: Values, dtype: torch.dtype) -> None:
    """Round `values` to the dtype; values beyond its range become infinite."""
    if dtype == torch.bfloat16:
        stored[:] = _bfloat16_bits(values)
        return
    with np.errstate(over="ignore", under="ignore"):
        np.copyto(stored, values, casting="same_kind")


def _bfloat16_bits(values: Float64s) -> npt.NDArray[np.uint16]:
    """Round once, to nearest, ties to even: to float32 towards zero with a sticky last bit, then to 16 bits."""
    with np.errstate(over="ignore", under="ignore"):
        singles = values.astype(np.float32)
    back = singles.astype(np.float64)
    bits = singles.view(np.uint32)
    bits -= np.abs(back) > np.abs(values)
    bits |= back != values
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
