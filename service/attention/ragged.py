"""Ragged packing: packs sequences of any lengths as rows of one matrix, and splits them again.

Legend: B sequences, L rows of one sequence, T rows of all together, R = T plus filler rows, D features, K = D padded.

Invariants: `split` undoes `pack` exactly. No row represents a position that does not exist (P3). Filler rows only round the
matrix up to a size at which a row's BLAS result does not depend on its neighbours (P1; measured, `docs/performance.md`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

ROW_MULTIPLE = 4
# At an inner width that is no multiple of 4, oneMKL's rounding depends on the number of rows in most layers.
WIDTH_MULTIPLE = 4


def padded_width(width: int) -> int:
    return -(-width // WIDTH_MULTIPLE) * WIDTH_MULTIPLE


def padded_rows(tokens: int, least: int) -> int:
    """Round T up to R; `least` is the least row count of the projections of these rows (`projection.py`)."""
    return -(-max(tokens, least) // ROW_MULTIPLE) * ROW_MULTIPLE


def pack(parts: Sequence[torch.Tensor], rows: int, like: torch.Tensor) -> torch.Tensor:
    """Pack parts [B, L, D] (any float dtype, B and L) in order as x_RK with `rows` rows, in the dtype and device of `like`."""
    width = parts[0].shape[-1]
    packed = like.new_empty(rows, padded_width(width))
    flat = [part.reshape(-1, width) for part in parts]
    tokens = sum(map(len, flat))
    place = packed[:tokens, :width]
    if all(part.dtype == like.dtype and part.device == like.device for part in flat):
        torch.cat(flat, out=place)
    else:
        for part, rows_of_it in zip(flat, place.split([len(part) for part in flat]), strict=True):
            rows_of_it.copy_(part)
    fill(packed, tokens, width)
    return packed


def fill(packed: torch.Tensor, tokens: int, width: int) -> None:
    """Write zeros below the tokens and beside the width, where no position is."""
    if tokens < packed.shape[0]:
        packed[tokens:].zero_()
    if width < packed.shape[1]:
        packed[:, width:].zero_()


def split(packed: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Invert `pack`: return views [*shape, width] of the rows, in order; filler rows are left out."""
    counts = [math.prod(shape) for shape in shapes]
    # Most parts are one sequence, and the split gives them that shape: a `view` for each would cost more than the check.
    rows = packed.unsqueeze(0).split([*counts, len(packed) - sum(counts)], dim=1)
    width = packed.shape[1]
    return [part if shape[0] == 1 else part.view(*shape, width) for part, shape in zip(rows, shapes, strict=False)]
