"""MaskValues: converts the lists and numbers of a mask to an array of the dtype of its kind.

Invariants: an array keeps its dtype, and the service checks it. In a list, each value must be one that the service accepts for
the kind of mask; others raise the service's error, because NumPy would convert nearly anything (0.5 to True, "False" to True,
1.99 to 1). Any shape is accepted, even an empty one: the service checks shapes.
"""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import numpy.typing as npt

from attention_client.errors import BadDtype, BadMask, BadShape, InvalidInput, NonFinite

_PLAIN = frozenset({bool, int, float, str})
_MINUS_INF = "-inf"


class MaskValues(enum.Enum):
    """Values that a kind of mask accepts; each member's value is the service's wording, for error messages."""

    FLAGS = "true, false, 0 or 1"
    WHOLES = "whole numbers"
    NUMBERS = 'numbers or "-inf"'

    def array(self, values: Any) -> Any:
        """Return an array. Raises BadShape (lists of unequal length), BadMask or BadDtype (wrong kind of value), NonFinite."""
        if hasattr(values, "dtype"):
            return np.asarray(values) if isinstance(values, np.generic) else values
        shape, found = _flat(values)
        if self is MaskValues.FLAGS:
            return _flags(found).reshape(shape)
        return (_wholes(found) if self is MaskValues.WHOLES else _numbers(found)).reshape(shape)


def _flat(values: Any) -> tuple[tuple[int, ...], list[Any]]:
    """Return the shape and a flat list of the values as Python objects."""
    try:
        objects = np.asarray(values, dtype=object)
        found = objects.ravel().tolist()
        if not _PLAIN.issuperset(map(type, found)):
            found = [value.item() if hasattr(value, "item") else value for value in found]
    except Exception as error:  # a list may hold arrays, tensors or objects whose methods raise anything
        raise _ragged() from error
    if any(isinstance(value, list | tuple) for value in found):
        raise _ragged()
    return objects.shape, found


def _flags(found: list[Any]) -> npt.NDArray[np.bool_]:
    if not _are(found, bool, int) or not all(value in (0, 1) for value in found):
        raise _wrong(BadMask, MaskValues.FLAGS)
    return np.array(found, dtype=np.bool_)


def _wholes(found: list[Any]) -> npt.NDArray[np.int64]:
    try:
        if _are(found, int):
            return np.array(found, dtype=np.int64)
    except OverflowError:
        raise _wrong(BadDtype, MaskValues.WHOLES, " of 64 bits") from None
    raise _wrong(BadDtype, MaskValues.WHOLES)


def _numbers(found: list[Any]) -> npt.NDArray[np.float32]:
    """Return float32. Minus infinity blocks a key, so a number that overflows to it raises NonFinite."""
    found = [-np.inf if value == _MINUS_INF else value for value in found] if str in map(type, found) else found
    if not _are(found, int, float):
        raise _wrong(BadDtype, MaskValues.NUMBERS)
    try:
        wide = np.array(found, dtype=np.float64)
    except OverflowError:
        raise _wrong(NonFinite, MaskValues.NUMBERS, " within the range of float32") from None
    with np.errstate(over="ignore"):
        narrow = wide.astype(np.float32)
    if not (np.isfinite(narrow) | (wide == -np.inf)).all():
        raise _wrong(NonFinite, MaskValues.NUMBERS, " within the range of float32")
    return narrow


def _are(found: list[Any], *kinds: type) -> bool:
    """Whether all values are of these kinds; a subclass is accepted (IntEnum), but a boolean does not count as a number."""
    return all(issubclass(kind, kinds) and (kind is not bool or bool in kinds) for kind in set(map(type, found)))


def _wrong(error: type[InvalidInput], kind: MaskValues, more: str = "") -> InvalidInput:
    return error(f"the values of this mask must be {kind.value}{more}")


def _ragged() -> BadShape:
    return BadShape("the values of a mask must be a number, or lists of one length at each depth")
