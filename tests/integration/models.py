"""Small models over seeded layers, with a vocabulary of some words and pieces."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from service.layers.store import StoredLayer
from service.models.stored_model import LayerRef, ModelOptions, ModelStore, StoredModel
from tests.integration.running import small_layer

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "animal", "street", "it", "was", "##s", "é", ".", "tired", "😀"]
MAX_TOKENS = 12
LAYERS = [small_layer("tiny-l0"), small_layer("tiny-l1")]


def tokenizer_json() -> bytes:
    """WordPiece of BERT, with [CLS] and [SEP], as `tokenizers` writes it."""
    ids = {piece: i for i, piece in enumerate(PIECES)}
    special = [{"SpecialToken": {"id": name, "type_id": 0}} for name in ("[CLS]", "[SEP]")]
    text = [{"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB")]
    second = {"SpecialToken": {"id": "[SEP]", "type_id": 1}}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": {"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
            "padding": None,
            "added_tokens": [],
            "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
                           "strip_accents": None, "lowercase": True},
            "pre_tokenizer": {"type": "BertPreTokenizer"},
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [special[0], text[0], special[1]],
                "pair": [special[0], text[0], special[1], text[1], second],
                "special_tokens": {
                    name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in ("[CLS]", "[SEP]")
                },
            },
            "decoder": None,
            "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                      "max_input_chars_per_word": 100, "vocab": ids},
        }
    ).encode()  # fmt: skip


def small_model(
    name: str = "tiny", layers: Sequence[StoredLayer] = LAYERS, max_tokens: int = MAX_TOKENS
) -> StoredModel:
    width = layers[0].spec.query_width
    options = ModelOptions(
        width=width, embedding_width=width, inner_width=32, vocabulary=len(PIECES), positions=max_tokens,
        position_offset=0, types=2, eps=1e-12, activation="gelu",
    )  # fmt: skip
    generator = torch.Generator().manual_seed(7)
    shapes = options.tensor_shapes(len(layers))
    tensors = {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}
    refs = tuple(LayerRef(layer.name, layer.digest) for layer in layers)
    return StoredModel(
        name=name, family="bert", source="made for a test", options=options, layers=refs, tensors=tensors,
        tokenizer=tokenizer_json(),
    )  # fmt: skip


def store(directory: Path, *models: StoredModel) -> ModelStore:
    """Put models into the layer directory of a service in `directory`."""
    found = ModelStore(directory / "layers")
    for model in models or (small_model(),):
        found.save(model)
    return found
