"""Relative bias: a layer's bias by head and distance, as one of the masks of a call (Raffel et al. 2020, T5).

Invariant: The bucket of each distance is found once, when the layer is loaded, with the float32 logarithms of T5's own code.
"""

from __future__ import annotations

import math

import torch

from service.attention.call import Call
from service.attention.masks import ByDistance, CombinedMask, Sizes
from service.attention.spec import RelativeBias


class DistanceBias:
    """The bias of one layer; its buckets are runs of distances: key position minus query position."""

    def __init__(self, part: RelativeBias, table: torch.Tensor) -> None:
        distances = torch.arange(-part.max_distance - 1, part.max_distance + 2)
        buckets = _buckets(part, distances)
        begins = torch.cat([torch.ones(1, dtype=torch.bool), buckets.diff() != 0])
        self._starts = distances[begins][None, None, None, 1:]
        wide = torch.promote_types(table.dtype, torch.float32)
        self._values = table.to("cpu", wide)[buckets[begins]].T.contiguous()[None, :, None]

    def with_masks(self, call: Call) -> CombinedMask:
        """Return the masks of a call with this bias in front of them."""
        positions, key_positions = call.places
        bias = ByDistance(self._values, self._starts, positions[:, None, :, None], key_positions[:, None, None])
        if call.mask is not None:
            return CombinedMask(call.mask.sizes, (bias, *call.mask.masks))
        sizes = Sizes(len(call.query), self._values.shape[1], positions.shape[1], key_positions.shape[1])
        return CombinedMask(sizes, (bias,))


def _buckets(part: RelativeBias, distances: torch.Tensor) -> torch.Tensor:
    """Return the bucket of each distance: a bucket each for the nearest, and logarithmically wider ones up to the last."""
    num = part.buckets // 2 if part.is_bidirectional else part.buckets
    far = distances.abs() if part.is_bidirectional else -distances.clamp(max=0)
    exact = num // 2
    ratios = torch.log(far.clamp(min=1).float() / exact) / math.log(part.max_distance / exact)
    found = torch.where(far < exact, far, (exact + (ratios * (num - exact)).long()).clamp(max=num - 1))
    return found + num * (distances > 0) if part.is_bidirectional else found
