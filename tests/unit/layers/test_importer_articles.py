"""Importer: layers of torch's module and of the articles give the output of their own forward."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from service.layers.importer import import_layer
from service.layers.store import StoredLayer
from tests.unit.layers.checkpoints import (
    linear,
    mha,
    random,
    save_npz,
    save_safetensors,
)


def attend(layer: StoredLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return what the canonical tensors mean: project, split into heads, attend, join, project."""
    spec, tensors = layer.spec, layer.tensors

    def project(name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    q, k, v = project("query", query), project("key", key), project("value", value)
    if spec.has_bias_kv:
        k, v = torch.cat([k, tensors["bias_k"][None]]), torch.cat([v, tensors["bias_v"][None]])
    if spec.add_zero_attn:
        k, v = functional.pad(k, (0, 0, 0, 1)), functional.pad(v, (0, 0, 0, 1))
    q, k, v = (x.unflatten(-1, (spec.num_heads, -1)).transpose(0, 1) for x in (q, k, v))
    joined = ((q @ k.mT * spec.scale).softmax(-1) @ v).transpose(0, 1).flatten(1)
    return project("output", joined) if spec.has_output else joined


def imported(tmp_path: Path, tensors: dict[str, torch.Tensor], **options) -> StoredLayer:
    return import_layer(save_safetensors(tmp_path / "x.safetensors", tensors), name="x", **options)


@pytest.mark.parametrize("file", ["x.pt", "x.safetensors"])
@pytest.mark.parametrize("prefix", ["", "decoder.layers.1.multihead_attn."])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"add_bias_kv": True},
        {"add_zero_attn": True},
        {"add_bias_kv": True, "add_zero_attn": True, "bias": False},
        {"kdim": 5, "vdim": 6},
        {"kdim": 5},
        {"vdim": 6, "bias": False, "add_bias_kv": True},
        {"dtype": torch.float64},
    ],
    ids=str,
)
def test_every_variant_of_the_torch_module_matches_torch(tmp_path, options, prefix, file):
    """nn.MultiheadAttention with its own forward is the oracle."""
    tensors = mha(**options)
    module = torch.nn.MultiheadAttention(8, 2, **options)
    module.load_state_dict(tensors)
    below = {prefix + key: value for key, value in tensors.items()}
    path = tmp_path / file
    if file.endswith(".pt"):
        torch.save(below, path)
    else:
        save_safetensors(path, below)
    zero = options.get("add_zero_attn", False)
    layer = import_layer(path, name="x", heads=2, add_zero_attn=zero)
    dtype = options.get("dtype", torch.float32)
    query = random(5, 8, dtype=dtype)
    key, value = (
        random(7, options.get("kdim", 8), seed=1, dtype=dtype),
        random(7, options.get("vdim", 8), seed=2, dtype=dtype),
    )
    expected, _ = module(query, key, value, need_weights=False)
    torch.testing.assert_close(attend(layer, query, key, value), expected)
    assert layer.dtype == dtype
    assert layer.family == "torch-mha"


