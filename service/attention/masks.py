"""Masks: lowers every named kind of mask to one combined mask, and finds the rows that may attend to nothing.

Legend: B sequences, N heads, L query rows, S key rows; an axis written `B|1` broadcasts.

Invariants: Three primitives express all kinds of a request: allowed keys, values added to the scores, a run of allowed keys; a
layer's own window over keys in any order, and its bias by distance, are one more each. So masks of equal meaning give the same
tensor and the same bits. Keys are never sliced away, because a kernel over fewer keys rounds
differently. Fully masked rows are found from the masks, not from scores. Time and memory for this follow the masks' own
shapes: a mask that is the same for all rows or all keys is read once. A mask that differs by row and key is read in steps of
a few rows, so temporaries stay small.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from service.attention.progress import stop_point
from service.attention.spec import MAX_POSITION, Window
from service.attention.transfers import MAX_PINNED, on_host, to_device

# Scores of one step: a step takes less than a millisecond and its temporaries stay in the cache.
STEP_CELLS = 2**18
GPU_ROW_MULTIPLE = 8
_BLOCKED = {dtype: torch.tensor(-torch.inf, dtype=dtype) for dtype in (torch.float32, torch.float64)}


class Sizes(NamedTuple):
    sequences: int
    heads: int
    queries: int
    keys: int


class Allowed(NamedTuple):
    """Bool [B|1, N|1, L|1, S|1]: true = this query row may attend to this key (torch SDPA, ONNX, Keras, JAX)."""

    values: torch.Tensor


class Added(NamedTuple):
    """Float [B|1, N|1, L|1, S|1], added to the scaled scores; -inf = may not attend."""

    values: torch.Tensor


class Run(NamedTuple):
    """Query row i of sequence b may attend to the keys low ≤ j < high; int64 [B|1, 1, L|1, 1] each."""

    low: torch.Tensor
    high: torch.Tensor


class Near(NamedTuple):
    """Query row i may attend to the keys at positions low ≤ p ≤ high: int64 [B|1, 1, L, 1] each, and positions [B|1, 1, 1, S]."""

    low: torch.Tensor
    high: torch.Tensor
    positions: torch.Tensor


class ByDistance(NamedTuple):
    """Float values [1, N, 1, P], of which the scores get the one of their key position minus their query position.

    Value i > 0 holds from the distance `starts`[i - 1] on, int64 [1, 1, 1, P - 1], ascending. `positions` are int64
    [B|1, 1, L, 1] and `key_positions` [B|1, 1, 1, S].
    """

    values: torch.Tensor
    starts: torch.Tensor
    positions: torch.Tensor
    key_positions: torch.Tensor

    def rows(self, rows: slice) -> torch.Tensor:
        """Return the values of some rows of one sequence, without its axis, as [N, rows, S]."""
        distances = self.key_positions - self.positions[:, rows]
        runs = torch.searchsorted(self.starts.flatten(), distances, right=True)
        return self.values[:, 0].index_select(1, runs.flatten()).view(len(self.values), *distances.shape[1:])


# Each field is a tensor.
Mask = Allowed | Added | Run | Near | ByDistance


def ignore(values: torch.Tensor) -> Allowed:
    """Invert the polarity: true = blocked (torch.nn.MultiheadAttention's attn_mask and key_padding_mask)."""
    return Allowed(~values)


def lengths(values: torch.Tensor) -> Run:
    """Allow only the first n keys; `values` is int64 [B|1, L|1] (D2L valid_lens, ONNX nonpad_kv_seqlen)."""
    return Run(torch.zeros(1, 1, 1, 1, dtype=torch.int64), values[:, None, :, None])


def window(sizes: Sizes, offset: int | Sequence[int], left: int | None, right: int | None) -> Run:
    """Allow keys from i + offset − left to i + offset + right, both included; None = open (ONNX 25, xFormers).

    i is the query row. `offset` is one number, or one for each sequence.
    """
    keys = sizes.keys
    rows = torch.arange(sizes.queries).view(1, 1, -1, 1)
    low = torch.zeros_like(rows) if left is None else rows + _shifts(offset, -left)
    high = torch.full_like(rows, keys) if right is None else rows + _shifts(offset, right + 1)
    return Run(low.clamp(0, keys), high.clamp(0, keys))


def _shifts(offset: int | Sequence[int], more: int) -> torch.Tensor:
    """Return offset + more as int64 [B|1, 1, 1, 1].

    It is clamped to ±2^40, so that int64 sums cannot overflow; a larger shift allows the same keys.
    """
    offsets = [offset] if isinstance(offset, int) else offset
    return torch.tensor([max(-(2**40), min(2**40, one + more)) for one in offsets]).view(-1, 1, 1, 1)


def causal(sizes: Sizes, offset: int | Sequence[int]) -> Run:
    """Allow keys up to i + offset: 0 (top_left, torch), S − L (bottom_right, FlashAttention) or the past's length (ONNX)."""
    return window(sizes, offset, None, 0)


def of_positions(window: Window, positions: torch.Tensor, key_positions: torch.Tensor) -> Run | Near:
    """Return a layer's own mask for rows [B|1, L] and keys [B|1, S] at these positions, int64."""
    # No position is MAX_POSITION away from another.
    low = positions - (MAX_POSITION if window.left is None else window.left)
    high = positions + (MAX_POSITION if window.right is None else window.right)
    if not bool((key_positions.diff() >= 0).all()):
        # Its table is made for one sequence at a time, when the limits are checked.
        return Near(low[:, None, :, None], high[:, None, :, None], key_positions[:, None, None])
    # The keys ascend, so those that a row may attend to are a run.
    sequences = max(len(positions), len(key_positions))
    keys, low, high = (x.expand(sequences, -1).contiguous() for x in (key_positions, low, high))
    first, end = torch.searchsorted(keys, low), torch.searchsorted(keys, high, right=True)
    return Run(first[:, None, :, None], end[:, None, :, None])


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CombinedMask:
    """All masks of one call: booleans are and-ed, biases added; `sizes` exclude the columns that a layer appends."""

    sizes: Sizes
    masks: tuple[Mask, ...]

    def of_sequence(self, sequence: int) -> CombinedMask:
        """Return the masks of one sequence as their own combined mask."""
        masks = [type(mask)(*[_of_sequence(part, sequence)[None] for part in mask]) for mask in self.masks]
        return CombinedMask(self.sizes._replace(sequences=1), tuple(masks))

    def run(self, sequence: int) -> Run | None:
        """Return the intersection of all runs of one sequence, low and high [1, L|1, 1], or None if there is no run."""
        runs = [mask for mask in self.masks if isinstance(mask, Run)]
        if not runs:
            return None
        lows, highs = ([_of_sequence(bound, sequence) for bound in bounds] for bounds in zip(*runs, strict=True))
        return Run(functools.reduce(torch.maximum, lows), functools.reduce(torch.minimum, highs))

    @property
    def table_shape(self) -> tuple[int, int, int]:
        """Shape [N|1, L|1, S] of the table of `lowered` without extra keys; an axis has full size if any mask has it so."""
        heads, rows = (max((part.shape[axis] for mask in self.masks for part in mask), default=1) for axis in (1, 2))
        return heads, rows, self.sizes.keys

    def tables(self, sequence: int) -> list[torch.Tensor]:
        """Return the values of one sequence's masks, floats of Added, else bool: [N|1, L|1, S|1], not expanded."""
        found = [_of_sequence(mask.values, sequence) for mask in self.masks if isinstance(mask, Allowed | Added)]
        for mask in self.masks:
            if isinstance(mask, Near):
                low, high, positions = (_of_sequence(part, sequence) for part in mask)
                found.append((positions >= low).logical_and_(positions <= high))
        return found

    def by_distance(self, sequence: int) -> list[ByDistance]:
        """Return the biases by distance of one sequence, in fields without its axis."""
        found = [mask for mask in self.masks if isinstance(mask, ByDistance)]
        return [ByDistance(*(_of_sequence(part, sequence) for part in mask)) for mask in found]

    def lowered(
        self, sequence: int, dtype: torch.dtype, extra_keys: int = 0, like: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the kernels' mask: the sum of biases in `dtype`, -inf where a key is not allowed.

        Its shape is [N|1, L|1, S + extra_keys]; columns that a layer appends are zero. It is computed in blocks of rows, so
        temporaries stay small. Finite biases stay finite: only a caller's own -inf masks. If `like` is on a GPU, the table
        lies as a copy to it wants it.
        """
        heads, rows, keys = self.table_shape
        table = _new_table((heads, rows, keys + extra_keys), dtype, like)
        if extra_keys:
            table[..., keys:].zero_()
        tables, run = self.tables(sequence), self.run(sequence)
        biases = [values for values in tables if values.dtype != torch.bool]
        far = self.by_distance(sequence)
        # If no sum can leave the dtype's range, no clamp is needed, and -inf stays -inf by itself.
        is_clamped = sum(map(_largest, [*biases, *(one.values for one in far)])) > torch.finfo(dtype).max / 2
        blocking = [values for values in tables if is_clamped or values.dtype == torch.bool]
        step = max(1, STEP_CELLS // (heads * keys))
        for start in range(0, rows, step):
            block = slice(start, start + step)
            part = table[:, block, :keys]
            added = [*(one.rows(block) for one in far), *(_of_rows(values, block) for values in biases)]
            _add(part, added, is_clamped=is_clamped)
            in_run = [] if run is None else [_in_run(run, block, keys)]
            for allowed in [*(_allowed(_of_rows(values, block)) for values in blocking), *in_run]:
                torch.where(allowed, part, _BLOCKED[dtype], out=part)
            stop_point()
        return table


def lowered_on(
    mask: CombinedMask | None, sequence: int, like: torch.Tensor, extra_keys: int = 0
) -> torch.Tensor | None:
    """Return the kernels' mask of one sequence on the device of `like`, or None if it changes nothing.

    On a CPU its dtype is float32, or float64 for a float64 `like`; on a GPU it is that of `like`. Masks that change nothing give
    the bits of no mask. Columns that a layer appends are never masked.
    """
    if mask is None:
        return None
    table = mask.lowered(sequence, torch.promote_types(like.dtype, torch.float32), extra_keys, like)
    # For most masks the first row already decides.
    if not table[:, 0].any() and not any(block.any() for block in _in_steps(table)):
        return None
    if like.device.type == "cpu":
        return table
    # CUDA kernels take a bias only in the query's dtype, and multiply it by log2(e) in float32. Neither may make it infinite;
    # half of float32's range stays finite.
    most = min(torch.finfo(like.dtype).max, torch.finfo(table.dtype).max / 2)
    if any(isinstance(one, Added | ByDistance) for one in mask.masks):
        for block in _in_steps(table):
            torch.where(block == -torch.inf, block, block.clamp(-most, most), out=block)
    whole = table.as_strided((*table.shape[:2], table.stride(1)), table.stride())
    return to_device(whole, like)[..., : table.shape[2]]


def _new_table(shape: tuple[int, int, int], dtype: torch.dtype, like: torch.Tensor | None) -> torch.Tensor:
    """Return new memory of this shape. For a GPU its rows begin at multiples of some values; others torch would copy there."""
    if like is None or like.device.type == "cpu":
        return torch.empty(shape, dtype=dtype)
    heads, rows, keys = shape
    padded = (heads, rows, -(-keys // GPU_ROW_MULTIPLE) * GPU_ROW_MULTIPLE)
    whole = on_host(padded, dtype, like) if math.prod(padded) <= MAX_PINNED else torch.empty(padded, dtype=dtype)
    whole[..., keys:].zero_()
    return whole[..., :keys]


def _in_steps(values: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield some rows of [N, L, S] at a time; there is a stop point behind each of these steps."""
    heads, _, keys = values.shape
    for rows in values.split(max(1, STEP_CELLS // (heads * keys)), dim=1):
        yield rows
        stop_point()


def _add(part: torch.Tensor, biases: Sequence[torch.Tensor], *, is_clamped: bool) -> None:
    """Write the sum of the biases into `part`, from left to right; `is_clamped` clamps each sum to the range of its dtype."""
    if is_clamped:
        # Each bias is clamped first: a float64 bias can exceed float32, and -inf + inf would be NaN.
        info = torch.finfo(part.dtype)
        biases = [values.to(part.dtype).clamp(info.min, info.max) for values in biases]
    part.copy_(biases[0]) if biases else part.zero_()
    for values in biases[1:]:
        part.add_(values.to(part.dtype))
        if is_clamped:
            part.clamp_(info.min, info.max)


def _largest(bias_values: torch.Tensor) -> float:
    """Return an upper bound of the magnitude of the finite biases [N|1, L|1, S|1]."""
    if bias_values.dtype == torch.float16:
        return torch.finfo(torch.float16).max
    extremes = [block.nan_to_num(neginf=0.0).aminmax() for block in _in_steps(bias_values)]
    return max(max(-float(low), float(high)) for low, high in extremes)


def _of_sequence(values: torch.Tensor, sequence: int) -> torch.Tensor:
    return values[0 if values.shape[0] == 1 else sequence]


def _allowed(values: torch.Tensor) -> torch.Tensor:
    """Return which keys the values of a table allow: a bias blocks where it is -inf."""
    return values if values.dtype == torch.bool else values != -torch.inf


def _of_rows(values: torch.Tensor, rows: slice) -> torch.Tensor:
    """Return the given query rows (the last axis but one), or the one row that broadcasts to all."""
    return values if values.shape[-2] == 1 else values[..., rows, :]


def _in_run(run: Run, rows: slice, keys: int) -> torch.Tensor:
    """Return which keys are in the runs of these query rows of one sequence: bool [1, L|1, S]."""
    low, high = (_of_rows(bound, rows) for bound in run)
    places = torch.arange(keys)
    allowed = places < high
    return allowed & (places >= low) if low.any() else allowed


def masked_rows(mask: CombinedMask) -> Iterator[torch.Tensor]:
    """Yield, step by step, which query rows may attend to no key in at least one head: bool, B·L values in all.

    A step covers about STEP_CELLS scores.
    """
    for sequence in range(mask.sizes.sequences):
        yield from _masked_rows_of(mask, sequence)


def _masked_rows_of(mask: CombinedMask, sequence: int) -> Iterator[torch.Tensor]:
    """Yield the masked rows of one sequence; each mask is read in the shape that it has."""
    queries, keys = mask.sizes.queries, mask.sizes.keys
    every, run = mask.tables(sequence), mask.run(sequence)
    by_row = [_allowed(values) for values in every if values.shape[-1] == 1]
    by_key = [_allowed(values) for values in every if values.shape[-1] > 1 and values.shape[-2] == 1]
    tables = [values for values in every if values.shape[-1] > 1 and values.shape[-2] > 1]
    # How many of the first j keys all rows allow, j = 0 … S: int32 [N|1, S + 1].
    counts = torch.arange(keys + 1, dtype=torch.int32).unsqueeze(0)
    if by_key:
        counts = F.pad(functools.reduce(operator.and_, by_key)[:, 0].cumsum(-1, dtype=torch.int32), (1, 0))
    step = max(1, STEP_CELLS // (mask.table_shape[0] * (keys if tables else 1)))
    for start in range(0, queries, step):
        rows = slice(start, min(start + step, queries))
        if tables:
            in_run = [] if run is None else [_in_run(run, rows, keys)]
            parts = [*(_allowed(_of_rows(table, rows)) for table in tables), *by_key, *in_run]
            # As bytes, because `any` of booleans over an axis takes ten times as long.
            has_key = functools.reduce(operator.and_, parts).view(torch.uint8).amax(-1).bool()
        elif run is None:
            has_key = counts[:, -1:] > 0
        else:
            low, high = (_of_rows(bound, rows)[0, :, 0] for bound in run)
            has_key = counts[:, high] > counts[:, low]
        for allowed in by_row:
            has_key = has_key & _of_rows(allowed, rows)[..., 0]
        yield (~has_key).any(0).expand(rows.stop - rows.start)
