"""Masks: constructors for the kinds of mask, each named by the meaning of its values.

Invariants: a mask always states the meaning of its values, because the field's two boolean conventions contradict each other.
Shapes are those of the HTTP contract: `[S]`, `[L, S]` or `[H, L, S]` for one sequence, with `B` in front for a batch; axes of
size 1 broadcast. The service checks arrays and tensors. Lists are checked here, because NumPy would convert nearly anything
(0.5 to True, "False" to True, 1.99 to 1): BadShape for unequal lengths, BadMask, BadDtype or NonFinite for other values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from attention_client.errors import BadDtype, BadMask, BadShape, NonFinite

Align = Literal["top_left", "bottom_right"]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Mask:
    """One mask: its kind, its values if the kind has any, and its other fields; made by the functions of this module."""

    kind: str
    values: Any = None
    fields: Mapping[str, object] = dataclasses.field(default_factory=dict)


def attend(values: Any) -> Mask:
    """Mask in which true = may attend (torch `scaled_dot_product_attention`, ONNX, Keras, JAX); array, tensor or nested lists."""
    return Mask("attend", _flags(values))


def ignore(values: Any) -> Mask:
    """Mask in which true = blocked (torch `nn.MultiheadAttention`: `attn_mask`, `key_padding_mask`); values as in `attend`."""
    return Mask("ignore", _flags(values))


def lengths(values: Any) -> Mask:
    """Allow only the first n keys; n is a number or `[L]` for one sequence, `[B]` or `[B, L]` for a batch."""
    return Mask("lengths", _wholes(values))


def bias(values: Any) -> Mask:
    """Add the values to the scaled scores (ALiBi, relative position bias); `-inf` blocks a key. Values as in `attend`."""
    return Mask("bias", _numbers(values))


def causal(align: Align | None = None, *, offset: int | None = None) -> Mask:
    """Allow query i the keys up to i + offset.

    `top_left` is offset 0 (torch), `bottom_right` offset S − L (FlashAttention). Where L = S, neither is needed.
    """
    return Mask("causal", fields=_given(align=align, offset=offset))


def window(
    left: int | None = None, right: int | None = None, *, align: Align | None = None, offset: int | None = None
) -> Mask:
    """Allow query i keys from i + offset − left to i + offset + right; None is unbounded. `align`, `offset` as in `causal`."""
    return Mask("window", fields=_given(left=left, right=right, align=align, offset=offset))


def _given(**fields: object) -> dict[str, object]:
    return {name: value for name, value in fields.items() if value is not None}


def _flags(values: Any) -> Any:
    if hasattr(values, "dtype"):
        return values
    found = _array(values)
    if found.size and (found.dtype.kind not in "biu" or not np.isin(found, (0, 1)).all()):
        raise BadMask("the values of this mask must be true, false, 0 or 1")
    return found.astype(np.bool_)


def _wholes(values: Any) -> Any:
    if hasattr(values, "dtype"):
        return values
    found = _array(values)
    if found.size and (found.dtype.kind not in "iu" or (found > np.iinfo(np.int64).max).any()):
        raise BadDtype("the values of this mask must be whole numbers of 64 bits")
    return found.astype(np.int64)


def _numbers(values: Any) -> Any:
    if hasattr(values, "dtype"):
        return values
    found = _array(values)
    if found.size and found.dtype.kind not in "iuf":
        raise BadDtype("the values of this mask must be numbers")
    with np.errstate(over="ignore"):
        narrow = found.astype(np.float32)
    # Minus infinity blocks a key, so no number may overflow to it.
    if not (np.isfinite(narrow) | (found == -np.inf)).all():
        raise NonFinite("the values of this mask must be within the range of float32, or minus infinity")
    return narrow


def _array(values: Any) -> Any:
    try:
        return np.asarray(values)
    except Exception:  # a list may hold arrays, tensors or objects, whose methods raise anything  # noqa: BLE001
        raise BadShape("the values of a mask must be a number, or lists of one length at each depth") from None
