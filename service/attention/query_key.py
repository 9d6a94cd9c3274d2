"""QueryKey: the norms and the rotation of query and key, on the packed rows of a pass.

Legend: R packed rows with filler rows, T without, N heads, H head width, r rotated width, D = N·H.

Invariants: A row's bits depend on the row and its position alone (P1). Each step is elementwise, or a sum over one row. All is
computed in float32 (float64 for float64 rows) and rounded to the dtype of the rows once, at the end. The angles are float32 in
every dtype, as in the models' own code.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from service.attention.call import Call
from service.attention.spec import NORMS, LayerSpec, Rotary

# torch's vectors take other instructions for the end of a tensor. So each row of angles fills whole vectors.
VECTOR = 16


class QueryKey:
    """The norms and the rotation of one layer, with its `tensors` on their device."""

    def __init__(self, spec: LayerSpec, tensors: Mapping[str, torch.Tensor], like: torch.Tensor) -> None:
        self._head_width, self._like = spec.head_width, like
        self._wide = torch.promote_types(like.dtype, torch.float32)
        self._query, self._key = slice(0, spec.num_heads), slice(spec.num_heads, spec.num_heads + spec.num_kv_heads)
        self._norm = None if spec.norm is None else _RowNorm(spec, tensors, self._wide)
        self._rotation = None if spec.rotary is None else _Rotation(spec.rotary, self._wide, like.device)

    def __call__(
        self, q_RD: torch.Tensor, k_RD: torch.Tensor, calls: Sequence[Call]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return query and key, normalised and rotated; it may write to their memory."""
        keys = _by_row([(call.source, call.key_positions, call.num_past) for call in calls])
        queries = _by_row([(call.query, call.positions, 0) for call in calls])
        return self._changed(q_RD, self._query, queries), self._changed(k_RD, self._key, keys)

    def of_self(self, qk_RD: torch.Tensor, calls: Sequence[Call]) -> Sequence[torch.Tensor]:
        """Return the same of self-attention, whose query and key lie side by side; mostly they have the same positions."""
        widths = [(heads.stop - heads.start) * self._head_width for heads in (self._query, self._key)]
        if any(call.positions is not None for call in calls):
            q_RD, k_RD = qk_RD.split_with_sizes(widths, dim=-1)
            return self(q_RD, k_RD, calls)
        positions = _by_row([(call.query, None, 0) for call in calls])
        return self._changed(qk_RD, slice(0, self._key.stop), positions).split_with_sizes(widths, dim=-1)

    def _changed(self, x_RD: torch.Tensor, heads: slice, positions_T: torch.Tensor) -> torch.Tensor:
        """Return the rows of these heads, of which the query's come first, normalised and rotated."""
        x: torch.Tensor = x_RD.to(self._wide).unflatten(1, (-1, self._head_width))
        if self._norm is not None:
            x = self._norm(x, heads)
        if self._rotation is not None:
            x = self._rotation(x, positions_T)
        return x.flatten(1).to(self._like.dtype)


def largest_row(spec: LayerSpec, tensors: Mapping[str, torch.Tensor]) -> float:
    """Return a magnitude that no normalised query or key exceeds; 0 without a norm."""
    if spec.norm is None:
        return 0.0
    heads = spec.num_heads if spec.norm.over == "width" else 1
    most = [float(tensors[f"{name}.weight"].abs().max()) + spec.norm.plus_one for name in NORMS]
    offsets = [float(x.abs().max()) for name in NORMS if (x := tensors.get(f"{name}.bias")) is not None]
    return math.sqrt(heads * spec.head_width) * max(most) + max(offsets, default=0.0)


def _by_row(parts: Iterable[tuple[torch.Tensor, torch.Tensor | None, int]]) -> torch.Tensor:
    """Return the positions of all rows of inputs [B, L, D], given as [B|1, first + L] or by default 0, 1, … each."""
    found: list[torch.Tensor] = []
    order = torch.arange(0)
    for x, positions, first in parts:
        num, length = x.shape[:2]
        if positions is not None:
            found.append(positions[:, first:].expand(num, -1).reshape(-1))
            continue
        order = order if len(order) >= length else torch.arange(length)
        found += [order[:length]] * num
    return torch.cat(found)


class _RowNorm:
    """The norm of query and key: over each head, or over all heads of one of the two."""

    def __init__(self, spec: LayerSpec, tensors: Mapping[str, torch.Tensor], wide: torch.dtype) -> None:
        assert spec.norm is not None
        self._norm, self._num_heads = spec.norm, spec.num_heads
        counts = spec.num_heads, spec.num_kv_heads

        def by_head(kind: str) -> torch.Tensor:
            parts = [tensors[f"{name}.{kind}"].to(wide).view(-1, spec.head_width) for name in NORMS]
            return torch.cat([part.expand(num, -1) for part, num in zip(parts, counts, strict=True)])

        self._weight_NH = by_head("weight") + float(spec.norm.plus_one)
        self._bias_NH = by_head("bias") if spec.norm.has_bias else None

    def __call__(self, x_RNH: torch.Tensor, heads: slice) -> torch.Tensor:
        """Return the rows, often in their own memory. Sums are float64, in which no square of a float32 overflows."""
        x, width = x_RNH, x_RNH.shape[2]
        if self._norm.kind == "layer":
            x = x - self._means(x.sum(-1, keepdim=True, dtype=torch.float64), width, heads).to(x.dtype)
        length: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float64)
        # Root and division round the same in vectors and alone, which rsqrt need not.
        factor = self._means(length.square_(), width, heads).add_(self._norm.eps).sqrt_().reciprocal_()
        x.mul_(factor.to(x.dtype)).mul_(self._weight_NH[heads])  # in place: new memory takes as long as the norm
        return x if self._bias_NH is None else x.add_(self._bias_NH[heads])

    def _means(self, sums_RN1: torch.Tensor, width: int, heads: slice) -> torch.Tensor:
        """Return the mean over the features of each head, or over all heads of query and of key; [R, N, 1]."""
        if self._norm.over == "width":
            num = max(0, self._num_heads - heads.start)  # heads of the query
            groups = [part for part in (sums_RN1[:, :num], sums_RN1[:, num:]) if part.shape[1]]
            sums_RN1 = torch.cat([part.mean(1, keepdim=True).expand_as(part) for part in groups], dim=1)
        return sums_RN1 / width


class _Rotation:
    """The rotation of the first r features of each head by the positions of the rows."""

    def __init__(self, rotary: Rotary, wide: torch.dtype, device: torch.device) -> None:
        self._rotary, self._wide = rotary, wide
        pairs = len(rotary.inverse_frequencies)
        self._frequencies = torch.zeros(-(-pairs // VECTOR) * VECTOR, device=device)
        self._frequencies[:pairs] = torch.tensor(rotary.inverse_frequencies)

    def __call__(self, x_RNH: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """Turn the first T rows in place: each pair (a, b) becomes (a·cos - b·sin, b·cos + a·sin)."""
        angles = positions_T.to(self._frequencies, non_blocking=True).unsqueeze(1) * self._frequencies
        turn = angles[:, : self._rotary.width // 2].to(self._wide)
        cos, sin = (x.unsqueeze(1).mul_(self._rotary.attention_factor) for x in (turn.cos(), turn.sin()))
        x = x_RNH[: len(cos), :, : self._rotary.width]
        a, b = x.chunk(2, -1) if self._rotary.layout == "half" else (x[..., ::2], x[..., 1::2])
        a_sin = a * sin
        a.mul_(cos).sub_(b * sin)
        b.mul_(cos).add_(a_sin)
        return x_RNH
