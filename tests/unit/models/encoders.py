"""Tiny seeded checkpoints of encoders with a tokenizer, and encoders made of them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers, processors

from service.attention.call import Call
from service.attention.engine import LoadedLayer
from service.attention.layer import Layer
from service.layers.store import StoredLayer
from service.models.encoder import Encoder, EncoderCall, placeholder
from service.models.families import BY_MODEL
from service.models.importer import import_model
from service.models.stored_model import ModelOptions, StoredModel

CPU = torch.device("cpu")
WIDTH = 8
LETTERS = [*"abcdefghijklmnopqrstuvwxyz", "é", "ш", "🐈"]
SPECIAL = {"bert": ["[PAD]", "[UNK]", "[CLS]", "[SEP]"], "roberta": ["<s>", "<pad>", "</s>", "<unk>"]}
CONFIG = {
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "intermediate_size": 16,
    "max_position_embeddings": 40,
    "type_vocab_size": 2,
    "pad_token_id": 1,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
}
DISTILBERT = {"n_heads": 2, "n_layers": 2, "dim": 8, "hidden_dim": 16, "max_position_embeddings": 40}
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": CONFIG,
    "roberta": {**CONFIG, "type_vocab_size": 1, "hidden_act": "gelu_new"},
    "electra": {**CONFIG, "embedding_size": 4, "hidden_act": "relu"},
    "distilbert": DISTILBERT,
}


def tokenizer_json(kind: str = "bert") -> bytes:
    """Words of letters by WordPiece, with truncation and padding, which a service ignores."""
    first, last = ("[CLS]", "[SEP]") if kind != "roberta" else ("<s>", "</s>")
    words = SPECIAL["roberta" if kind == "roberta" else "bert"] + LETTERS + [f"##{letter}" for letter in LETTERS]
    vocabulary = {word: place for place, word in enumerate(words)}
    unknown = "[UNK]" if kind != "roberta" else "<unk>"
    library = Library(models.WordPiece(vocabulary, unk_token=unknown))
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}",
        pair=f"{first} $A {last} $B:1 {last}:1",
        special_tokens=[(first, vocabulary[first]), (last, vocabulary[last])],
    )
    library.enable_truncation(5)
    library.enable_padding(length=20)
    return library.to_str().encode()


def tensors_of(model_type: str, prefix: str = "") -> dict[str, torch.Tensor]:
    """The tensors of the family's table and of its attention layers, with those of a head."""
    family, config = BY_MODEL[model_type], CONFIGS[model_type]
    embedding, depth = config.get("embedding_size", WIDTH), 2
    rows, types = config["max_position_embeddings"], config.get("type_vocab_size", 0)
    options = ModelOptions(WIDTH, embedding, 16, 80, rows, 0, types, 1e-5, "gelu")
    shapes, keys = options.tensor_shapes(depth), family.keys(depth, is_projected=options.is_projected)
    names = ("q_lin", "k_lin", "v_lin", "out_lin")
    if family.attention == "bert":
        names = ("self.query", "self.key", "self.value", "output.dense")
    made: dict[str, torch.Tensor] = {f"{prefix}pooler.dense.weight": torch.zeros(2, 2), "cls.bias": torch.zeros(3)}
    random = torch.Generator().manual_seed(7)
    made |= {prefix + key: torch.randn(shapes[ours], generator=random) for ours, key in keys.items()}
    for n in range(depth):
        for name in names:
            below = f"{prefix}{family.layer.format(n=n)}attention.{name}"
            made |= {
                f"{below}.weight": torch.randn(WIDTH, WIDTH, generator=random) / 2,
                f"{below}.bias": torch.ones(WIDTH),
            }
    return made


def checkpoint(path: Path, model_type: str = "bert", prefix: str = "", /, **changes: Any) -> Path:
    """Write a checkpoint directory; `changes` are tensors by key (None: left out), or options of its config.json."""
    path.mkdir(exist_ok=True, parents=True)
    tensors: dict[str, Any] = tensors_of(model_type, prefix)
    config = {"model_type": model_type, **CONFIGS[model_type]}
    for name, value in changes.items():
        (tensors if "." in name else config)[name] = value
    save_file({key: tensor for key, tensor in tensors.items() if tensor is not None}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (path / "tokenizer.json").write_bytes(tokenizer_json(model_type))
    return path


def imported(path: Path, name: str = "tiny") -> tuple[StoredModel, list[StoredLayer]]:
    return import_model(path, name=name)


def encoder(model: StoredModel, layers: list[StoredLayer], dtype: torch.dtype = torch.float32) -> Encoder:
    return Encoder(model, [loaded_layer(layer, dtype) for layer in layers], device=CPU)


def loaded_layer(layer: StoredLayer, dtype: torch.dtype = torch.float32) -> LoadedLayer:
    """The layer as the engine has it after its load."""
    build = partial(Layer, layer.spec, layer.tensors)
    return LoadedLayer(build, dtype, variants={dtype: build(dtype=dtype, device=CPU)})


def states_call(ids: list[int], types: list[int], *states: int) -> EncoderCall:
    return EncoderCall(torch.tensor(ids), torch.tensor(types), states=states)


def attend_call(ids: list[int], layer: int, width: int, **parts: Any) -> EncoderCall:
    call = Call(placeholder(len(ids), width), **parts)
    return EncoderCall(torch.tensor(ids), torch.zeros(len(ids), dtype=torch.long), layer, call)
