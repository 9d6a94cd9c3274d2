"""NumberList: nested lists of numbers as one flat array, with their shape and their first fault.

Invariants: The module knows neither fields nor dtypes. Booleans and `"-inf"` are converted and reported, and the caller decides
whether its field takes them. Anything else that is not a number becomes a `Fault`; only the first in text order is kept.
An irregular list reports the fault of its shape and nothing else.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Float64s: TypeAlias = npt.NDArray[np.float64]

BEYOND_FLOAT64 = "a number beyond the range of float64"
NO_VALUES = np.empty(0)
_OVERFLOW = 2**1024 - 2**970  # the least integer that rounds to no float64

_MINUS_INF: dict[object, object] = {"-inf": -math.inf}
_KINDS = {int, float, bool, str}
_NAMES: dict[type, str] = {type(None): "null", dict: "an object", str: "a string"}


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """The item at `index` is no number, or makes the list irregular; `what` describes it in error messages."""

    index: tuple[int, ...]
    what: str
    is_shape: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class NumberList:
    """`values` (flat, C order) and `shape` of a regular nested list; `values` is empty if there is a `fault`.

    `first_boolean` and `first_minus_inf` are flat positions. true and false are stored as 1 and 0, the string "-inf" as
    -inf. `is_whole` is true if every number is written without fraction and exponent; it may be false if one is beyond int64.
    """

    values: Float64s
    shape: tuple[int, ...]
    is_whole: bool = True
    first_boolean: int | None = None
    first_minus_inf: int | None = None
    fault: Fault | None = None


def nested_numbers(nested: object) -> NumberList:
    """Return the NumberList of nested Python lists, or of one item, which has no axes."""
    shape: list[int] = []
    probe = nested
    while isinstance(probe, list):
        shape.append(len(probe))
        probe = probe[0] if probe else None
    items: Sequence[object] = [nested]
    for axis, size in enumerate(shape):
        for position, item in enumerate(items):
            if not isinstance(item, list) or len(item) != size:
                return _irregular(position, shape[:axis], item, f"a list of {size}")
        items = list(itertools.chain.from_iterable(items))  # type: ignore[arg-type]  # all are lists
    kinds = set(map(type, items))
    if list in kinds:  # some items are lists and others are not
        position, item = next((i, item) for i, item in enumerate(items) if isinstance(item, list))
        return _irregular(position, shape, item, "a number")
    first_boolean = next((i for i, item in enumerate(items) if isinstance(item, bool)), None) if bool in kinds else None
    first_minus_inf = items.index("-inf") if str in kinds and "-inf" in items else None
    values = _floats(items, has_strings=str in kinds) if kinds <= _KINDS else None
    if values is not None:
        return NumberList(values, tuple(shape), float not in kinds, first_boolean, first_minus_inf)
    position = next(i for i, item in enumerate(items) if not _is_number(item))
    fault = Fault(index_of(position, shape), _NAMES.get(type(items[position]), BEYOND_FLOAT64))
    return NumberList(NO_VALUES, tuple(shape), True, first_boolean, first_minus_inf, fault)


def _irregular(position: int, shape: Sequence[int], item: object, first: str) -> NumberList:
    found = f"a list of {len(item)}" if isinstance(item, list) else _NAMES.get(type(item), "a number")
    return NumberList(NO_VALUES, (), fault=Fault(index_of(position, shape), f"{found} (the first is {first})", True))


def _floats(items: Sequence[object], *, has_strings: bool) -> Float64s | None:
    """Return float64 values; None if an item is a string other than "-inf" or is beyond float64."""
    num_minus_inf = items.count("-inf") if has_strings else 0
    if has_strings and operator.countOf(map(type, items), str) != num_minus_inf:  # NumPy would parse it as a number
        return None
    numbers: Iterable[Any] = map(_MINUS_INF.get, items, items) if has_strings else items
    try:
        values = np.fromiter(numbers, np.float64, len(items))
    except OverflowError:
        return None
    return values if np.count_nonzero(~np.isfinite(values)) == num_minus_inf else None


def at(index: tuple[int, ...]) -> str:
    """Return the position of a value as error messages write it."""
    return " at index " + "".join(f"[{axis}]" for axis in index) if index else ""


def index_of(position: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the index of a flat position, one number per axis."""
    return tuple(int(axis) for axis in np.unravel_index(position, shape)) if shape else ()


def _is_number(item: object) -> bool:
    return item == "-inf" or (isinstance(item, int | float) and abs(item) < _OVERFLOW)
