"""Importer: Hugging Face and torch checkpoints, configs, refusals, and what a stored layer records of its source."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from service.attention.spec import Window
from service.layers.importer import import_layer
from service.layers.store import StoredLayer
from tests.unit.layers.checkpoints import (
    bert,
    linears,
    mha,
    random,
    save_directory,
    save_safetensors,
)
from tests.unit.layers.refusals import refused_import


def imported(tmp_path: Path, tensors: dict[str, torch.Tensor], **options) -> StoredLayer:
    return import_layer(save_safetensors(tmp_path / "x.safetensors", tensors), name="x", **options)


def test_a_transformer_of_torch_is_imported_by_prefix(tmp_path):
    """Self- and cross-attention of a decoder layer have one number, so it takes a prefix to choose between them."""
    model = torch.nn.Transformer(8, 2, 2, 2, 16, batch_first=True)
    path = save_safetensors(tmp_path / "x.safetensors", model.state_dict())
    layer = import_layer(path, name="x", heads=2, prefix="decoder.layers.1.multihead_attn")
    weight = model.decoder.layers[1].multihead_attn.in_proj_weight
    assert torch.equal(torch.cat([layer.tensors[f"{name}.weight"] for name in ("query", "key", "value")]), weight)
    assert layer.source == "x.safetensors decoder.layers.1.multihead_attn (torch-mha)"
    assert "layer 1 has 3 attentions: --prefix 'decoder.layers.1.multihead_attn' or --prefix '" in refused_import(
        path, heads=2, layer=1
    )
    assert torch.equal(import_layer(path, name="x", heads=2, prefix="encoder", layer=0).tensors["output.bias"],
                       model.encoder.layers[0].self_attn.out_proj.bias)  # fmt: skip


BERT = ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense")
HUGGING_FACE = {
    "bert": ("bert.encoder.layer.{}.", *BERT),
    "roberta": ("encoder.layer.{}.", *BERT),
    "distilbert": ("distilbert.transformer.layer.{}.", *(f"attention.{name}_lin" for name in ("q", "k", "v", "out"))),
    "albert": (
        "albert.encoder.albert_layer_groups.0.albert_layers.{}.",
        *(f"attention.{name}" for name in ("query", "key", "value", "dense")),
    ),
    "vit": (
        "vit.encoder.layer.{}.",
        *(f"attention.attention.{name}" for name in ("query", "key", "value")),
        "attention.output.dense",
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", HUGGING_FACE)
def test_a_hugging_face_directory_gives_each_of_its_layers(tmp_path, family):
    """Each projection has its own name and comes from the chosen layer; heads come from the config."""
    prefix, *modules = HUGGING_FACE[family]
    depth = 1 if family == "albert" else 3
    tensors: dict[str, torch.Tensor] = {"embeddings.weight": random(9, 8)}
    for index in range(depth):
        made = linears(prefix.format(index), *modules)
        tensors |= {key: value + index for key, value in made.items()}
    key = {"distilbert": "n_heads"}.get(family, "num_attention_heads")
    path = save_directory(tmp_path / "model", tensors, {key: 4, "num_hidden_layers": depth})
    for index in range(depth):
        layer = import_layer(path, name="x", layer=index)
        for module, name in zip(modules, ("query", "key", "value", "output"), strict=True):
            for kind in ("weight", "bias"):
                assert torch.equal(layer.tensors[f"{name}.{kind}"], tensors[f"{prefix.format(index)}{module}.{kind}"])
        assert (layer.spec.num_heads, layer.spec.head_width, layer.spec.scale) == (4, 2, 1 / math.sqrt(2))
        assert layer.family == {"roberta": "bert"}.get(family, family)
        assert layer.source == f"model {prefix.format(index)}attention ({layer.family})"
    assert f"has attention layers numbered 0 to {depth - 1} ({depth} in all)" in refused_import(path, layer=depth)


def test_a_vit_without_qkv_biases_has_only_the_output_bias(tmp_path):
    prefix, *modules = HUGGING_FACE["vit"]
    tensors = linears(prefix.format(0), *modules)
    lean = {key: value for key, value in tensors.items() if not key.endswith(("query.bias", "key.bias", "value.bias"))}
    assert imported(tmp_path, lean, heads=2).spec.biases == ("output",)


def test_the_scale_can_be_given(tmp_path):
    assert imported(tmp_path, mha(), heads=2, scale=1.0).spec.scale == 1.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_sources_dtype_and_bits_are_kept(tmp_path, dtype):
    tensors = {key: value.to(dtype) for key, value in bert(1).items()}
    layer = imported(tmp_path, tensors, heads=2)
    assert layer.dtype == dtype
    assert torch.equal(layer.tensors["key.bias"], tensors["bert.encoder.layer.0.attention.self.key.bias"])


@pytest.mark.parametrize(
    ("weights", "biases", "stored"),
    [
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.float16, torch.bfloat16, torch.float32),
        (torch.float32, torch.float64, torch.float64),
    ],
    ids=str,
)
def test_mixed_dtypes_become_the_one_that_holds_all_values_exactly(tmp_path, weights, biases, stored):
    tensors = {key: value.to(biases if key.endswith("bias") else weights) for key, value in bert(1).items()}
    layer = imported(tmp_path, tensors, heads=2)
    assert layer.dtype == stored
    for kind in ("weight", "bias"):
        source = tensors[f"bert.encoder.layer.0.attention.self.key.{kind}"]
        assert torch.equal(layer.tensors[f"key.{kind}"].double(), source.double())


def test_a_key_unknown_to_a_family_can_be_ignored(tmp_path):
    """Only the one that is named."""
    extra = {f"bert.encoder.layer.0.attention.self.{name}": random(3) for name in ("query.lora_A.weight", "gate")}
    path = save_safetensors(tmp_path / "x.safetensors", {**bert(1), **extra})
    first, second = extra
    assert refused_import(path, heads=2).endswith(f"): {second!r}, {first!r}")
    assert refused_import(path, heads=2, ignore=[first]).endswith(f"): {second!r}")
    assert import_layer(path, name="x", heads=2, ignore=[first, second])


def test_impossible_weights_are_refused_by_name(tmp_path):
    """NaN and integers in the chosen layer; those of another layer do not count."""
    tensors = bert(2)
    key = "bert.encoder.layer.1.attention.self.key."
    path = tmp_path / "x.safetensors"
    for changed, why in (
        ({f"{key}weight": torch.full((8, 8), math.nan)}, "'key.weight' holds NaN or infinity"),
        ({f"{key}bias": torch.zeros(8, dtype=torch.int8)}, f"'{key}bias' holds I8"),
    ):
        save_safetensors(path, {**tensors, **changed})
        message = refused_import(path, heads=2, layer=1)
        assert message.startswith("source 'x.safetensors': ")
        assert why in message
        assert import_layer(path, name="x", heads=2, layer=0)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"position_embedding_type": "relative_key"}, "relative positions"),
        ({"position_embedding_type": ["rotary"]}, "relative positions"),
        ({"model_type": "roformer"}, "model_type roformer: it changes queries or keys"),
        ({"model_type": "roformer", "attention_type": "original_full"}, "it changes queries or keys"),
        ({"model_type": "layoutlmv3"}, "relative positions"),
        ({"model_type": "nezha"}, "relative positions"),
        ({"model_type": "bros"}, "relative positions"),
        ({"model_type": "yoso"}, "model_type yoso: it computes sparse or approximate attention"),
        ({"model_type": "big_bird", "attention_type": "block_sparse"}, "sparse or approximate attention"),
    ],
)
def test_a_config_of_another_attention_is_refused(tmp_path, config, why):
    """RoFormer's rotation, LayoutLM's bias, NEZHA's distances and YOSO's hashes leave no key inside the module."""
    path = save_directory(tmp_path / "d", bert(1), {"num_attention_heads": 2, **config})
    assert why in refused_import(path)
    plain = {"num_attention_heads": 2, "position_embedding_type": "absolute", "model_type": ["?"]}
    (path / "config.json").write_text(json.dumps(plain))
    assert import_layer(path, name="x")


def test_a_config_may_ask_big_bird_for_dense_attention(tmp_path):
    config = {"num_attention_heads": 2, "model_type": "big_bird", "attention_type": "original_full"}
    assert import_layer(save_directory(tmp_path / "d", bert(1), config), name="x").spec.num_heads == 2


@pytest.mark.parametrize(
    "text", ["[]", "", "{", '{"a": 1, "a": 2}', '{"a": nan}', "\ufeff{}", "[" * 100_000, '{"num_attention_heads": "2"}']
)
def test_a_broken_config_is_refused(tmp_path, text):
    path = save_directory(tmp_path / "d", bert(1))
    (path / "config.json").write_text(text)
    assert refused_import(path).startswith("source 'd': ")


@pytest.mark.parametrize("number", ["Infinity", "-Infinity", "NaN", "1e999", "1" + "0" * 4000, "-" + "9" * 20])
def test_a_config_may_have_numbers_beyond_json(tmp_path, number):
    """Python writes them: `"attention_window": Infinity`."""
    path = save_directory(tmp_path / "d", bert(1))
    (path / "config.json").write_text(f'{{"num_attention_heads": 2, "window": {number}}}')
    assert import_layer(path, name="x").spec.num_heads == 2
    (path / "config.json").write_text(f'{{"num_attention_heads": {number}}}')
    assert "must be a whole number" in refused_import(path)


def test_the_name_is_checked_before_the_source_is_opened(tmp_path):
    assert refused_import(tmp_path / "nothing", name="../x").startswith("a layer's name is")


def test_the_recorded_source_has_no_directory_and_is_printable(tmp_path):
    """It is shown to every client."""
    odd = tmp_path / "a\nb\x1b[31m\u202e.safetensors"
    layer = import_layer(
        save_safetensors(odd, {f"{'x' * 300}.{key}": value for key, value in mha().items()}), name="x", heads=2
    )
    assert layer.source.isprintable()
    assert str(tmp_path) not in layer.source
    assert layer.source.startswith("a?b?[31m?.safetensors xxx")
    assert len(layer.source) == 200


def test_a_relative_path_is_recorded_by_the_name_of_its_directory(tmp_path, monkeypatch):
    path = save_directory(tmp_path / "minilm", bert(1), {"num_attention_heads": 2})
    monkeypatch.chdir(path)
    assert import_layer(".", name="x").source == "minilm bert.encoder.layer.0.attention (bert)"


def test_an_import_keeps_no_reference_to_its_source(tmp_path):
    """Neither a mapping of the file nor memory shared among the projections."""
    path = tmp_path / "x.pt"
    torch.save(mha(), path)
    layer = import_layer(path, name="x", heads=2)
    assert str(path) not in Path("/proc/self/maps").read_text()
    storages = {tensor.untyped_storage().data_ptr() for tensor in layer.tensors.values()}
    assert len(storages) == len(layer.tensors)
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in layer.tensors.values())


def test_the_caller_says_that_a_layer_of_torch_is_causal(tmp_path):
    path = save_safetensors(tmp_path / "x.safetensors", mha())
    assert import_layer(path, name="x", heads=2, causal=True).spec.window == Window(None, 0)
    path = save_safetensors(tmp_path / "bert.safetensors", bert(1))
    assert "--causal is for layers of torch and of one's own" in refused_import(path, heads=2, causal=True)
