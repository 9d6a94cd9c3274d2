"""Projections: pack sequences of any lengths as rows of one matrix, compute y = x·Wᵀ + b, and split the result.

Lives here: torch's product (`Plain`), oneDNN's with a weight packed once (`Packed`), how many rows each takes, and packed rows.

Legend: B sequences, L rows of one sequence, T rows of all together, R = T plus filler rows, D features, K = D padded.

Invariants: `split` undoes `pack` exactly. No row represents a position that does not exist (P3). Filler rows only round the
matrix up: from `least_rows` on, in multiples of ROW_MULTIPLE, a row's bits depend on the row alone (P1; measured,
docs/internals/performance.md). The check of each layer may raise `least_rows` (`self_check.py`): on a processor with AMX,
products of fewer than 48 rows in bfloat16 round differently. For each row count that oneDNN gets it compiles code and keeps
it, half a megabyte and more. So it gets only the row counts of `row_counts`, which a table decides: measured at start, they
would differ between workers.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F

from service.attention.progress import stop_point
from service.attention.transfers import on_host

ROW_MULTIPLE = 4
# At an inner width that is no multiple of 4, oneMKL's rounding depends on the number of rows in most layers.
WIDTH_MULTIPLE = 4
# Below these sizes oneMKL and torch's own oneDNN choose kernels whose rounding depends on the number of rows: fewer than 12
# rows in float32, products of at most 4,096 multiply-adds in the 16-bit dtypes.
MIN_ROWS = 12
MIN_HALF_PRODUCT = 4096
# Row counts of products with a packed weight, largest first: every multiple of ROW_MULTIPLE is a sum of few of them. The result
# of a single product needs no copy. So 9 to 16 short requests make one or two products. Above 256 rows a result leaves the cache
# before it is copied.
SIZES = (256, 240, 224, 208, 192, 160, 128, 64, 48, 32, 16, 8, 4)
# Larger ones by instruction set and dtype, where one product takes clearly less time than pieces with copies: 8 % less in float32
# and 33 to 38 % in bfloat16. Without AMX (AMD EPYC) it is up to 5 %, and only where the rows are one product exactly.
LARGE_SIZES: Mapping[tuple[str, torch.dtype], tuple[int, ...]] = {
    ("AMX", torch.float32): (1024, 512),
    ("AMX", torch.bfloat16): (1024, 512),
}
# Most multiply-adds of a product of a large size, some 10 ms in float32: a batch stops only between products.
MAX_LARGE_WORK = 2**30
# A product reads all weights, which exceed a core's cache; that takes as long as these many rows.
PRODUCT_ROWS = 10
# Rows of a piece of an unpacked product. From twice as many rows on it is computed in pieces; the last takes the rest, so it is
# never small. A batch may stop between two pieces (12 ms each at a width of 512 in float64).
PIECE_ROWS = 1024

# How cuBLAS rounds in float32 depends on the row count. Where the self-check finds that, rows on a GPU are products of BLOCK_ROWS
# each, all in one call. A single one rounds differently from two and more (on an H200, docs/gpu.md), so there are at least two.
BLOCK_ROWS = 128
ROWS_IN_BLOCKS = 2 * BLOCK_ROWS

# Operators that torch's own compiler emits for a linear layer on a CPU. They are not public, so code checks that they exist.
_ops = torch.ops.mkldnn


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Projection(abc.ABC):
    """A product with W [out, K]; K is the input width, zero-padded to a multiple of 4."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    @property
    def num_weights(self) -> int:
        return self.weight.numel()

    @property
    def num_bytes(self) -> int:
        return self.num_weights * self.weight.element_size()

    @property
    @abc.abstractmethod
    def least_rows(self) -> int:
        """The row count from which on a row's bits depend on the row alone, as far as is known before the self-check."""

    @abc.abstractmethod
    def __call__(self, x_RK: torch.Tensor, least_rows: int, /) -> torch.Tensor:
        """Return x·Wᵀ + b for `padded_rows` rows, in products of at least `least_rows` rows."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Plain(Projection):
    """A product with W [out, K] in torch's own layout."""

    @property
    def least_rows(self) -> int:
        if self.weight.dtype not in (torch.bfloat16, torch.float16):
            return MIN_ROWS
        return max(MIN_ROWS, MIN_HALF_PRODUCT // self.num_weights + 1)

    def __call__(self, x_RK: torch.Tensor, least_rows: int, /) -> torch.Tensor:
        if row_multiple(least_rows, x_RK.device) == BLOCK_ROWS:
            return self._in_blocks(x_RK)
        if len(x_RK) < 2 * PIECE_ROWS or x_RK.device.type != "cpu":
            return F.linear(x_RK, self.weight, self.bias)
        y = x_RK.new_empty(len(x_RK), self.weight.shape[0])
        sizes = [PIECE_ROWS] * (len(x_RK) // PIECE_ROWS - 1)
        sizes.append(len(x_RK) - sum(sizes))
        for part, place in zip(x_RK.split(sizes), y.split(sizes), strict=True):
            place.copy_(F.linear(part, self.weight, self.bias))
            stop_point()
        return y

    def _in_blocks(self, x_RK: torch.Tensor) -> torch.Tensor:
        x_BRK = x_RK.view(-1, BLOCK_ROWS, x_RK.shape[1])
        y_BRW = torch.bmm(x_BRK, self.weight.T.expand(len(x_BRK), -1, -1))
        return (y_BRW if self.bias is None else y_BRW.add_(self.bias)).flatten(0, 1)

    def rows(self, start: int, stop: int) -> Plain:
        """Return the projection to some of the outputs, over the same memory."""
        return Plain(self.weight[start:stop], None if self.bias is None else self.bias[start:stop])


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Packed(Projection):
    """A product with W [out, K] in oneDNN's blocks: torch's product packs it for every batch, a third of a small batch's time."""

    sizes: tuple[int, ...]
    """Row counts that it computes, largest first; the same in all products of a layer, which share rows."""

    @property
    def least_rows(self) -> int:
        return ROW_MULTIPLE

    def __call__(self, x_RK: torch.Tensor, least_rows: int, /) -> torch.Tensor:
        num_rows = x_RK.shape[0]
        sizes = in_sizes(num_rows, least_rows, self.sizes)
        if len(sizes) == 1:
            return self._product(x_RK)
        y = x_RK.new_empty(num_rows, self.weight.shape[0])
        for part, place in zip(x_RK.split_with_sizes(sizes), y.split_with_sizes(sizes), strict=True):
            place.copy_(self._product(part))
            stop_point()
        return y

    def _product(self, x_RK: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _ops._linear_pointwise.default(x_RK, self.weight, self.bias, "none", [], "")  # noqa: SLF001
        return y


@functools.lru_cache(4096)
def in_sizes(rows: int, least: int, sizes: tuple[int, ...]) -> Sequence[int]:
    """Return `sizes` of at least `least`, largest first; their sum is `rows` or up to `least` - 1 more, for the least time."""
    whole = max(0, rows // sizes[0] - 1)
    rest = rows - whole * sizes[0]  # less than two of the largest size
    fewest = _fewest(least, sizes)
    costs = {total: total + PRODUCT_ROWS * len(fewest[total]) for total in range(rest, rest + least) if total in fewest}
    return [sizes[0]] * whole + fewest[min(costs, key=lambda total: costs[total])]


@functools.cache
def _fewest(least: int, sizes: tuple[int, ...]) -> Mapping[int, list[int]]:
    """Return the fewest `sizes` of at least `least`, largest first, for each sum of less than two of the largest."""
    fewest: dict[int, list[int]] = {0: []}
    for total in range(ROW_MULTIPLE, 2 * sizes[0] + least, ROW_MULTIPLE):
        found = [[*fewest[total - size], size] for size in sizes if size >= least and total - size in fewest]
        if found:
            shortest = min(found, key=len)
            fewest[total] = sorted(shortest, reverse=True)
    return fewest


def row_multiple(least_rows: int, device: torch.device) -> int:
    """Return what unpacked rows are rounded up to: BLOCK_ROWS on a GPU from ROWS_IN_BLOCKS on."""
    return BLOCK_ROWS if device.type != "cpu" and least_rows >= ROWS_IN_BLOCKS else ROW_MULTIPLE


def row_counts(dtype: torch.dtype, num_weights: int) -> tuple[int, ...]:
    """Return the row counts of packed products in `dtype` with at most `num_weights` weights on this processor, largest first."""
    large = LARGE_SIZES.get((instruction_set(), dtype), ())
    return (*(size for size in large if size * num_weights <= MAX_LARGE_WORK), *SIZES)


@functools.cache
def instruction_set() -> str:
    """Return the widest instruction set that products use on this processor: torch's name, or AMX."""
    has_tiles = torch.cpu.get_capabilities().get("amx_bf16", False)
    return "AMX" if has_tiles else torch.backends.cpu.get_cpu_capability()


def packed(plain: Plain, sizes: tuple[int, ...]) -> Projection:
    """Pack the weight if oneDNN can; else return `plain`: on a GPU, in float64, on a processor without the instructions."""
    if plain.weight.device.type != "cpu" or not has_packed_product():
        return plain
    try:
        weight = _ops._reorder_linear_weight(plain.weight, None)  # noqa: SLF001
    except RuntimeError:
        return plain
    return Packed(weight, plain.bias, sizes)


def side_by_side(tensors: Mapping[str, torch.Tensor], names: Sequence[str]) -> Plain:
    """Join one or several projections of the same input into one; a missing bias beside a present one is zero."""
    weights = [tensors[f"{name}.weight"] for name in names]
    width = weights[0].shape[1]
    weight = weights[0].new_zeros(sum(map(len, weights)), padded_width(width))
    torch.cat(weights, out=weight[:, :width]) if width == weight.shape[1] else weight[:, :width].copy_(
        torch.cat(weights)
    )
    if not any(f"{name}.bias" in tensors for name in names):
        return Plain(weight, None)
    zeros = {name: part.new_zeros(len(part)) for name, part in zip(names, weights, strict=True)}
    return Plain(weight, torch.cat([tensors.get(f"{name}.bias", zeros[name]) for name in names]))


@functools.cache
def has_packed_product() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(_ops, "_linear_pointwise")


def padded_width(width: int) -> int:
    return -(-width // WIDTH_MULTIPLE) * WIDTH_MULTIPLE


def padded_rows(tokens: int, least: int, sizes: tuple[int, ...], multiple: int = ROW_MULTIPLE) -> int:
    """Round T up to R, for products of at least `least` rows; if one is packed, with `sizes`, to the sum of `in_sizes`."""
    if sizes:
        return sum(in_sizes(tokens, least, sizes))
    return -(-max(tokens, least) // multiple) * multiple


def pack(parts: Sequence[torch.Tensor], rows: int, like: torch.Tensor) -> torch.Tensor:
    """Pack parts [B, L, D] (any float dtype, B and L) in order as x_RK with `rows` rows, in the dtype and device of `like`."""
    width = parts[0].shape[-1]
    packed = like.new_empty(rows, padded_width(width))
    flat = [part.reshape(-1, width) for part in parts]
    counts = [part.shape[0] for part in flat]
    tokens = sum(counts)
    place = packed[:tokens, :width]
    if like.device.type != "cpu":  # one copy, which the host does not wait for
        dtype = functools.reduce(torch.promote_types, {part.dtype for part in flat})
        place.copy_(torch.cat(flat, out=on_host((tokens, width), dtype, like)), non_blocking=True)
    elif all(part.dtype == like.dtype for part in flat):
        torch.cat(flat, out=place)
    else:
        for part, rows_of_it in zip(flat, place.split_with_sizes(counts), strict=True):
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
    num_rows, width = packed.shape
    # Most parts are one sequence, and the split gives them that shape: a `view` for each would cost more than the check.
    rows = packed.unsqueeze(0).split_with_sizes([*counts, num_rows - sum(counts)], dim=1)
    return [part if shape[0] == 1 else part.view(*shape, width) for part, shape in zip(rows, shapes, strict=False)]
