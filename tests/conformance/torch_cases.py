"""A grid of calls of torch's scaled_dot_product_attention, and each of them as a request of POST /v1/attention.

Legend: B sequences, H query heads, G key and value heads, L query rows, S key rows, D head width, V value head width.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention


class Shape(NamedTuple):
    """Sizes; `layout` has the axes that the tensors have."""

    layout: str
    b: int
    h: int
    g: int
    rows: int
    keys: int
    width: int
    value_width: int

    def tensors(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Unit normals from one seed, so that every dtype has the same numbers but for rounding."""
        generator = torch.Generator().manual_seed(11)
        sizes = {
            "query": {"b": self.b, "h": self.h, "l": self.rows, "d": self.width},
            "key": {"b": self.b, "h": self.g, "l": self.keys, "d": self.width},
            "value": {"b": self.b, "h": self.g, "l": self.keys, "d": self.value_width},
        }
        return {
            name: torch.randn([of[axis] for axis in self.layout], generator=generator, dtype=torch.float64).to(dtype)
            for name, of in sizes.items()
        }

    @property
    def words(self) -> str:
        full = {"b": self.b, "h": self.h, "l": self.rows, "d": self.width}
        heads = f", G = {self.g}" if "h" in self.layout else ""
        return f"{self.layout} {[full[axis] for axis in self.layout]}{heads}, S = {self.keys}, V = {self.value_width}"


SHAPES = {
    "one": Shape("ld", 1, 1, 1, 1, 1, 1, 1),
    "rows": Shape("ld", 1, 1, 1, 6, 9, 8, 8),
    "batch": Shape("bld", 3, 1, 1, 6, 6, 8, 8),
    "heads": Shape("hld", 1, 4, 4, 5, 7, 16, 16),
    "four": Shape("bhld", 2, 4, 4, 7, 7, 8, 8),
    "wide-value": Shape("bhld", 2, 4, 4, 5, 9, 8, 12),
    "grouped": Shape("bhld", 2, 8, 2, 5, 9, 16, 16),
    "one-key-head": Shape("bhld", 1, 6, 1, 9, 5, 8, 8),
    "blocks": Shape("bhld", 1, 2, 1, 150, 140, 32, 32),
}
MASKS = ("none", "is_causal", "bool-ls", "bool-row-blocked", "float-ls", "bool-full", "float-full")
SCALES = (None, 0.3)
DTYPES = {"float64": 1e-12, "float32": 1e-5, "float16": 1e-5, "bfloat16": 1e-5}


class TorchCase(NamedTuple):
    """One call of torch, in each dtype."""

    shape_name: str
    mask: str
    scale: float | None

    @property
    def shape(self) -> Shape:
        return SHAPES[self.shape_name]

    @property
    def name(self) -> str:
        return f"{self.shape_name}, {self.mask}, scale {'default' if self.scale is None else self.scale}"

    def attn_mask(self, dtype: torch.dtype) -> torch.Tensor | None:
        """The mask: true = may attend, or added, as torch has it; [L, S], or with every axis that the layout has."""
        if self.mask in {"none", "is_causal"}:
            return None
        shape, generator = self.shape, torch.Generator().manual_seed(5)
        sizes = {"b": shape.b, "h": shape.h, "l": shape.rows, "s": shape.keys}
        values = torch.randn([sizes[axis] for axis in self.axes], generator=generator, dtype=torch.float64).to(dtype)
        if self.mask.startswith("float"):
            return values.masked_fill(values < -1.0, -torch.inf)
        allowed = values > -0.5
        if self.mask == "bool-row-blocked":
            allowed[-1] = False
        return allowed

    @property
    def axes(self) -> str:
        return self.shape.layout.replace("d", "s") if self.mask.endswith("full") else "ls"

    @property
    def masks(self) -> list[dict[str, object]]:
        """The masks of the request, without their values."""
        if self.mask == "none":
            return []
        if self.mask == "is_causal":
            return [{"kind": "causal", "align": "top_left"}]
        return [{"kind": "bias" if self.mask.startswith("float") else "attend", "axes": self.axes}]

    @property
    def fields(self) -> dict[str, object]:
        return {"layout": self.shape.layout} | ({} if self.scale is None else {"scale": self.scale})

    def expected(self, dtype: torch.dtype) -> torch.Tensor:
        """torch's answer in float64 for the rounded numbers."""
        query, key, value = (tensor.double() for tensor in self.shape.tensors(dtype).values())
        mask = self.attn_mask(dtype)
        if mask is not None and mask.is_floating_point():
            mask = mask.double()
        return scaled_dot_product_attention(
            query,
            key,
            value,
            mask,
            is_causal=self.mask == "is_causal",
            scale=self.scale,
            enable_gqa=self.shape.g != self.shape.h,
        )


# A mask with every axis of layout ld is [L, S], which another case has. Two shapes have a scale of their own.
CASES = [
    TorchCase(shape, mask, scale)
    for scale, shape, mask in itertools.product(SCALES, SHAPES, MASKS)
    if not (SHAPES[shape].layout == "ld" and mask.endswith("full"))
    if scale is None or shape in {"wide-value", "grouped"}
]
