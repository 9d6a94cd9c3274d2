from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch

from service.attention.engine import LoadedLayer
from service.attention.layer import Layer
from service.errors import LayerNotFound, NotReady
from service.layers.catalog import Catalog, ServedLayer
from tests.unit.layers.checkpoints import stored


def catalog_of(*names: str) -> Catalog:
    layers = {name: stored(name) for name in names}
    return Catalog(
        {
            name: ServedLayer(one, LoadedLayer(partial(Layer, one.spec, one.tensors), torch.float32))
            for name, one in layers.items()
        }
    )


def test_layers_are_served_in_name_order_and_found_by_name():
    catalog = catalog_of("a", "c")
    assert catalog.names() == ["a", "c"]
    assert catalog.get("c").name == "c"


@pytest.mark.parametrize("name", ["b", "A", "../a", "", "a\n", "\ud800", "x" * 10_000], ids=range(7))
def test_an_unknown_name_is_not_found_and_not_echoed(name):
    with pytest.raises(LayerNotFound) as caught:
        catalog_of("a", "c").get(name)
    said, _, hint = caught.value.message.partition("; did you mean ")
    assert (said, hint) == (
        "no layer of that name is served; GET /v1/layers lists them",
        '"a"?' if name == "a\n" else "",
    )


@pytest.mark.parametrize("name", ["encodr", "encoder-"])
@pytest.mark.parametrize("others", [0, 300])
def test_an_unknown_name_is_answered_with_the_nearest_of_the_first_hundred(name, others):
    layers: dict[str, Any] = dict.fromkeys(["encoder", *(f"other-{i}" for i in range(others)), "encodr2"])
    with pytest.raises(LayerNotFound) as caught:
        Catalog(layers).get(name)
    near = "encodr2" if name == "encodr" and not others else "encoder"
    assert caught.value.message == f'no layer of that name is served; GET /v1/layers lists them; did you mean "{near}"?'


def test_a_catalog_is_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Catalog({}).layers = {}  # type: ignore[misc]


def test_a_missing_layer_of_the_desired_state_is_not_ready_rather_than_not_found():
    with pytest.raises(NotReady):
        Catalog({}, frozenset({"a"})).get("a")
    with pytest.raises(LayerNotFound):
        Catalog({}, frozenset({"a"})).get("b")
