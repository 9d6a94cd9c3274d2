"""Encoder families: a table of the names that each family gives to the tensors and options of an encoder.

Invariants: No family has code of its own; a new family is a new row. Keys are written below the model's prefix, and `{n}` is the
number of a layer. Every key of the embeddings and the layers must be known, because a model without it would compute something
else; other keys belong to the heads of tasks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

# The functions of config.json that the service has, by its names for them.
ACTIVATION_NAMES = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
WORD = "embeddings.word_embeddings.weight"
# Buffers, which are counted from 0 or are 0.
BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EncoderFamily:
    name: str
    models: tuple[str, ...]  # model_type in config.json
    layer: str = "encoder.layer.{n}."
    attention: str = "bert"  # the family of its layers (layers/families.py)
    parts: Mapping[str, str]  # of a layer: the module of each of ours
    depth: str = "num_hidden_layers"
    activation: str = "hidden_act"
    has_types: bool = True
    has_offset: bool = False  # positions begin behind that of padding
    is_projected: bool = False  # a projection may follow the embeddings

    def keys(self, depth: int, *, is_projected: bool) -> dict[str, str]:
        """Return the key of each of our tensors below the prefix."""
        modules = {"embeddings.norm": "embeddings.LayerNorm"}
        if is_projected:
            modules["embeddings.project"] = "embeddings_project"
        for n in range(depth):
            modules |= {f"{n}.{ours}": self.layer.format(n=n) + theirs for ours, theirs in self.parts.items()}
        tables = {"word": WORD, "position": "embeddings.position_embeddings.weight"}
        if self.has_types:
            tables["type"] = "embeddings.token_type_embeddings.weight"
        pairs = [(ours, theirs, kind) for ours, theirs in modules.items() for kind in ("weight", "bias")]
        return {f"embeddings.{name}": key for name, key in tables.items()} | {
            f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs, kind in pairs
        }


_BERT = EncoderFamily(
    name="bert",
    models=("bert",),
    parts={
        "attention_norm": "attention.output.LayerNorm",
        "inner": "intermediate.dense",
        "outer": "output.dense",
        "norm": "output.LayerNorm",
    },
)
ENCODERS = (
    _BERT,
    dataclasses.replace(_BERT, name="roberta", models=("roberta", "xlm-roberta", "camembert"), has_offset=True),
    dataclasses.replace(_BERT, name="electra", models=("electra",), is_projected=True),
    EncoderFamily(
        name="distilbert",
        models=("distilbert",),
        layer="transformer.layer.{n}.",
        attention="distilbert",
        parts={
            "attention_norm": "sa_layer_norm",
            "inner": "ffn.lin1",
            "outer": "ffn.lin2",
            "norm": "output_layer_norm",
        },
        depth="n_layers",
        activation="activation",
        has_types=False,
    ),
)
BY_MODEL = {model: family for family in ENCODERS for model in family.models}
