"""Masks: every named kind, lowered to one combined mask.

Legend: B sequences, N heads, L query rows, S key rows; an axis written `B|1` broadcasts.

Laws: three primitives carry all kinds (which keys are allowed, what is added to the scores, which run of keys is allowed;
`parts` are a primitive's tensors), so kinds that mean the same give the same tensor and thus the same bits; keys are never
sliced away (a kernel over fewer keys rounds differently); whether a row may attend to anything follows from the masks alone,
never from scores.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import torch

# Rows of a mask looked at in one step, in scores: a step takes about a millisecond, so a caller may let others in between.
STEP_CELLS = 2**18


class Sizes(NamedTuple):
    """B sequences, N heads, L query rows, S key rows."""

    sequences: int
    heads: int
    queries: int
    keys: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Allowed:
    """`values` bool [B|1, N|1, L|1, S|1]: true = this query row may attend to this key (torch SDPA, ONNX, Keras, JAX)."""

    values: torch.Tensor

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        return (self.values,)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Added:
    """`values` float [B|1, N|1, L|1, S|1], added to the scaled scores; -inf = may not attend."""

    values: torch.Tensor

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        return (self.values,)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Query row i of sequence b may attend to the keys low ≤ j < high; int64 [B|1, L|1] each."""

    low: torch.Tensor
    high: torch.Tensor

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        return self.low, self.high


Mask = Allowed | Added | Run


def attend(values: torch.Tensor) -> Allowed:
    return Allowed(values)


def ignore(values: torch.Tensor) -> Allowed:
    """The other polarity: true = blocked (torch.nn.MultiheadAttention's attn_mask and key_padding_mask)."""
    return Allowed(~values)


def bias(values: torch.Tensor) -> Added:
    return Added(values)


def lengths(values: torch.Tensor) -> Run:
    """Only the first n keys; `values` int64 [B|1, L|1] (D2L valid_lens, ONNX nonpad_kv_seqlen)."""
    return Run(torch.zeros(1, 1, dtype=torch.int64), values)


def window(sizes: Sizes, offset: int, left: int | None, right: int | None) -> Run:
    """Keys from i + offset − left to i + offset + right, both included; None = open (ONNX 25, xFormers)."""
    keys = sizes.keys
    rows = torch.arange(sizes.queries).unsqueeze(0)
    low = torch.zeros_like(rows) if left is None else rows + _held(offset - left)
    high = torch.full_like(rows, keys) if right is None else rows + _held(offset + right + 1)
    return Run(low.clamp(0, keys), high.clamp(0, keys))


def _held(shift: int) -> int:
    """Within int64, whatever a caller wrote; what lies beyond is past the first or the last key anyway."""
    return max(-(2**40), min(2**40, shift))


def causal(sizes: Sizes, offset: int) -> Run:
    """Keys up to i + offset: 0 = top_left (torch), S − L = bottom_right (FlashAttention), length of the past (ONNX)."""
    return window(sizes, offset, None, 0)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CombinedMask:
    """All masks of one call: booleans and-ed, biases added; `sizes` are the caller's, before a layer appends columns."""

    sizes: Sizes
    masks: tuple[Mask, ...]

    def of_sequence(self, sequence: int) -> CombinedMask:
        """The masks of one sequence, as a combined mask of its own."""
        return CombinedMask(self.sizes._replace(sequences=1), tuple(_sequence(mask, sequence) for mask in self.masks))

    def _run(self, sequence: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The intersection of all runs of keys, as low and high [L|1], or None without one."""
        runs = [mask for mask in self.masks if isinstance(mask, Run)]
        if not runs:
            return None
        low, high = _of(runs[0].low, sequence), _of(runs[0].high, sequence)
        for mask in runs[1:]:
            low = torch.maximum(low, _of(mask.low, sequence))
            high = torch.minimum(high, _of(mask.high, sequence))
        return low, high

    def allowed(self, sequence: int, rows: slice = slice(None)) -> torch.Tensor | None:
        """Which keys the query rows of one sequence may attend to: bool [N|1, L|1, S], or None where all may."""
        found: torch.Tensor | None = None
        if run := self._run(sequence):
            low, high = (_rows(bound.unsqueeze(-1), rows, -2) for bound in run)
            keys = torch.arange(self.sizes.keys)
            found = ((keys >= low) & (keys < high)).unsqueeze(0)
        for mask in self.masks:
            if isinstance(mask, Run):
                continue
            values = _rows(_of(mask.values, sequence), rows, -2)
            part = values if isinstance(mask, Allowed) else values != -torch.inf
            found = part if found is None else found & part
        return None if found is None else found.expand(*found.shape[:-1], self.sizes.keys)

    def added(self, sequence: int, dtype: torch.dtype) -> torch.Tensor | None:
        """The sum of all biases of one sequence in `dtype`: [N|1, L|1, S|1], or None without any.

        Finite biases stay finite (the sum is held within the dtype's range): only a caller's own -inf masks.
        """
        info = torch.finfo(dtype)
        # Each part by itself first: a float64 bias can be beyond float32, and -inf + inf would be NaN.
        parts = [
            _of(mask.values, sequence).to(dtype).clamp(info.min, info.max)
            for mask in self.masks
            if isinstance(mask, Added)
        ]
        if not parts:
            return None
        total = parts[0]
        for part in parts[1:]:
            total = (total + part).clamp_(info.min, info.max)
        return total

    def lowered(self, sequence: int, dtype: torch.dtype) -> torch.Tensor | None:
        """What the kernels take: bool (true = may attend) without biases, else float with -inf; [N|1, L|1, S] or None."""
        allowed, added = self.allowed(sequence), self.added(sequence, dtype)
        if added is None or allowed is None:
            return allowed
        return torch.where(allowed, added, -torch.inf)

    def masked_rows(self) -> Iterator[torch.Tensor]:
        """Step by step, which query rows may attend to nothing in at least one head: bool, B·L values in all.

        A step looks at about STEP_CELLS scores, so that a caller on an event loop can let others in between.
        """
        sizes = self.sizes
        if not self.masks:
            return
        heads = max((mask.values.shape[1] for mask in self.masks if not isinstance(mask, Run)), default=1)
        step = max(1, STEP_CELLS // (heads * sizes.keys * len(self.masks)))
        for sequence in range(sizes.sequences):
            if all(isinstance(mask, Run) for mask in self.masks):
                run = self._run(sequence)
                assert run is not None, "a combined mask of runs has a run. This is a bug."
                yield (run[1] <= run[0]).expand(sizes.queries)
                continue
            for start in range(0, sizes.queries, step):
                rows = slice(start, min(start + step, sizes.queries))
                allowed = self.allowed(sequence, rows)
                assert allowed is not None, "a combined mask of values allows or forbids. This is a bug."
                dead = (~allowed.any(-1)).any(0)
                yield dead.expand(rows.stop - rows.start)


def _sequence(mask: Mask, sequence: int) -> Mask:
    if isinstance(mask, Run):
        return Run(_of(mask.low, sequence).unsqueeze(0), _of(mask.high, sequence).unsqueeze(0))
    return dataclasses.replace(mask, values=_of(mask.values, sequence).unsqueeze(0))


def _of(values: torch.Tensor, sequence: int) -> torch.Tensor:
    return values[0 if values.shape[0] == 1 else sequence]


def _rows(values: torch.Tensor, rows: slice, axis: int) -> torch.Tensor:
    """The asked rows along `axis`, or the one row that stands for all."""
    if values.shape[axis] == 1:
        return values
    index = [slice(None)] * values.dim()
    index[axis] = rows
    return values[tuple(index)]
