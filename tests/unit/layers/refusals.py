"""Messages of the LayerErrors that imports, sources and stores raise, with the checks that hold for each of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from service.errors import LayerError
from service.layers.importer import import_layer
from service.layers.source import open_source
from service.layers.store import Store


def refused_import(path: Path, **options) -> str:
    """Return why the import is refused."""
    return _refused(lambda: import_layer(path, **{"name": "x", **options}))


def refused_source(path: str | Path) -> str:
    """Return why the source is refused when it is opened."""
    message = _refused(lambda: open_source(path))
    assert message.startswith("source '")
    assert not isinstance(path, Path) or str(path.parent) not in message
    return message


def refused_load(store: Store, name: str = "tiny") -> str:
    """Return why the stored layer is refused."""
    message = _refused(lambda: store.load(name))
    assert message.startswith(f'layer "{name}": ')
    assert "Error" not in message
    assert str(store.directory) not in message
    return message


def _refused(act: Callable[[], object]) -> str:
    with pytest.raises(LayerError) as caught:
        act()
    assert len(caught.value.message) <= 500
    return caught.value.message
