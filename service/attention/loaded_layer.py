"""LoadedLayer: a layer that lives on an engine, as it was stored and in the dtypes it has been asked for.

Laws: nobody keeps a table of residents: whoever holds one can be answered by it (the catalog that serves it, a request that
was admitted with it), and when the last of them lets go its memory is free; only the compute thread changes it.
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
    """`seconds`: what loading it took of the compute thread, its self-check included."""

    spec: LayerSpec
    tensors: Mapping[str, torch.Tensor]
    variants: dict[torch.dtype, Layer] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    is_sequential: bool = False
    """Whether the self-check found that calls cannot share a forward pass."""

    @property
    def num_bytes(self) -> int:
        """What its variants' matrices take on the device; asked on any thread."""
        return sum(layer.num_bytes for layer in list(self.variants.values()))


class Work(NamedTuple):
    """A call and the layer that answers it."""

    resident: LoadedLayer
    call: Call
