"""Catalog: the immutable set of served layers by name.

Invariants: A catalog is frozen: another set of layers is another Catalog, so that a reader never sees half a change. Layers are
in name order. A lookup never echoes the name. A served layer holds its LoadedLayer, so that a request is computed by the layer
that it was admitted with.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from collections.abc import Iterable, Mapping

from service.attention.call import AttentionCall, Call
from service.attention.engine import LoadedLayer
from service.attention.spec import LayerSpec
from service.errors import LayerNotFound, NotReady
from service.layers.directory import SDPA
from service.layers.store import StoredLayer


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ServedLayer:
    """A stored layer that is on the engine and has passed its self-check."""

    stored: StoredLayer
    loaded: LoadedLayer
    name: str = dataclasses.field(init=False)
    digest: str = dataclasses.field(init=False)
    spec: LayerSpec = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        for name in ("name", "digest", "spec"):
            object.__setattr__(self, name, getattr(self.stored, name))

    def output_bytes(self, call: Call | AttentionCall) -> int:
        """Return the bytes of the output [B, L, out_width], in the dtype of the query."""
        query = call.query
        return query.shape[0] * query.shape[1] * self.spec.out_width * query.element_size()


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ServedAttention:
    """Attention without a layer, on the engine; its name is reserved."""

    loaded: LoadedLayer
    name: str = dataclasses.field(default=SDPA, init=False)
    digest: None = dataclasses.field(default=None, init=False)

    def output_bytes(self, call: Call | AttentionCall) -> int:
        """Return the bytes of the output [B, N, L, V], in the dtype of the query."""
        query, value = call.query, call.query if call.value is None else call.value
        return query.numel() // query.shape[-1] * value.shape[-1] * query.element_size()


Served = ServedLayer | ServedAttention
NOT_SERVED = "no layer of that name is served; GET /v1/layers lists them"
# At most this many served names are compared with an unknown one. A comparison takes the event loop 3 µs for names of 40 letters
# that differ, 30 µs for similar ones, and at most about 80 µs (names of 64 letters).
MAX_COMPARED = 100


def hint(name: str, names: Iterable[str]) -> str:
    """Return the end of an error's sentence, which names the nearest of the names, if one is near."""
    near = difflib.get_close_matches(name[:64], itertools.islice(names, MAX_COMPARED), n=1)
    return f'; did you mean "{near[0]}"?' if near else ""


@dataclasses.dataclass(frozen=True, slots=True, weakref_slot=True)
class Catalog:
    """Served `layers` by name, in name order; `awaited` names should be served, but this process cannot load them.

    `attention` is attention without a layer: it is not among the layers, but it is a model of the Open Inference Protocol.
    `layer_set` is the digest of the set whose files these are, empty without one.
    """

    layers: Mapping[str, ServedLayer]
    awaited: frozenset[str] = frozenset()
    attention: ServedAttention | None = None
    layer_set: str = ""

    def names(self) -> list[str]:
        return list(self.layers)

    def models(self) -> list[Served]:
        """Return everything that computes: the layers, and attention without one."""
        return [*self.layers.values(), *([] if self.attention is None else [self.attention])]

    def model(self, name: str) -> Served:
        """Return the layer of that name, or attention without a layer; raise LayerNotFound or NotReady."""
        return self.attention if self.attention is not None and name == SDPA else self.get(name)

    def get(self, name: str) -> ServedLayer:
        """Return the layer of that name; raise NotReady for an awaited name, LayerNotFound for any other."""
        layer = self.layers.get(name)
        if layer is not None:
            return layer
        if name in self.awaited:
            raise NotReady("this process could not load the served version of the layer", retry_after_s=5)
        if name == SDPA:
            raise LayerNotFound('"sdpa" is attention without a layer: POST /v1/attention')
        raise LayerNotFound(NOT_SERVED + hint(name, self.layers))
