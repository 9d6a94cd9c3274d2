"""Masks: constructors for the kinds of mask, each named by the meaning of its values.

Invariants: a mask always states the meaning of its values, because the field's two boolean conventions contradict each other.
The service checks shapes and values; `mask_values.py` checks only what NumPy would convert. Shapes are those of the HTTP
contract: `[S]`, `[L, S]` or `[H, L, S]` for one sequence, with `B` in front for a batch; axes of size 1 broadcast.
Functions that take `values` raise BadShape, BadMask, BadDtype or NonFinite for lists that are not valid.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from attention_client.mask_values import MaskValues

Align = Literal["top_left", "bottom_right"]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Mask:
    """One mask: its kind, its values if the kind has any, and its other fields; made by the functions of this module."""

    kind: str
    values: Any = None
    fields: Mapping[str, object] = dataclasses.field(default_factory=dict)


def attend(values: Any) -> Mask:
    """Mask in which true = may attend (torch `scaled_dot_product_attention`, ONNX, Keras, JAX); array, tensor or nested lists."""
    return Mask("attend", MaskValues.FLAGS.array(values))


def ignore(values: Any) -> Mask:
    """Mask in which true = blocked (torch `nn.MultiheadAttention`: `attn_mask`, `key_padding_mask`); values as in `attend`."""
    return Mask("ignore", MaskValues.FLAGS.array(values))


def lengths(values: Any) -> Mask:
    """Allow only the first n keys; n is a number or `[L]` for one sequence, `[B]` or `[B, L]` for a batch."""
    return Mask("lengths", MaskValues.WHOLES.array(values))


def bias(values: Any) -> Mask:
    """Add the values to the scaled scores (ALiBi, relative position bias); `-inf` blocks a key. Values as in `attend`."""
    return Mask("bias", MaskValues.NUMBERS.array(values))


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
