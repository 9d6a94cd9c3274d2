"""Attention layers of torch, timm, Keras and Flax, in their own environment: python framework_layers.py DIRECTORY.

A checkpoint of each is written to `NAME.safetensors` with the names of its framework, and `answers.safetensors` gets, by
`NAME/LAYER/CALL/`, the `query` and `key` that a layer received, and the `output` and the `weights`, where it has them, that it
returned. This program imports nothing of the service.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import jax
import keras
import numpy as np
import torch
from flax import linen, nnx, traverse_util
from safetensors.numpy import save_file

WIDTH, HEADS = 32, 4
# Rows of the query, and of the key where it is another sequence.
CALLS = {"1": (1, 33), "7": (7, 1), "33": (33, 7)}
Arrays = dict[str, np.ndarray]
# Query and key, and the output and the weights.
Layer = Callable[[Any, Any], tuple[Any, Any]]


def torch_transformer() -> tuple[Arrays, dict[str, Layer]]:
    """An encoder and a decoder, whose self-attention is causal."""
    model = torch.nn.Transformer(WIDTH, HEADS, 2, 2, 40, batch_first=True).eval()
    shaken(model)
    found: dict[str, Layer] = {}
    for number in range(2):
        found[f"encoder-{number}"] = partial(torch_attention, model.encoder.layers[number].self_attn)
        found[f"decoder-{number}"] = partial(torch_attention, model.decoder.layers[number].self_attn, is_causal=True)
        found[f"cross-{number}"] = partial(torch_attention, model.decoder.layers[number].multihead_attn)
    return state_of(model), found


def torch_attention(module: Any, query: Any, key: Any, *, is_causal: bool = False) -> tuple[Any, Any]:
    rows = query.shape[1]
    mask = torch.ones(rows, rows, dtype=torch.bool).triu(1) if is_causal else None
    answer: tuple[Any, Any] = module(query, key, key, attn_mask=mask, average_attn_weights=False)
    return answer


class TimmAttention(torch.nn.Module):
    """`timm.layers.Attention` 1.0.31 without its options; timm itself imports torchvision."""

    def __init__(self, *, qk_norm: bool) -> None:
        super().__init__()
        norm = partial(torch.nn.LayerNorm, eps=1e-6) if qk_norm else torch.nn.Identity
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.q_norm, self.k_norm = norm(WIDTH // HEADS), norm(WIDTH // HEADS)
        self.proj = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert key is query
        b, n, c = query.shape
        qkv = self.qkv(query).reshape(b, n, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        attn = (q * (c // HEADS) ** -0.5 @ k.transpose(-2, -1)).softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(b, n, c)), attn


def timm_vit(*, qk_norm: bool) -> tuple[Arrays, dict[str, Layer]]:
    blocks = [torch.nn.ModuleDict({"attn": TimmAttention(qk_norm=qk_norm)}) for _ in range(2)]
    model = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList(blocks)}).eval()
    shaken(model)
    return state_of(model), {f"self-{number}": block["attn"] for number, block in enumerate(blocks)}


def keras_attention(kind: str) -> tuple[Arrays, dict[str, Layer]]:
    layer = keras.layers.MultiHeadAttention(HEADS, 6, value_dim=6)
    if kind == "GroupQueryAttention":
        layer = keras.layers.GroupQueryAttention(6, HEADS, 2)
    layer.build((1, 7, WIDTH), (1, 7, WIDTH), (1, 7, WIDTH))
    for weight in layer.weights:
        weight.assign(torch.randn(*weight.shape) * 0.3)
    arrays = {weight.path.replace("/", "."): weight.numpy() for weight in layer.weights}
    return arrays, {"cross": lambda query, key: layer(query, key, key, return_attention_scores=True)}


def linen_attention() -> tuple[Arrays, dict[str, Layer]]:
    layer = linen.MultiHeadDotProductAttention(HEADS, qkv_features=24, out_features=WIDTH, normalize_qk=True)
    shape = np.zeros((1, 7, WIDTH), np.float32)
    shapes = traverse_util.flatten_dict(layer.init(jax.random.key(0), shape, shape)["params"], sep=".")
    arrays = {name: np.asarray(x) + random(x.shape) * np.float32(0.3) for name, x in shapes.items()}
    parameters = {"params": traverse_util.unflatten_dict(arrays, sep=".")}

    def answer(query: Any, key: Any) -> tuple[Any, Any]:
        given = (query.numpy(), key.numpy())
        output, kept = layer.apply(parameters, *given, sow_weights=True, mutable=["intermediates"])
        return output, kept["intermediates"]["attention_weights"][0]

    return {f"self_attention.{name}": x for name, x in arrays.items()}, {"cross": answer}


def nnx_attention() -> tuple[Arrays, dict[str, Layer]]:
    layer = nnx.MultiHeadAttention(HEADS, WIDTH, 24, decode=False, rngs=nnx.Rngs(0))
    arrays: Arrays = {}
    for path, part in nnx.to_flat_state(nnx.state(layer, nnx.Param)):
        arrays[".".join(map(str, path))] = np.asarray(part[...]) + random(part.shape) * np.float32(0.3)
    for name in ("query", "key", "value", "out"):
        for kind in ("kernel", "bias"):
            getattr(getattr(layer, name), kind)[...] = jax.numpy.asarray(arrays[f"{name}.{kind}"])
    return arrays, {"cross": lambda query, key: (layer(query.numpy(), key.numpy(), key.numpy()), None)}


def random(shape: tuple[int, ...]) -> np.ndarray:
    return torch.randn(*shape).numpy()


def shaken(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(torch.randn_like(tensor), alpha=0.2)


def state_of(model: torch.nn.Module) -> Arrays:
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


FRAMEWORKS: dict[str, Callable[[], tuple[Arrays, dict[str, Layer]]]] = {
    "torch": torch_transformer,
    "timm": partial(timm_vit, qk_norm=False),
    "timm-norm": partial(timm_vit, qk_norm=True),
    "keras": partial(keras_attention, "MultiHeadAttention"),
    "keras-grouped": partial(keras_attention, "GroupQueryAttention"),
    "linen": linen_attention,
    "nnx": nnx_attention,
}


def answers(name: str, layers: dict[str, Layer]) -> Iterator[tuple[str, np.ndarray]]:
    for layer_name, layer in layers.items():
        for call, (rows, keys) in CALLS.items():
            query = torch.randn(2, rows, WIDTH)
            key = torch.randn(2, keys, WIDTH) if layer_name.startswith("cross") else query
            with torch.inference_mode():
                output, weights = layer(query, key)
            parts = {"query": query, "output": output, "weights": weights} | ({} if key is query else {"key": key})
            for part, value in parts.items():
                if value is not None:
                    yield f"{name}/{layer_name}/{call}/{part}", np.ascontiguousarray(value)


def main() -> None:
    directory, found = Path(sys.argv[1]), Arrays()
    torch.manual_seed(0)
    for name, make in FRAMEWORKS.items():
        arrays, layers = make()
        save_file(
            {key: np.ascontiguousarray(array) for key, array in arrays.items()}, directory / f"{name}.safetensors"
        )
        found |= dict(answers(name, layers))
    save_file(found, directory / "answers.safetensors")


if __name__ == "__main__":
    main()
