from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from service.attention.engine import LoadedLayer
from service.errors import LayerError, LayerNotFound, NotReady
from service.layers.catalog import Catalog, Found, ServedLayer, load_all
from service.layers.store import Store
from tests.unit.layers.checkpoints import stored


@pytest.fixture
def store(tmp_path) -> Store:
    """Three layers, the middle one damaged."""
    made = Store(tmp_path)
    for name in ("c", "b", "a"):
        made.save(stored(name))
    (tmp_path / "b.safetensors").write_bytes(b"rubbish")
    return made


def catalog_of(found: Found) -> Catalog:
    """Return the catalog that serves these layers once the engine has loaded them."""
    loaded_layers = {name: LoadedLayer(stored.spec, stored.tensors) for name, stored in found.layers.items()}
    return Catalog({name: ServedLayer(stored, loaded_layers[name]) for name, stored in found.layers.items()})


def test_layers_are_served_in_name_order_and_found_by_name(store, tmp_path):
    (tmp_path / "b.safetensors").unlink()
    found = load_all(store, strict=True)
    assert found.failures == {}
    catalog = catalog_of(found)
    assert catalog.names() == ["a", "c"]
    assert catalog.get("c").name == "c"


def test_one_bad_layer_does_not_stop_the_others(store):
    """F13, lenient: the bad layer is kept as a failure that says why."""
    found = load_all(store, strict=False)
    assert list(found.layers) == ["a", "c"]
    assert list(found.failures) == ["b"]
    assert found.failures["b"].message.startswith('layer "b": ')


def test_strict_raises_the_first_failure(store):
    """F13, strict."""
    with pytest.raises(LayerError, match=r'^layer "b": '):
        load_all(store, strict=True)


def test_a_missing_directory_is_a_failure_either_way(tmp_path):
    for strict in (True, False):
        with pytest.raises(LayerError, match="does not exist"):
            load_all(Store(tmp_path / "none"), strict=strict)


def test_an_empty_directory_gives_no_layers(tmp_path):
    assert load_all(Store(tmp_path), strict=True).layers == {}


@pytest.mark.parametrize("name", ["b", "A", "../a", "", "a\n", "\ud800", "x" * 10_000], ids=range(7))
def test_an_unknown_name_is_not_found_and_not_echoed(store, name):
    """A layer that failed to load is unknown, too."""
    with pytest.raises(LayerNotFound) as caught:
        catalog_of(load_all(store, strict=False)).get(name)
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
