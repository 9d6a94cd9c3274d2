"""Tensor fields: the dtypes that a tensor may have, the kinds of values that a field takes, and the errors of a field.

Invariants: Every other module of `wire` takes its dtype names from `DTYPES`. An error names the field and the position of the
value, never the value itself.
"""

from __future__ import annotations

import enum
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from service.errors import BadDtype, BadMask, BadShape, InvalidInput, NonFinite, ServiceError
from service.wire.field_names import words_of
from service.wire.number_list import BEYOND_FLOAT64, at

E = TypeVar("E", bound=ServiceError)


class Dtype(NamedTuple):
    """A dtype with its names in the contract (those of torch), in safetensors and in Open Inference.

    `stored` is NumPy's dtype for its values; for bfloat16, which NumPy lacks, it is that of their bits. `infinity` is the bits
    of +inf: all exponent bits and no other. The bits of a finite value, without the sign, are smaller.
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
BY_TORCH = {dtype.torch: dtype for dtype in DTYPES}
BY_SAFETENSORS = {dtype.safetensors: dtype for dtype in DTYPES}
BY_INFERENCE = {dtype.inference: dtype for dtype in DTYPES}
BOOL = BY_TORCH[torch.bool]
FLOATS = tuple(dtype for dtype in DTYPES if dtype.torch.is_floating_point)
WHOLES = tuple(dtype for dtype in DTYPES if dtype not in (BOOL, *FLOATS))

FLOATS_ARE_A_BIAS = 'a mask of floats is a "bias"'


class TensorKind(enum.Enum):
    """The kinds of values that a field may hold: their words in error messages, their dtypes, and the dtype of nested lists."""

    FLOAT = "a number", FLOATS, torch.float32
    BIAS = 'a number or "-inf"', FLOATS, torch.float32
    BOOL = f"true, false, 0 or 1 ({FLOATS_ARE_A_BIAS})", (BOOL, *WHOLES), torch.bool
    INT = "a whole number", WHOLES, torch.int64

    def __init__(self, words: str, dtypes: tuple[Dtype, ...], list_dtype: torch.dtype) -> None:
        self.words = words
        self.dtypes = {dtype.name: dtype.torch for dtype in dtypes}
        self.list_dtype = list_dtype


class TensorField(NamedTuple):
    """The field of a tensor: its JSON pointer and its kind."""

    param: str
    kind: TensorKind

    @property
    def words(self) -> str:
        return words_of(self.param)

    def error(self, kind: type[E], words: str) -> E:
        """Return an error of this kind; `words` continue a sentence that begins with the field."""
        return kind(f"{self.words} {words}", param=self.param)

    def wrong(self, what: str, index: tuple[int, ...]) -> InvalidInput:
        """Return the error for a value, described by `what`, that is not of the field's kind."""
        if what == BEYOND_FLOAT64:
            return self.not_finite(what, index)
        kind = BadMask if self.kind is TensorKind.BOOL else BadDtype
        return self.error(kind, f"has {what}{at(index)}, expected {self.kind.words}")

    def not_finite(self, what: str, index: tuple[int, ...]) -> NonFinite:
        return self.error(NonFinite, f"has {what}{at(index)}, expected {self.kind.words}")


def expect(name: str, what: str, found: int, expected: int, other: str) -> None:
    """Raise BadShape if tensor `name` does not have as many of `what` as tensor `other`."""
    if found != expected:
        raise BadShape(f"{name} has {found} {what}, {other} has {expected}", param=f"/{name}")
