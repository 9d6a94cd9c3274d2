"""The import of a model: which checkpoints it takes, and the sentence for each that it refuses."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from service.errors import LayerError
from service.layers.importer import import_layer
from tests.unit.models.encoders import CONFIGS, checkpoint, imported, tokenizer_json

WORD = "embeddings.word_embeddings.weight"


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("prefix", ["", "model.", "0.auto_model."])
def test_any_prefix_may_stand_before_the_keys(tmp_path, family, prefix):
    plain, _ = imported(checkpoint(tmp_path / "plain", family))
    model, layers = imported(checkpoint(tmp_path / "below", family, prefix))
    assert model.digest == plain.digest
    assert [layer.name for layer in layers] == ["tiny-l0", "tiny-l1"]
    assert [tuple(ref) for ref in model.layers] == [(layer.name, layer.digest) for layer in layers]
    assert (model.family, model.source) == (family, f"below ({family})")


def test_its_layers_are_those_of_layers_import(tmp_path):
    path = checkpoint(tmp_path)
    _, layers = imported(path)
    assert [layer.digest for layer in layers] == [import_layer(path, name="x", layer=n).digest for n in range(2)]


def test_the_names_that_tensorflow_gives_to_norms_are_read(tmp_path):
    expected, _ = imported(checkpoint(tmp_path / "torch"))
    path = checkpoint(tmp_path / "tensorflow")
    tensors = load_file(path / "model.safetensors")
    names = {".weight": ".gamma", ".bias": ".beta"}
    save_file(
        {
            key[: key.rindex(".")] + names[key[key.rindex(".") :]] if "LayerNorm" in key else key: tensor
            for key, tensor in tensors.items()
        },
        path / "model.safetensors",
    )
    assert imported(path)[0].digest == expected.digest


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_every_floating_point_dtype_is_kept(tmp_path, dtype):
    path = checkpoint(tmp_path)
    tensors = {key: tensor.to(dtype) for key, tensor in load_file(path / "model.safetensors").items()}
    save_file(tensors, path / "model.safetensors")
    assert {tensor.dtype for tensor in imported(path)[0].tensors.values()} == {dtype}


def test_tables_of_positions_that_are_no_parameters_are_left_out(tmp_path):
    changes = {"embeddings.position_ids": torch.arange(40)[None], "embeddings.token_type_ids": torch.zeros(1, 40)}
    assert imported(checkpoint(tmp_path, **changes))[0].options.positions == 40


REFUSED = {
    "albert": ({"model_type": "albert"}, "its model_type is 'albert'; models that are served are encoders: bert, "),
    "mpnet": ({"model_type": "mpnet"}, "parts beside projections"),
    "deberta": ({"model_type": "deberta-v2"}, "relative positions"),
    "gpt2": ({"model_type": "gpt2"}, "its model_type is 'gpt2'"),
    "modernbert": ({"model_type": "modernbert"}, "parts beside projections"),
    "no type": ({"model_type": None}, "its config.json has no model_type"),
    "a type that is no name": ({"model_type": ["bert"]}, "its config.json has no model_type"),
    "relative": ({"position_embedding_type": "relative_key"}, "relative positions"),
    "decoder": ({"is_decoder": True}, "is_decoder: the model is a decoder"),
    "cross-attention": ({"add_cross_attention": True}, "add_cross_attention: the model is a decoder"),
    "activation": ({"hidden_act": "mish"}, "hidden_act is 'mish'; expected one of gelu, gelu_new"),
    "activation that is no name": ({"hidden_act": 3}, "hidden_act is no name"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers in config.json must be a whole number from 1"),
    "layers that are no number": ({"num_hidden_layers": True}, "num_hidden_layers in config.json must be"),
    "too few layers": ({"num_hidden_layers": 1}, "keys that a bert of 1 layers does not use: 'encoder.layer.1."),
    "too many layers": ({"num_hidden_layers": 3}, "keys of the bert model are missing: 'encoder.layer.2."),
    "heads": ({"num_attention_heads": 3}, "3 heads do not divide"),
    "eps of 0": ({"layer_norm_eps": 0.0}, "eps must be a decimal number between 0 and 1"),
    "eps that is no number": ({"layer_norm_eps": float("nan")}, "eps must be a decimal number between 0 and 1"),
    "no words": ({WORD: None}, f"0 keys end in {WORD}, expected one"),
    "two encoders": ({f"other.{WORD}": torch.zeros(3, 8)}, f"2 keys end in {WORD}, expected one"),
    "too few words": (
        {WORD: torch.zeros(20, 8)},
        "tokenizer.json has the id 61, but the model has embeddings of 20 ids",
    ),
    "words of another width": ({WORD: torch.zeros(80, 6)}, "has the shape [80, 6], expected [80, 8]"),
    "words that are no table": ({WORD: torch.zeros(80)}, "must be matrices"),
    "no positions": ({"embeddings.position_embeddings.weight": torch.zeros(())}, "positions must be a whole number"),
    "a bias that is missing": ({"embeddings.LayerNorm.bias": None}, "are missing: 'embeddings.LayerNorm.bias'"),
    "NaN": ({"embeddings.LayerNorm.bias": torch.full((8,), float("nan"))}, "finite in float32"),
    "beyond float32": ({WORD: torch.full((80, 8), 1e300, dtype=torch.float64)}, "finite in float32"),
    "an adapter": (
        {"encoder.layer.0.adapter.weight": torch.zeros(8)},
        "does not use: 'encoder.layer.0.adapter.weight'",
    ),
    "a lone projection": (
        {"embeddings_project.weight": torch.zeros(8, 8)},
        "does not use: 'embeddings_project.weight'",
    ),
    "an attention's own norm": (
        {"encoder.layer.0.attention.self.norm.weight": torch.zeros(8)},
        "has keys that the bert",
    ),
}


@pytest.mark.parametrize(("changes", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_model_that_is_not_served_is_refused_in_one_sentence(tmp_path, changes, reason):
    with pytest.raises(LayerError) as raised:
        imported(checkpoint(tmp_path / "mine", **changes))
    assert reason in raised.value.message
    assert raised.value.message.startswith("source 'mine': ")
    assert raised.value.message.count("source") == 1
    assert str(tmp_path) not in raised.value.message


@pytest.mark.parametrize(
    ("name", "raw", "reason"),
    [
        ("tokenizer.json", None, "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"),
        ("tokenizer.json", b"{}", "is not one that the library tokenizers reads"),
        ("tokenizer.json", b"", "is not one that the library tokenizers reads"),
        ("tokenizer.json", tokenizer_json().replace(b'"ids":[2]', b'"ids":[2000]'), "has the id 2000"),
        ("config.json", None, "has no config.json"),
        ("config.json", b"[]", "must be a JSON object"),
    ],
)
def test_a_directory_without_a_file_that_is_needed_is_refused(tmp_path, name, raw, reason):
    path = checkpoint(tmp_path / "mine")
    (path / name).unlink() if raw is None else (path / name).write_bytes(raw)
    with pytest.raises(LayerError) as raised:
        imported(path)
    assert reason in raised.value.message


@pytest.mark.parametrize("name", ["", "Minilm", "a/b", "sdpa", "x" * 65, "x" * 63])
def test_a_name_that_no_model_or_layer_can_have_is_refused(tmp_path, name):
    """The names of layers are longer than the model's."""
    with pytest.raises(LayerError, match="name"):
        imported(checkpoint(tmp_path), name)


def test_a_config_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch):
    path = checkpoint(tmp_path)
    config = json.loads((path / "config.json").read_text())

    def changed(*_, **__):
        (path / "config.json").write_text(json.dumps({**config, "x": 1}))
        raise LayerError("any")

    monkeypatch.setattr("service.models.importer.Tokenizer", changed)
    with pytest.raises(LayerError, match=r"'config\.json' changed while it was read"):
        imported(path)
