"""Masks: which keys a query may see, said by the name of what the values mean.

Laws: a mask always says what its values mean, because the field's two boolean conventions contradict each other; nothing is
computed here, the service checks shapes and values, and `mask_list.py` what NumPy would bend. Shapes are those of the HTTP
contract: `[S]`, `[L, S]` or `[H, L, S]` for one sequence, with `B` in front for a batch; axes of size 1 broadcast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from attention_client.mask_values import MaskValues

Align = Literal["top_left", "bottom_right"]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Mask:
    """One mask: its kind, its values where the kind has any, its other fields; made by the functions of this module."""

    kind: str
    values: Any = None
    fields: Mapping[str, object] = dataclasses.field(default_factory=dict)


def attend(values: Any) -> Mask:
    """True = may attend: torch `scaled_dot_product_attention`, ONNX, Keras, JAX. An array, a tensor or nested lists."""
    return Mask("attend", MaskValues.FLAGS.array(values))


def ignore(values: Any) -> Mask:
    """True = blocked: torch `nn.MultiheadAttention` (`attn_mask`, `key_padding_mask`). An array, a tensor or nested lists."""
    return Mask("ignore", MaskValues.FLAGS.array(values))


def lengths(values: Any) -> Mask:
    """Only the first n keys: a number or `[L]` for one sequence, `[B]` or `[B, L]` for a batch."""
    return Mask("lengths", MaskValues.WHOLES.array(values))


def bias(values: Any) -> Mask:
    """Added to the scaled scores, `-inf` blocks: ALiBi, relative position bias. An array, a tensor or nested lists."""
    return Mask("bias", MaskValues.NUMBERS.array(values))


def causal(align: Align | None = None, *, offset: int | None = None) -> Mask:
    """No looking ahead: query i sees keys up to i + offset.

    `top_left` is offset 0 (torch), `bottom_right` offset S − L (FlashAttention); neither is needed where L = S.
    """
    return Mask("causal", fields=_given(align=align, offset=offset))


def window(
    left: int | None = None, right: int | None = None, *, align: Align | None = None, offset: int | None = None
) -> Mask:
    """Keys from i + offset − left to i + offset + right; None is open. `align` and `offset` as in `causal`."""
    return Mask("window", fields=_given(left=left, right=right, align=align, offset=offset))


def _given(**fields: object) -> dict[str, object]:
    return {name: value for name, value in fields.items() if value is not None}
