"""Masks: constructors for the kinds of mask, each named by the meaning of its values.

Invariants: a mask always states the meaning of its values, because two boolean conventions are in use and contradict each other.
`axes` names the axes of values: b sequences, h heads, l query rows, s keys; a size of 1 broadcasts. For a batch it is required
where values have 2 or 3 axes. The service checks shapes, arrays and tensors. Lists are checked here, because NumPy would convert
nearly anything (0.5 to True, "False" to True, 1.99 to 1). Unequal lengths raise BadShape; wrong values raise BadMask, BadDtype
or NonFinite.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from attention_client.arrays import Summarized
from attention_client.errors import BadDtype, BadMask, BadShape, InvalidInput, NonFinite
from attention_client.options import check_count

Align = Literal["top_left", "bottom_right"]
Axes = Literal["s", "ls", "hls", "bs", "bls", "bhls"]
Offset = int | Sequence[int] | None


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class Mask(Summarized):
    """One mask: its kind, its values if the kind has any, and its other fields; made by the functions of this module."""

    kind: str
    values: Any = None
    fields: Mapping[str, object] = dataclasses.field(default_factory=dict)


def attend(values: Any, *, axes: Axes | None = None) -> Mask:
    """Mask in which true = may attend (torch `scaled_dot_product_attention`, ONNX, Keras, JAX): array, tensor or nested lists."""
    return Mask("attend", _flags(values), given(axes=axes))


def ignore(values: Any, *, axes: Axes | None = None) -> Mask:
    """Mask in which true = blocked (NumPy tutorials; for torch `nn.MultiheadAttention` see below); values as in `attend`."""
    return Mask("ignore", _flags(values), given(axes=axes))


def lengths(values: Any) -> Mask:
    """Allow only the first n keys; n is a number or `[L]` for one sequence, `[B]` or `[B, L]` for a batch."""
    return Mask("lengths", converted(values, np.int64, "iu", BadDtype, "whole numbers of 64 bits"))


def bias(values: Any, *, axes: Axes | None = None) -> Mask:
    """Add the values to the scaled scores (ALiBi, relative position bias); `-inf` blocks a key. Values as in `attend`."""
    values = converted(values, np.float32, "iuf", BadDtype, "numbers")
    return Mask("bias", values, given(axes=axes))


def attn_mask(values: Any, num_heads: int) -> Mask:
    """The `attn_mask` of torch `nn.MultiheadAttention`: an array or tensor `[L, S]` or `[B·H, L, S]`; true = blocked, or floats.

    Raises BadDtype, BadShape, or InvalidInput for a list or less than one head.
    """
    check_count(num_heads, "num_heads")
    shape = shape_of(values, "attn_mask")
    if len(shape) == 2:  # noqa: PLR2004
        return _of_torch(values, "ls")
    if len(shape) != 3 or shape[0] % num_heads:  # noqa: PLR2004
        raise BadShape(f"attn_mask must be [L, S] or [B * {num_heads}, L, S], got {list(shape)}")
    if shape[0] == num_heads:  # one sequence, with a batch axis or without
        return _of_torch(values, "hls")
    return _of_torch(values.reshape(shape[0] // num_heads, num_heads, *shape[1:]), "bhls")


def key_padding_mask(values: Any) -> Mask:
    """The `key_padding_mask` of torch `nn.MultiheadAttention`: an array or tensor `[S]` or `[B, S]`; true = blocked, or floats.

    Raises BadDtype, BadShape, or InvalidInput for a list.
    """
    shape = shape_of(values, "key_padding_mask")
    if len(shape) not in (1, 2):
        raise BadShape(f"key_padding_mask must be [S] or [B, S], got {list(shape)}")
    return _of_torch(values, "s" if len(shape) == 1 else "bs")


def shape_of(array: Any, name: str) -> tuple[int, ...]:
    """Return the shape of an array or tensor; raises InvalidInput for anything else."""
    if not hasattr(array, "shape"):
        raise InvalidInput(f"{name} must be a NumPy array or a torch tensor, got {type(array).__name__}")
    return tuple(array.shape)


def _of_torch(values: Any, axes: Axes) -> Mask:
    if str(values.dtype).endswith("bool"):
        return ignore(values, axes=axes)
    if "float" not in str(values.dtype):
        raise BadDtype("a mask of torch has booleans or floats")
    return bias(values, axes=axes)


def causal(align: Align | None = None, *, offset: Offset = None) -> Mask:
    """Allow query i the keys up to i + offset; `offset` is one number, or one for each sequence of a batch.

    `top_left` is offset 0 (torch), `bottom_right` offset S − L (FlashAttention). Where L = S, neither is needed.
    """
    return Mask("causal", fields=given(align=align, offset=offset))


def window(
    left: int | None = None, right: int | None = None, *, align: Align | None = None, offset: Offset = None
) -> Mask:
    """Allow query i keys from i + offset − left to i + offset + right; None is unbounded. `align`, `offset` as in `causal`."""
    return Mask("window", fields=given(left=left, right=right, align=align, offset=offset))


def given(**fields: object) -> dict[str, object]:
    """Return the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def _flags(values: Any) -> Any:
    return converted(values, np.bool_, "biu", BadMask, "true, false, 0 or 1")


def converted(
    values: Any, dtype: type, kinds: str, error: type[InvalidInput], wanted: str, name: str = "the values of this mask"
) -> Any:
    """Return lists as an array of the dtype; arrays and tensors as they are."""
    if hasattr(values, "dtype"):
        return values
    try:
        found = np.asarray(values)
    except Exception:  # a list may hold arrays, tensors or objects, whose methods raise anything  # noqa: BLE001
        raise BadShape(f"{name} must be a number, or lists of one length at each depth") from None
    if found.size and found.dtype.kind not in kinds:
        raise error(f"{name} must be {wanted}")
    with np.errstate(over="ignore"):
        made: Any = found.astype(dtype)
    if dtype is not np.float32 and not (made == found).all():
        raise error(f"{name} must be {wanted}")
    # Minus infinity blocks a key, so no number may overflow to it.
    if dtype is np.float32 and not (np.isfinite(made) | (found == -np.inf)).all():
        raise NonFinite("the values of this mask must be within the range of float32, or minus infinity")
    return made
