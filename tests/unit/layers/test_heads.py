"""Heads: the number of heads that a config and the caller give, pruned layers, and widths that disagree."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from service.attention import reference
from service.layers.importer import import_layer
from service.layers.store import StoredLayer
from tests.unit.layers.checkpoints import linear, random, save_directory, save_safetensors
from tests.unit.layers.refusals import refused_import

PRUNED = {"0": [0, 2, 5, 7]}


def narrow(rows: int, width: int, prefix: str = "encoder.layer.0.") -> dict[str, torch.Tensor]:
    """Return a layer of BERT whose heads have `rows` rows in all."""
    made: dict[str, torch.Tensor] = {}
    for seed, name in enumerate(("query", "key", "value")):
        made |= linear(f"{prefix}attention.self.{name}", rows, width, seed=seed)
    return made | linear(f"{prefix}attention.output.dense", width, rows, seed=3)


def directory(
    path: Path, config: Mapping[str, object], rows: int = 16, width: int = 32, prefix: str = "encoder.layer.0."
):
    return save_directory(path / "d", narrow(rows, width, prefix), config)


def imported(path: Path, config: Mapping[str, object], rows: int = 16, width: int = 32, **options) -> StoredLayer:
    return import_layer(directory(path, config, rows, width), name="x", **options)


@pytest.mark.parametrize("given", [None, 4])
@pytest.mark.parametrize("sizes", [{"hidden_size": 32}, {}])
def test_a_pruned_layer_has_the_heads_that_are_left_as_wide_as_before(tmp_path, given, sizes):
    """8 heads of 4 less 4 heads: its output is that of the whole layer with the outputs of the removed heads zeroed."""
    config = {"num_attention_heads": 8, "pruned_heads": PRUNED, **sizes}
    whole = narrow(32, 32)
    kept = torch.tensor([4 * head + i for head in (1, 3, 4, 6) for i in range(4)])
    tensors = {key: value if "output.dense" in key else value[kept] for key, value in whole.items()} | {
        "encoder.layer.0.attention.output.dense.weight": whole["encoder.layer.0.attention.output.dense.weight"][:, kept]
    }
    layer = import_layer(save_directory(tmp_path / "d", tensors, config), name="x", heads=given)
    assert (layer.spec.num_heads, layer.spec.head_width, layer.spec.scale) == (4, 4, 0.5)
    x = random(5, 32).double().numpy()
    found, _ = reference.attend(layer.spec, {k: v.double().numpy() for k, v in layer.tensors.items()}, x, x, x)
    np.testing.assert_allclose(found, without_heads(whole, x, removed=PRUNED["0"]), rtol=1e-12)


def without_heads(tensors: dict[str, torch.Tensor], x: np.ndarray, removed: list[int]) -> np.ndarray:
    """Return the output of BERT's attention with 8 heads in float64, with the removed heads' outputs zeroed."""

    def project(name: str, rows: np.ndarray) -> np.ndarray:
        below = f"encoder.layer.0.attention.{name}."
        made = rows @ tensors[f"{below}weight"].double().numpy().T + tensors[f"{below}bias"].double().numpy()
        return np.asarray(made)

    q, k, v = (
        project(f"self.{name}", x).reshape(len(x), 8, 4).transpose(1, 0, 2) for name in ("query", "key", "value")
    )
    scores = q @ k.transpose(0, 2, 1) / 2
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    heads = weights / weights.sum(-1, keepdims=True) @ v
    heads[removed] = 0
    return project("output.dense", heads.transpose(1, 0, 2).reshape(len(x), 32))


def test_a_layer_that_is_not_pruned_keeps_the_configs_heads(tmp_path):
    config = {"num_attention_heads": 8, "hidden_size": 32, "pruned_heads": {"1": [0, 2], "0": []}}
    assert imported(tmp_path, config, rows=32).spec.num_heads == 8
    assert imported(tmp_path, {**config, "pruned_heads": {}}, rows=32).spec.num_heads == 8


@pytest.mark.parametrize(
    ("config", "rows", "heads", "why"),
    [
        ({"pruned_heads": PRUNED}, 16, 8, "contradictory: 4 by num_attention_heads less pruned_heads, 8 by the caller"),
        ({"pruned_heads": PRUNED}, 32, None, "but the 32 rows of query make 4 heads of 8"),
        ({"pruned_heads": {"1": [0]}}, 16, None, "but the 16 rows of query make 8 heads of 2"),
        ({"hidden_size": 32}, 16, None, "32 wide with 8 heads, so heads of 4, but the 16 rows of query make 8 heads of 2"),
        ({"head_dim": 4}, 16, None, "config.json has head_dim 4, but the 16 rows of query make 8 heads of 2"),
        ({"attention_head_size": 8}, 32, None, "has attention_head_size 8, but the 32 rows of query make 8 heads of 4"),
        ({"kv_channels": 3}, 32, None, "has kv_channels 3, but"),
        ({"head_dim": "4"}, 32, None, "has head_dim '4', but"),
        ({"num_key_value_heads": 2}, 32, None, "has num_key_value_heads 2 for 8 heads: grouped key and value heads are not"),
    ],
    ids=str,
)  # fmt: skip
def test_numbers_that_disagree_with_the_rows_are_refused(tmp_path, config, rows, heads, why):
    path = directory(tmp_path, {"num_attention_heads": 8, **config}, rows)
    assert why in refused_import(path, heads=heads)


def test_widths_that_agree_are_accepted(tmp_path):
    """Also another width of heads than hidden_size / heads, if the config names it, and as many key heads as heads."""
    config = {"num_attention_heads": 8, "hidden_size": 32, "head_dim": 2, "num_key_value_heads": 8, "d_kv": None}
    assert imported(tmp_path, config).spec.head_width == 2


@pytest.mark.parametrize(
    "pruned",
    [[0, 2], {"0": 2}, {"0": [8]}, {"0": [-1]}, {"0": [True]}, {"0": [1, 1]}, {"x": [1]}, {"0": ["1"]}, "0", 3, {"5": None}],
    ids=str,
)  # fmt: skip
def test_pruned_heads_of_another_form_are_refused_with_the_form(tmp_path, pruned):
    path = directory(tmp_path, {"num_attention_heads": 8, "pruned_heads": pruned})
    assert 'pruned_heads in config.json must map numbers of layers to heads from 0 to 7, as {"0": [2, 5]}' in (
        refused_import(path)
    )


def test_pruned_heads_need_a_layers_number_and_leave_a_head(tmp_path):
    config = {"num_attention_heads": 8, "pruned_heads": PRUNED}
    path = directory(tmp_path, config, prefix="")
    assert "pruned_heads in config.json goes by the layer's number, which the names of its keys lack" in (
        refused_import(path)
    )
    path = directory(tmp_path, {**config, "pruned_heads": {"0": [*range(8)]}})
    assert "pruned_heads in config.json leaves this layer no head" in refused_import(path)


@pytest.mark.parametrize("key", ["num_attention_heads", "num_heads"])
def test_a_list_of_heads_for_each_stage_needs_the_callers_choice(tmp_path, key):
    path = directory(tmp_path, {key: [1, 2, 5, 8], "hidden_sizes": [32, 64, 160, 256]}, rows=32)
    assert (
        f"{key} in config.json is a list, one number for each stage: [1, 2, 5, 8]; give this layer's with --heads H"
        in (refused_import(path))
    )
    assert import_layer(path, name="x", heads=2).spec.num_heads == 2
    assert refused_import(path, heads=4).endswith("contradictory: [1, 2, 5, 8] by num_attention_heads, 4 by the caller".replace(
        "num_attention_heads", key))  # fmt: skip


@pytest.mark.parametrize(
    "key", ["num_attention_heads", "n_heads", "n_head", "num_heads", "nhead", "encoder_attention_heads"]
)
def test_the_number_of_heads_has_several_names(tmp_path, key):
    assert imported(tmp_path, {key: 8, "n_layer": 1}, rows=32).spec.num_heads == 8
    assert "give it with --heads H" in refused_import(directory(tmp_path, {key: None}))


def test_an_encoder_and_a_decoder_have_heads_of_their_own(tmp_path):
    config = {"encoder_attention_heads": 4, "decoder_attention_heads": 8}
    for side, heads in (("encoder", 4), ("decoder", 8)):
        assert (
            import_layer(directory(tmp_path, config, 32, prefix=f"{side}.layers.0."), name="x").spec.num_heads == heads
        )
    mae = {"num_attention_heads": 4, "decoder_num_attention_heads": 8}
    for side, heads in (("encoder", 4), ("decoder", 8)):
        assert import_layer(directory(tmp_path, mae, 32, prefix=f"vit.{side}.0."), name="x").spec.num_heads == heads
    message = refused_import(directory(tmp_path, config, 32, prefix="layers.0."))
    assert message.endswith("4 by encoder_attention_heads, 8 by decoder_attention_heads")


@pytest.mark.parametrize("name", ["own.safetensors", "model.safetensors", "own.pt"])
def test_a_map_reads_the_heads_from_a_config_beside_its_file(tmp_path, name):
    """Whatever the file is called; a file that is not mapped has a config only under Hugging Face's names."""
    key_map = {
        role: f"attn.{letter}.weight" for role, letter in zip(("query", "key", "value", "output"), "qkvo", strict=True)
    }
    tensors = {key: random(8, 8) for key in key_map.values()}
    path = tmp_path / name
    torch.save(tensors, path) if name.endswith(".pt") else save_safetensors(path, tensors)
    assert "give it with --heads H" in refused_import(path, key_map=key_map)
    (tmp_path / "config.json").write_text(json.dumps({"num_heads": 4}))
    assert import_layer(path, name="x", key_map=key_map).spec.num_heads == 4
    assert refused_import(path, key_map=key_map, heads=2).endswith("4 by num_heads, 2 by the caller")