class Annotated(torch.nn.Module):
    """Article 000, without mask and dropout."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads, self.linears = heads, torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(4))

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            module(x).view(1, -1, self.heads, x.shape[-1] // self.heads).transpose(1, 2)
            for module, x in zip(self.linears, inputs, strict=False)
        )
        scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(query.shape[-1])
        x = torch.matmul(scores.softmax(dim=-1), value).transpose(1, 2).contiguous()
        answer: torch.Tensor = self.linears[-1](x.view(1, -1, inputs[0].shape[-1]))
        return answer[0]


def test_article_000_annotated(tmp_path):
    torch.manual_seed(1)
    model = Annotated(4, 8)
    query, memory = random(3, 8), random(5, 8, seed=1)
    layer = imported(tmp_path, {f"self_attn.{key}": value for key, value in model.state_dict().items()}, heads=4)
    torch.testing.assert_close(attend(layer, query, memory, memory + 1), model(query, memory, memory + 1))
    assert layer.family == "annotated"


def test_article_001_d_k_and_d_v_are_independent_of_d_model(tmp_path):
    """d_model 8, 2 heads, d_k 3, d_v 5: what the article's forward computes, written out."""
    tensors = {
        **linear("W_Q", 6, 8, seed=1), **linear("W_K", 6, 8, seed=2),
        **linear("W_V", 10, 8, seed=3), **linear("fc", 8, 10, seed=4),
    }  # fmt: skip
    layer = imported(tmp_path, tensors, heads=2)
    spec = layer.spec
    assert (spec.head_width, spec.value_head_width, spec.out_width, spec.scale) == (3, 5, 8, 1 / math.sqrt(3))
    x = random(4, 8)
    q, k, v = (
        functional.linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"]).view(1, -1, 2, width).transpose(1, 2)
        for name, width in (("W_Q", 3), ("W_K", 3), ("W_V", 5))
    )
    weights = torch.softmax(torch.matmul(q, k.transpose(-2, -1)) * 3**-0.5, dim=-1)
    context = torch.matmul(weights, v).transpose(1, 2).contiguous().view(1, -1, 10)
    expected = functional.linear(context, tensors["fc.weight"], tensors["fc.bias"])[0]
    torch.testing.assert_close(attend(layer, x, x, x), expected)
    assert layer.family == "wq-wk-wv-fc"


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_article_002_numpy_weights_are_applied_from_the_right(tmp_path, dtype):
    """`X @ W`, no biases; float64 stays float64."""
    generator = np.random.default_rng(0)
    arrays = {name: generator.normal(size=(8, 8)).astype(dtype) for name in ("W_q", "W_k", "W_v", "W_o")}
    layer = import_layer(save_npz(tmp_path / "mha.npz", **arrays), name="x", heads=2)
    x = generator.normal(size=(5, 8)).astype(dtype)
    heads = [(x @ arrays[name]).reshape(5, 2, 4).transpose(1, 0, 2) for name in ("W_q", "W_k", "W_v")]
    scores = np.einsum("hqd,hkd->hqk", heads[0], heads[1]) / np.sqrt(4)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    expected = np.einsum("hqk,hkd->hqd", weights, heads[2]).transpose(1, 0, 2).reshape(5, 8) @ arrays["W_o"]
    rows = torch.from_numpy(x)
    torch.testing.assert_close(attend(layer, rows, rows, rows), torch.from_numpy(expected.astype(dtype)))
    assert layer.tensors["query.weight"].is_contiguous()
    assert layer.source == "mha.npz (numpy)"


def test_article_002_simple_attention_is_one_head_without_output(tmp_path):
    generator = np.random.default_rng(0)
    arrays = {name: generator.normal(size=(6, 6)) for name in ("W_q", "W_k", "W_v")}
    layer = import_layer(save_npz(tmp_path / "simple.npz", **arrays), name="x")
    x = generator.normal(size=(5, 6))
    scores = (x @ arrays["W_q"]) @ (x @ arrays["W_k"]).T / np.sqrt(6)
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    rows = torch.from_numpy(x)
    torch.testing.assert_close(attend(layer, rows, rows, rows), torch.from_numpy(weights @ (x @ arrays["W_v"])))


@pytest.mark.parametrize("bias", [True, False])
def test_d2l_may_have_another_width_for_each_input(tmp_path, bias):
    tensors = {
        **linear("attention.W_q", 12, 5, bias=bias), **linear("attention.W_k", 12, 6, bias=bias),
        **linear("attention.W_v", 12, 7, bias=bias), **linear("attention.W_o", 12, 12, bias=bias),
    }  # fmt: skip
    spec = imported(tmp_path, tensors, heads=3).spec
    assert (spec.query_width, spec.key_width, spec.value_width, spec.out_width, spec.head_width) == (5, 6, 7, 12, 4)
    assert spec.biases == (("query", "key", "value", "output") if bias else ())
