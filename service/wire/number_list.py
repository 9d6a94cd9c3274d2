"""NumberList: a list of numbers from a JSON text, flat, with its shape and with what was odd about it.

Knows neither fields nor dtypes: booleans and `"-inf"` are read and remembered, and whoever knows the field decides.
Laws: what is accepted, and every value, is what Python's strict `json` gives (simdjson is only the fast way there); a
syntax error is raised at once, anything that merely is not a number becomes a `Fault`, the first one in the order of
the text; a list that is not regular has the fault of its shape and no other.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from service.wire.pace import Pace

Float64s: TypeAlias = npt.NDArray[np.float64]

BEYOND_FLOAT64 = "a number beyond the range of float64"
EMPTY_LIST = "an empty list"
TOO_MANY = "more numbers than a request may have as text"
OTHER_SHAPE = "a list or a number of another shape"

_ITEMS_A_SLICE = 4096
_NAMES: dict[type, str] = {bool: "a boolean", type(None): "null", dict: "an object"}


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """What stands at `index` where a number of a regular list should be, in words for people."""

    index: tuple[int, ...]
    what: str

    @property
    def is_shape(self) -> bool:
        return self.what in {EMPTY_LIST, OTHER_SHAPE}


@dataclasses.dataclass(frozen=True, slots=True)
class NumberList:
    """`values` (flat, C order) of a regular nested list of this `shape`; both mean nothing where there is a `fault`.

    `first_boolean` and `first_minus_inf` are flat positions: true and false stand as 1 and 0, the string "-inf" as
    -inf. `is_whole` says that every number was written without fraction and exponent. `depth` counts nested brackets.
    """

    values: Float64s
    shape: tuple[int, ...]
    depth: int
    is_whole: bool = True
    first_boolean: int | None = None
    first_minus_inf: int | None = None
    fault: Fault | None = None


async def nested_numbers(nested: list[object], pace: Pace) -> NumberList:
    """The same for a list that is parsed already."""
    shape: list[int] = []
    probe: object = nested
    while isinstance(probe, list):
        shape.append(len(probe))
        probe = probe[0] if probe else None
    depth = len(shape)
    level: list[object] = [nested]
    for axis in range(depth + 1):
        expected = shape[axis] if axis < depth else None
        inner: list[object] = []
        for position, item in enumerate(level):
            if (len(item) if isinstance(item, list) else None) != expected:
                fault = Fault(_index(position, tuple(shape[:axis])), OTHER_SHAPE)
                return NumberList(np.empty(0), (), depth, fault=fault)
            if isinstance(item, list):
                inner.extend(item)
            if position % _ITEMS_A_SLICE == _ITEMS_A_SLICE - 1:
                await pace.give_way()
        level = inner if axis < depth else level
    taker = NumberTaker(tuple(shape))
    for start in range(0, len(level), _ITEMS_A_SLICE):
        if taker.fault is None:
            taker.take(level[start : start + _ITEMS_A_SLICE])
            await pace.give_way()
    return taker.finish(depth)


def _index(position: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(axis) for axis in np.unravel_index(position, shape)) if shape else ()


class NumberTaker:
    """Fills the values of one array, in order, from parsed items."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.values: Float64s = np.empty(math.prod(shape) if shape else 0, dtype=np.float64)
        self.filled = 0
        self.is_whole = True
        self.first_boolean: int | None = None
        self.first_minus_inf: int | None = None
        self.fault: Fault | None = None

    def finish(self, depth: int) -> NumberList:
        assert self.fault or self.filled == len(self.values), "a regular list is full. This is a bug."
        return NumberList(
            self.values, self.shape, depth, self.is_whole, self.first_boolean, self.first_minus_inf, self.fault
        )

    def put(self, values: Float64s) -> None:
        self.values[self.filled : self.filled + len(values)] = values
        self.filled += len(values)

    def take(self, items: list[object]) -> None:
        """Numbers, booleans and "-inf", up to the first item that is none of these, which becomes the fault."""
        kinds = set(map(type, items))
        self.is_whole = self.is_whole and float not in kinds
        numbers: list[float] = []
        for position, item in enumerate(items, start=self.filled):
            if type(item) is bool and self.first_boolean is None:
                self.first_boolean = position
            if type(item) is str and item == "-inf" and self.first_minus_inf is None:
                self.first_minus_inf = position
            number = _number(item)
            if number is None:
                self.fault = Fault(_index(position, self.shape), _describe(item))
                return
            numbers.append(number)
        self.put(np.array(numbers, dtype=np.float64))


def _number(item: object) -> float | None:
    if item == "-inf":
        return -math.inf
    if not isinstance(item, int | float):
        return None
    try:
        number = float(item)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _describe(item: object) -> str:
    if isinstance(item, int | float):
        return BEYOND_FLOAT64
    return EMPTY_LIST if isinstance(item, list) else _NAMES.get(type(item), "a string")
