"""QueryKey: the norms and the rotation of query and key, on the packed rows of a pass.

Legend: R packed rows with filler rows, T without, N heads, H head width, r rotated width, D = N·H.

Invariants: A row's bits depend on the row and its position alone (P1). Each step is elementwise, or a sum over one row. All is
computed in float32 (float64 for float64 rows) and rounded to the dtype of the rows once, at the end. The angles are float32 in
every dtype, as in the models' own code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from service.attention.call import Call
from service.attention.spec import LayerSpec, Norm, Rotary

# torch's vectors take other instructions for the end of a tensor. So each row of angles fills whole vectors.
VECTOR = 16


class QueryKey:
    """The norms and the rotation of one layer, with its `tensors` on their device."""

    def __init__(self, spec: LayerSpec, tensors: Mapping[str, torch.Tensor], like: torch.Tensor) -> None:
        wide = torch.promote_types(like.dtype, torch.float32)
        self._head_width, self._like, self._wide = spec.head_width, like, wide
        self._norms = None if spec.norm is None else [_RowNorm(spec.norm, tensors, name, wide) for name in NORMS]
        self._rotation = None if spec.rotary is None else _Rotation(spec.rotary, wide, like.device)

    def __call__(
        self, q_RD: torch.Tensor, k_RD: torch.Tensor, calls: Sequence[Call]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return query and key, normalised and rotated; it may write to their memory."""
        q, k = (x.to(self._wide).unflatten(1, (-1, self._head_width)) for x in (q_RD, k_RD))
        if self._norms is not None:
            q, k = (norm(x) for norm, x in zip(self._norms, (q, k), strict=True))
        if self._rotation is not None:
            rows = torch.cat([_by_row(call.places[0], call) for call in calls])
            keys = torch.cat([_by_row(call.places[1][:, call.num_past :], call) for call in calls])
            turns = self._rotation.turns(rows)
            self._rotation.turn(q, turns)
            self._rotation.turn(k, turns if torch.equal(rows, keys) else self._rotation.turns(keys))
        return q.flatten(1).to(self._like.dtype), k.flatten(1).to(self._like.dtype)


NORMS = ("query_norm", "key_norm")


def largest_row(spec: LayerSpec, tensors: Mapping[str, torch.Tensor]) -> float:
    """Return a magnitude that no normalised query or key exceeds; 0 without a norm."""
    if spec.norm is None:
        return 0.0
    heads = spec.num_heads if spec.norm.over == "width" else 1
    most = [float(tensors[f"{name}.weight"].abs().max()) + spec.norm.plus_one for name in NORMS]
    offsets = [float(x.abs().max()) for name in NORMS if (x := tensors.get(f"{name}.bias")) is not None]
    return math.sqrt(heads * spec.head_width) * max(most) + max(offsets, default=0.0)


def _by_row(positions: torch.Tensor, call: Call) -> torch.Tensor:
    """Return the positions [B|1, rows] of a call as B·rows."""
    return positions.expand(call.query.shape[0], -1).reshape(-1)


class _RowNorm:
    """The norm of query or key: over each head, or over all heads of a row."""

    def __init__(self, norm: Norm, tensors: Mapping[str, torch.Tensor], name: str, wide: torch.dtype) -> None:
        self._norm = norm
        self._weight = tensors[f"{name}.weight"].to(wide) + float(norm.plus_one)
        self._bias = tensors[f"{name}.bias"].to(wide) if norm.has_bias else None

    def __call__(self, x_RNH: torch.Tensor) -> torch.Tensor:
        """Return the rows in new memory. Sums are float64, in which no square of a float32 overflows."""
        x = x_RNH.flatten(1) if self._norm.over == "width" else x_RNH
        if self._norm.kind == "layer":
            x = x - x.mean(-1, keepdim=True, dtype=torch.float64).to(x.dtype)
        root: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float64)
        # Root and division round the same in vectors and alone, which rsqrt need not.
        factor: torch.Tensor = root.square_().div_(x.shape[-1]).add_(self._norm.eps).sqrt_().reciprocal_()
        x = x * factor.to(x.dtype)
        x.mul_(self._weight)
        return (x if self._bias is None else x.add_(self._bias)).view_as(x_RNH)


class _Rotation:
    """The rotation of the first r features of each head by the positions of the rows."""

    def __init__(self, rotary: Rotary, wide: torch.dtype, device: torch.device) -> None:
        self._rotary, self._wide = rotary, wide
        pairs = len(rotary.inverse_frequencies)
        self._frequencies = torch.zeros(-(-pairs // VECTOR) * VECTOR, device=device)
        self._frequencies[:pairs] = torch.tensor(rotary.inverse_frequencies)

    def turns(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the factors of each feature and of the other of its pair, [T, 1, r] both."""
        angles = positions_T.to(self._frequencies, non_blocking=True).unsqueeze(1) * self._frequencies
        pairs = slice(0, self._rotary.width // 2)
        cos, sin = (
            f(angles.to(self._wide))[:, None, pairs].mul_(self._rotary.attention_factor) for f in (torch.cos, torch.sin)
        )
        return self._by_feature(cos, cos), self._by_feature(-sin, sin)

    def turn(self, x_RNH: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Turn the first T rows in place: each pair (a, b) becomes (a·cos - b·sin, b·cos + a·sin)."""
        cos, sin = turns
        x = x_RNH[: len(cos), :, : self._rotary.width]
        first, second = x.chunk(2, -1) if self._rotary.layout == "half" else (x[..., ::2], x[..., 1::2])
        other = self._by_feature(second, first).mul_(sin)
        x.mul_(cos).add_(other)

    def _by_feature(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """Join what belongs to the first and to the second feature of each pair, in the order of the features."""
        if self._rotary.layout == "half":
            return torch.cat([first, second], dim=-1)
        return torch.stack([first, second], dim=-1).flatten(-2)
