"""MaskValues: the lists and numbers of a mask as an array of the kind's own dtype.

Laws: what has a dtype keeps it, and the service judges it; of a list each value must be what the service takes for that kind of
mask, with the service's error for anything else, because NumPy would turn nearly all into something (0.5 into True, "False" into
True, 1.99 into 1). Of any shape, the empty one too: shapes are the service's to judge.
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
    """What the values of a kind may be, in the service's words."""

    FLAGS = "true, false, 0 or 1"
    WHOLES = "whole numbers"
    NUMBERS = 'numbers or "-inf"'

    def array(self, values: Any) -> Any:
        """Raises BadShape for lists of unequal length, BadMask or BadDtype for a value of another kind, NonFinite."""
        if hasattr(values, "dtype"):
            return np.asarray(values) if isinstance(values, np.generic) else values
        shape, found = _flat(values)
        if self is MaskValues.FLAGS:
            return _flags(found).reshape(shape)
        return (_wholes(found) if self is MaskValues.WHOLES else _numbers(found)).reshape(shape)


def _flat(values: Any) -> tuple[tuple[int, ...], list[Any]]:
    """The shape, and each value as the Python object it is."""
    try:
        objects = np.asarray(values, dtype=object)
        found = objects.ravel().tolist()
        if not _PLAIN.issuperset(map(type, found)):
            found = [value.item() if hasattr(value, "item") else value for value in found]
    except Exception as error:  # a list may hold arrays, tensors and objects with ideas of their own
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
    """Minus infinity blocks, so no other number may become it."""
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
    """A subclass will do (IntEnum), but a boolean is no number."""
    return all(issubclass(kind, kinds) and (kind is not bool or bool in kinds) for kind in set(map(type, found)))


def _wrong(error: type[InvalidInput], kind: MaskValues, more: str = "") -> InvalidInput:
    return error(f"the values of this mask must be {kind.value}{more}")


def _ragged() -> BadShape:
    return BadShape("the values of a mask must be a number, or lists of one length at each depth")
