"""Messages of the LayerErrors that imports, sources and stores raise, with the checks that hold for each of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.errors import LayerError
from service.layers.importer import import_layer
from service.layers.source import open_source
from service.layers.store import Store


def refused_import(path: Path, **options) -> str:
    """Return why the import is refused."""
    with pytest.raises(LayerError) as caught:
        import_layer(path, **{"name": "x", **options})
    assert len(caught.value.message) <= 500
    return caught.value.message


def refused_source(path: str | Path) -> str:
    """Return why the source is refused when it is opened."""
    with pytest.raises(LayerError) as caught:
        open_source(path)
    message = caught.value.message
    assert message.startswith("source '")
    assert len(message) <= 500
    assert not isinstance(path, Path) or str(path.parent) not in message
    return message


def refused_load(store: Store, name: str = "tiny") -> str:
    """Return why the stored layer is refused."""
    with pytest.raises(LayerError) as caught:
        store.load(name)
    message = caught.value.message
    assert message.startswith(f'layer "{name}": ')
    assert len(message) <= 500
    assert "Error" not in message
    assert str(store.directory) not in message
    return message
