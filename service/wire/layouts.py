"""Layouts: the order of the axes of the caller's own tensors, and the way to [B, H, L, d] and back.

Axes: `b` sequences, `h` heads, `l` rows, `d` features. Invariants: A layout only permutes, so no value changes. Without `b` there
is one sequence, without `h` one head. `packed` has the heads side by side in the features: [L, H·d] or [B, L, H·d].
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from typing_extensions import TypeAliasType

from service.errors import BadShape, InvalidInput, LayoutRequired

LayoutName = TypeAliasType("LayoutName", Literal["ld", "bld", "hld", "lhd", "bhld", "blhd", "packed"])
_DEFAULTS: dict[int, LayoutName] = {2: "ld", 4: "bhld"}
_PACKED_AXES = {2: "lhd", 3: "blhd"}
_AXES = "bhld"
ONE_ROW = "; it needs at least one row, as [[0.5, 1.0]]"


class Layout(NamedTuple):
    """`axes` are those of query, key, value and output, in order; a packed layout has them after its heads are split."""

    axes: str
    num_heads: int | None = None
    num_kv_heads: int | None = None

    @property
    def has_batch(self) -> bool:
        return "b" in self.axes

    @property
    def is_packed(self) -> bool:
        return self.num_heads is not None

    def rows(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return query, key or value as a view [B, H, L, d]; raises BadShape for another number of axes or an empty axis."""
        rank = len(self.axes) - self.is_packed
        if tensor.dim() != rank or 0 in tensor.shape:
            found = list(tensor.shape) if tensor.dim() == rank else f"{tensor.dim()} axes"
            axes = ", ".join(axis if axis == "d" else axis.upper() for axis in self.axes)
            words = axes.replace("H, d", "H·d") if self.is_packed else axes
            raise BadShape(
                f"{name} must be [{words}] in this layout, no axis empty, got {found}{ONE_ROW}", param=f"/{name}"
            )
        heads = self.num_heads if name == "query" else self.num_kv_heads
        if heads is not None:
            if tensor.shape[-1] % heads:
                words = f"has {tensor.shape[-1]} features, which {heads} heads cannot share evenly"
                raise BadShape(f"{name} {words}", param=f"/{name}")
            tensor = tensor.unflatten(-1, (heads, -1))
        tensor = tensor.permute([self.axes.index(axis) for axis in _AXES if axis in self.axes])
        return tensor[tuple(slice(None) if axis in self.axes else None for axis in _AXES)]

    def past(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return past_key or past_value, [Hkv, P, d] with B in front of a batch, as [B, Hkv, P, d]; raises BadShape."""
        rank, words = (4, "[B, Hkv, P, d]") if self.has_batch else (3, "[Hkv, P, d]")
        if tensor.dim() != rank or 0 in tensor.shape:
            raise BadShape(f"{name} must be {words}, no axis empty, got {list(tensor.shape)}", param=f"/{name}")
        return tensor if self.has_batch else tensor.unsqueeze(0)

    def of_answer(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return the tensor of that name of an answer with the axes of this layout."""
        if name == "output":
            kept = [axis for axis in _AXES if axis in self.axes]
            output = tensor[tuple(slice(None) if axis in self.axes else 0 for axis in _AXES)]
            output = output.permute([kept.index(axis) for axis in self.axes])
            return output.flatten(-2) if self.is_packed else output
        # The mean over the heads, [B, L, S], has no axis of heads; present keys and values always have one.
        is_mean = name == "weights" and tensor.dim() == 3  # noqa: PLR2004 (axes)
        if "h" not in self.axes and not is_mean and not name.startswith("present"):
            tensor = tensor[:, 0]
        return tensor if self.has_batch else tensor[0]


def layout_of(name: LayoutName | None, rank: int, num_heads: int | None, num_kv_heads: int | None) -> Layout:
    """Return the layout of a query with `rank` axes.

    Raises LayoutRequired for three axes without a name, BadShape for a rank that no layout has, and InvalidInput for numbers of
    heads where the layout is not packed, or for a missing `num_heads` where it is.
    """
    if name == "packed":
        if num_heads is None:
            raise InvalidInput("num_heads is required with layout packed", param="/num_heads")
        if rank not in _PACKED_AXES:
            raise BadShape(f"query must be [L, H·d] or [B, L, H·d] with layout packed, got {rank} axes", param="/query")
        return Layout(_PACKED_AXES[rank], num_heads, num_heads if num_kv_heads is None else num_kv_heads)
    for field, value in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
        if value is not None:
            words = f'{field} belongs to layout "packed"; other layouts have an axis of heads'
            raise InvalidInput(words, param=f"/{field}")
    if name is not None:
        return Layout(name)
    if rank == 3:  # noqa: PLR2004 (axes)
        raise LayoutRequired(
            "a query of three axes can be a batch or have heads: write layout bld for [B, L, d], hld for [H, L, d], "
            "lhd for [L, H, d], or packed for [B, L, H·d]",
            param="/layout",
        )
    if rank not in _DEFAULTS:
        raise BadShape(f"query must have 2 to 4 axes, got {rank}{ONE_ROW}", param="/query")
    return Layout(_DEFAULTS[rank])
