"""Catalog: the layers that are served, and those that should be and are not.

Laws: frozen: another set of layers is another Catalog, so that a reader never sees half a change; in name order; one
layer's failure never keeps another from being served unless the caller is strict; a lookup never echoes the name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from service.errors import LayerError, LayerNotFound
from service.layers.store import Store
from service.layers.stored_layer import StoredLayer


@dataclasses.dataclass(frozen=True, slots=True)
class Catalog:
    """`layers` and `failures` by name, both in name order."""

    layers: Mapping[str, StoredLayer]
    failures: Mapping[str, LayerError] = dataclasses.field(default_factory=dict)

    def names(self) -> list[str]:
        return list(self.layers)

    def get(self, name: str) -> StoredLayer:
        layer = self.layers.get(name)
        if layer is None:
            raise LayerNotFound("no layer of that name is served; GET /v1/layers lists them")
        return layer


def load_all(store: Store, *, strict: bool) -> Catalog:
    """Every layer of the store; `strict` raises the first failure instead of keeping it in `failures`."""
    layers: dict[str, StoredLayer] = {}
    failures: dict[str, LayerError] = {}
    for name in store.names():
        try:
            layers[name] = store.load(name)
        except LayerError as error:
            if strict:
                raise
            failures[name] = error
    return Catalog(layers, failures)
