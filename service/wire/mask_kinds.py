"""Mask kinds: decodes the masks of a request to the masks of `attention`.

Invariants: Only the rank decides what an axis means (`[S]`, `[L, S]`, `[H, L, S]` for one sequence, with B in front for a batch),
so that B = L = S is never ambiguous. An axis has its full size or 1. `lengths` never broadcast. Nothing here reads scores.
"""

from __future__ import annotations

import torch

from service.attention import masks
from service.attention.masks import Mask, Sizes
from service.errors import BadMask, CausalAlignRequired
from service.wire.schemas import (
    AttendMask,
    BiasMask,
    CausalMask,
    IgnoreMask,
    LengthsMask,
    MaskField,
    WindowMask,
)
from service.wire.tensor_values import TensorField, words_of
from service.wire.tensors import TensorKind, decode_tensor


def values_of(field: MaskField, values_param: str) -> tuple[object, TensorField] | None:
    """Return a mask's values and their field; None if its kind has no values."""
    match field:
        case AttendMask() | IgnoreMask():
            return field.values, TensorField(values_param, TensorKind.BOOL)
        case BiasMask():
            return field.values, TensorField(values_param, TensorKind.BIAS)
        case LengthsMask():
            return field.values, TensorField(values_param, TensorKind.INT)
        case _:
            return None


def decode_mask(field: MaskField, sizes: Sizes, *, is_batch: bool, param: str, values_param: str) -> Mask:
    """Return one mask of a request with these sizes; `param` points to it, `values_param` to its values.

    Raises BadMask, CausalAlignRequired, NonFinite and the errors of `decode_tensor`.
    """
    match field:
        case AttendMask():
            return masks.attend(_values(field.values, TensorKind.BOOL, sizes, is_batch, values_param))
        case IgnoreMask():
            return masks.ignore(_values(field.values, TensorKind.BOOL, sizes, is_batch, values_param))
        case BiasMask():
            return masks.bias(_values(field.values, TensorKind.BIAS, sizes, is_batch, values_param))
        case LengthsMask():
            return masks.lengths(_lengths(field.values, sizes, is_batch, values_param))
        case CausalMask():
            return masks.causal(sizes, _offset(field, sizes, param))
        case WindowMask():
            return masks.window(sizes, _offset(field, sizes, param), field.left, field.right)


def _values(value: object, kind: TensorKind, sizes: Sizes, is_batch: bool, param: str) -> torch.Tensor:
    """Return [B|1, N|1, L|1, S|1] from a mask written as `[S]`, `[L, S]` or `[H, L, S]`, with B in front for a batch."""
    tensor = decode_tensor(value, param=param, kind=kind).tensor
    b, n, queries, keys = sizes
    full = {1: (keys,), 2: (queries, keys), 3: (n, queries, keys)}
    allowed = {rank + 1: (b, *shape) for rank, shape in full.items()} if is_batch else full
    expected = allowed.get(tensor.dim())
    if expected is None or any(have not in (want, 1) for have, want in zip(tensor.shape, expected, strict=True)):
        raise BadMask(_shape_words(tensor, sizes, is_batch, param), param=param)
    if not is_batch:
        tensor = tensor.unsqueeze(0)
    return tensor.reshape(tensor.shape[0], *(1,) * (4 - tensor.dim()), *tensor.shape[1:])


def _shape_words(tensor: torch.Tensor, sizes: Sizes, is_batch: bool, param: str) -> str:
    b, n, queries, keys = sizes
    lead = f"{b}, " if is_batch else ""
    rows = f"[{lead}{keys}], [{lead}{queries}, {keys}] or [{lead}{n}, {queries}, {keys}]"
    return f"{words_of(param)} must be {rows} (any axis may be 1), got {list(tensor.shape)}"


def _lengths(value: object, sizes: Sizes, is_batch: bool, param: str) -> torch.Tensor:
    """Return int64 [B|1, L|1] from a number or `[L]` for one sequence, `[B]` or `[B, L]` for a batch."""
    if isinstance(value, int) and not isinstance(value, bool):
        # Clamp the value so that it fits into int64; one out of range stays out of range for the check below.
        tensor = torch.tensor(max(-1, min(value, sizes.keys + 1)))
    else:
        tensor = decode_tensor(value, param=param, kind=TensorKind.INT).tensor.to(torch.int64)
    b, queries = sizes.sequences, sizes.queries
    shapes = ((b,), (b, queries)) if is_batch else ((), (queries,))
    if tuple(tensor.shape) not in shapes:
        words = f"[{b}] or [{b}, {queries}]" if is_batch else f"a number or [{queries}]"
        raise BadMask(f"lengths must be {words}, got {list(tensor.shape)}", param=param)
    if bool(((tensor < 0) | (tensor > sizes.keys)).any()):
        raise BadMask(f"lengths must be from 0 to {sizes.keys}, the number of keys", param=param)
    return tensor.reshape(b, -1) if is_batch else tensor.reshape(1, -1)


def _offset(field: CausalMask | WindowMask, sizes: Sizes, param: str) -> int:
    """Return the position of query row 0 among the keys; raises CausalAlignRequired if it is not given and L is not S."""
    if field.align is not None and field.offset is not None:
        raise BadMask("a mask takes align or offset, not both", param=f"{param}/offset")
    if field.offset is not None:
        return field.offset
    if field.align is None and sizes.queries != sizes.keys:
        raise CausalAlignRequired(
            f"{sizes.queries} query rows meet {sizes.keys} keys, so say how they line up: align top_left (query 0 at key 0), "
            "bottom_right (the last query at the last key), or offset",
            param=param,
        )
    return sizes.keys - sizes.queries if field.align == "bottom_right" else 0
