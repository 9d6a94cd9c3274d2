"""Projections: y = x·Wᵀ + b for the rows of many sequences at once.

Lives here: torch's product (`Plain`), oneDNN's with the weight laid out for it once (`Packed`), and how many rows each wants.
Must not know: sequences, heads, what the rows stand for.
Laws: from `least_rows` on, in multiples of `ragged.ROW_MULTIPLE`, a row's bits depend on the row alone (P1; measured,
docs/performance.md, and checked for each layer, `self_check.py`); oneDNN makes and keeps a product of its own for each number
of rows that it meets, half a megabyte and more each, so it meets the few of SIZES only.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F

from service.attention.preemption import preemption_point
from service.attention.ragged import ROW_MULTIPLE, padded_width

# Below these sizes oneMKL and torch's own oneDNN pick kernels whose rounding depends on the number of rows: fewer than 12 rows
# differ in float32, and products of at most 4,096 multiply-adds in the 16-bit dtypes.
MIN_ROWS = 12
MIN_HALF_PRODUCT = 4096
# Rows of one product with a packed weight, largest first: every multiple of ROW_MULTIPLE is a sum of few of them. Each product
# reads all weights, which do not fit into a core's cache, as long as ten rows take; what one product does need not be copied to
# its place: so 10 to 16 short requests are one or two. Above 256 a result no longer stays in the cache until it is copied.
SIZES = (256, 240, 224, 208, 192, 160, 128, 64, 32, 16, 8, 4)
# Of a product as it is: above twice as many rows it is computed in pieces of this many, and the last piece has the rest, so never
# few. A batch may stop between two of them (12 ms each at a width of 512 in float64).
PIECE_ROWS = 1024

# What torch's own compiler writes for a linear layer on a CPU; not public, so looked for before it is used.
_ops = torch.ops.mkldnn


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Projection(abc.ABC):
    """W [out, K]; takes x_RK with at least `least_rows` rows; K is the input width, padded with zeros to a multiple of 4."""

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
    def least_rows(self) -> int: ...

    @property
    @abc.abstractmethod
    def sizes(self) -> Sequence[int]:
        """The numbers of rows that its products have, each computed by code of its own; none: as many as there are."""

    @abc.abstractmethod
    def __call__(self, x_RK: torch.Tensor, /) -> torch.Tensor: ...


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Plain(Projection):
    """W [out, K] as it is."""

    @property
    def least_rows(self) -> int:
        if self.weight.dtype not in (torch.bfloat16, torch.float16):
            return MIN_ROWS
        return max(MIN_ROWS, MIN_HALF_PRODUCT // self.num_weights + 1)

    @property
    def sizes(self) -> Sequence[int]:
        return ()

    def __call__(self, x_RK: torch.Tensor, /) -> torch.Tensor:
        if len(x_RK) < 2 * PIECE_ROWS or x_RK.device.type != "cpu":
            return F.linear(x_RK, self.weight, self.bias)
        y = x_RK.new_empty(len(x_RK), self.weight.shape[0])
        sizes = [PIECE_ROWS] * (len(x_RK) // PIECE_ROWS - 1)
        sizes.append(len(x_RK) - sum(sizes))
        for part, place in zip(x_RK.split(sizes), y.split(sizes), strict=True):
            place.copy_(F.linear(part, self.weight, self.bias))
            preemption_point()
        return y

    def rows(self, start: int, stop: int) -> Plain:
        """The projection to some of the outputs, over the same memory."""
        return Plain(self.weight[start:stop], None if self.bias is None else self.bias[start:stop])


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Packed(Projection):
    """W [out, K] in oneDNN's blocks: torch's product lays it out anew for every batch, which is a third of a small one."""

    @property
    def least_rows(self) -> int:
        return ROW_MULTIPLE

    @property
    def sizes(self) -> Sequence[int]:
        return SIZES

    def __call__(self, x_RK: torch.Tensor, /) -> torch.Tensor:
        sizes = in_sizes(len(x_RK))
        if len(sizes) == 1:
            return self._product(x_RK)
        y = x_RK.new_empty(len(x_RK), self.weight.shape[0])
        for part, place in zip(x_RK.split(sizes), y.split(sizes), strict=True):
            place.copy_(self._product(part))
            preemption_point()
        return y

    def _product(self, x_RK: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _ops._linear_pointwise.default(x_RK, self.weight, self.bias, "none", [], "")  # noqa: SLF001
        return y


@functools.lru_cache(4096)
def in_sizes(rows: int) -> list[int]:
    """A multiple of ROW_MULTIPLE as a sum of SIZES, largest first."""
    found: list[int] = []
    for size in SIZES:
        num, rows = divmod(rows, size)
        found += [size] * num
    return found


def packed(plain: Plain) -> Projection:
    """Packed where oneDNN can, else as it is: another device, another dtype (float64), a processor without the instructions."""
    if plain.weight.device.type != "cpu" or not has_packed_product():
        return plain
    try:
        weight = _ops._reorder_linear_weight(plain.weight, None)  # noqa: SLF001
    except RuntimeError:
        return plain
    return Packed(weight, plain.bias)


def side_by_side(tensors: Mapping[str, torch.Tensor], names: Sequence[str]) -> Plain:
    """One projection, or several over the same input; a missing bias beside a present one is zero."""
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
