"""LoadedLayer: a layer on an engine, with its stored tensors and a variant for each dtype requested so far.

Attention without a layer is a loaded layer without a spec and without tensors.

Invariants: No table keeps loaded layers alive. A catalog that serves one or a request admitted with one holds a reference;
when the last reference goes, its memory is free. Only the engine thread that computes changes a loaded layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import torch

from service.attention.call import AttentionCall, Call
from service.attention.layer import Layer
from service.attention.scaled_dot_product import ScaledDotProduct
from service.attention.spec import LayerSpec

Variant = Layer | ScaledDotProduct


@dataclasses.dataclass(slots=True, eq=False, weakref_slot=True)
class LoadedLayer:
    """A layer and its variants by dtype; `seconds` is the compute thread's time to load it, self-check included."""

    spec: LayerSpec | None
    tensors: Mapping[str, torch.Tensor]
    variants: dict[torch.dtype, Variant] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    is_sequential: bool = False
    """Whether calls cannot share a forward pass (by the self-check, or in a GPU's exact mode)."""

    @property
    def num_bytes(self) -> int:
        """Bytes that its variants' matrices take on the device; any thread may read it."""
        return sum(layer.num_bytes for layer in list(self.variants.values()))

    def variant(self, dtype: torch.dtype, device: torch.device) -> Variant:
        """Return a new variant."""
        if self.spec is None:
            return ScaledDotProduct(dtype=dtype, device=device)
        return Layer(self.spec, self.tensors, dtype=dtype, device=device)

    def compute_dtype(self, call: Call | AttentionCall, default: torch.dtype) -> torch.dtype:
        """Return the dtype that computes the call; without a layer the service's `default` does not count."""
        if call.is_float64:
            return torch.float64
        return torch.float32 if self.spec is None else default


class Work(NamedTuple):
    """A call and the loaded layer that computes it."""

    loaded: LoadedLayer
    call: Call | AttentionCall
