"""LoadedLayer: a layer on an engine, with its stored tensors and a variant for each dtype requested so far.

Invariants: No table keeps loaded layers alive. A catalog that serves one or a request admitted with one holds a reference;
when the last reference goes, its memory is free. Only the engine thread that computes changes a loaded layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import torch

from service.attention.call import Call
from service.attention.layer import Layer
from service.attention.spec import LayerSpec


@dataclasses.dataclass(slots=True, eq=False, weakref_slot=True)
class LoadedLayer:
    """A layer and its variants by dtype; `seconds` is the compute thread's time to load it, self-check included."""

    spec: LayerSpec
    tensors: Mapping[str, torch.Tensor]
    variants: dict[torch.dtype, Layer] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    is_sequential: bool = False
    """Whether calls cannot share a forward pass (by the self-check, or in a GPU's exact mode)."""

    @property
    def num_bytes(self) -> int:
        """Bytes that its variants' matrices take on the device; any thread may read it."""
        return sum(layer.num_bytes for layer in list(self.variants.values()))


class Work(NamedTuple):
    """A call and the loaded layer that computes it."""

    loaded: LoadedLayer
    call: Call
