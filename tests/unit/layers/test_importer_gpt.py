"""Importer: layers of GPT-2 and nanoGPT give the output of their own attention, which is written out here."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from service.attention.call import Call
from service.attention.layer import Layer
from service.attention.masks import CombinedMask, Sizes, causal
from service.attention.spec import Window
from service.layers.importer import import_layer
from service.layers.store import StoredLayer
from tests.unit.layers.checkpoints import random, save_directory, save_safetensors
from tests.unit.layers.refusals import refused_import

# Widths with numbers of heads.
SIZES = [(12, 3), (64, 4)]


class Conv1D(torch.nn.Module):
    """As in transformers: the weight is [in, out]."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(random(width, rows, seed=1) / width**0.5)
        self.bias = torch.nn.Parameter(random(rows, seed=2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x, self.weight)


class CausalAttention(torch.nn.Module):
    """The forward that GPT2Attention and nanoGPT's CausalSelfAttention share, with the buffers of both."""

    def __init__(self, width: int, heads: int, *, has_conv: bool, bias: bool = True, scale: float = 1.0) -> None:
        super().__init__()
        self.heads, self.scale = heads, scale
        self.c_attn: torch.nn.Module
        self.c_proj: torch.nn.Module
        self.bias: torch.Tensor
        if has_conv:
            self.c_attn, self.c_proj = Conv1D(3 * width, width), Conv1D(width, width)
            self.register_buffer("masked_bias", torch.tensor(-1e4))
        else:
            self.c_attn = torch.nn.Linear(width, 3 * width, bias=bias)
            self.c_proj = torch.nn.Linear(width, width, bias=bias)
        self.register_buffer("bias", torch.ones(32, 32, dtype=torch.bool).tril()[None, None])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length, width = x.shape
        q, k, v = (part.view(length, self.heads, -1).transpose(0, 1) for part in self.c_attn(x).split(width, dim=1))
        scores = (q @ k.mT) * (width // self.heads) ** -0.5 * self.scale
        scores = scores.masked_fill(~self.bias[0, :, :length, :length], float("-inf"))
        joined: torch.Tensor = (scores.softmax(-1) @ v).transpose(0, 1).reshape(length, width)
        answer: torch.Tensor = self.c_proj(joined)
        return answer


def named(module: torch.nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    return {prefix + key: value for key, value in module.state_dict().items()}


def served(layer: StoredLayer, x: torch.Tensor) -> torch.Tensor:
    """Return what the service computes with a causal mask."""
    sizes = Sizes(1, layer.spec.num_heads, len(x), len(x))
    assert layer.spec.window == Window(None, 0)
    call = Call(x[None], mask=CombinedMask(sizes, (causal(sizes, 0),)))
    with torch.inference_mode():
        made = Layer(layer.spec, layer.tensors, dtype=torch.float32, device=torch.device("cpu"))
        return made.forward([call])[0].output[0]


@pytest.mark.parametrize("prefix", ["", "h.1.attn.", "transformer.h.1.attn."])
@pytest.mark.parametrize(("width", "heads"), SIZES)
def test_gpt2_gives_the_output_of_its_own_attention(tmp_path, width, heads, prefix):
    """Conv1D weights are transposed; the buffers of the causal mask are ignored; heads come from n_head."""
    module = CausalAttention(width, heads, has_conv=True)
    tensors = {**named(module, prefix), **({} if not prefix else {"ln_f.weight": random(width)})}
    layer = import_layer(save_directory(tmp_path / "d", tensors, {"n_head": heads}), name="x")
    assert (layer.family, layer.spec.num_heads, layer.spec.head_width) == ("gpt2", heads, width // heads)
    x = random(9, width)
    torch.testing.assert_close(served(layer, x), module(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("width", "heads"), SIZES)
def test_a_checkpoint_of_nanogpt_gives_the_output_of_its_own_attention(tmp_path, width, heads, bias):
    """The file that train.py writes: compiled names, `model_args`, and a tensor beside the state dict."""
    modules = [CausalAttention(width, heads, has_conv=False, bias=bias) for _ in range(2)]
    tensors = {
        key: value for i, module in enumerate(modules)
        for key, value in named(module, f"_orig_mod.transformer.h.{i}.attn.").items()
    }  # fmt: skip
    path = tmp_path / "ckpt.pt"
    model_args = {"n_layer": 2, "n_head": heads, "n_embd": width, "bias": bias}
    torch.save({"model": tensors, "model_args": model_args, "best_val_loss": torch.tensor(3.1), "iter_num": 7}, path)
    renamed = shutil.copy(path, tmp_path / "pytorch_model.bin")  # a config.json would win; there is none
    for source in (renamed, tmp_path):
        assert import_layer(source, name="x", layer=0).spec.num_heads == heads
    for number, module in enumerate(modules):
        layer = import_layer(path, name="x", layer=number)
        assert layer.source == f"ckpt.pt transformer.h.{number}.attn (nanogpt)"
        assert bool(layer.spec.biases) is bias
        x = random(9, width)
        torch.testing.assert_close(served(layer, x), module(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("width", "heads"), SIZES)
def test_a_file_without_a_config_needs_the_number_of_heads(tmp_path, width, heads):
    """From the caller or from a config.json beside the file, whatever its name: it may also name another attention."""
    tensors = named(CausalAttention(width, heads, has_conv=True), "h.0.attn.")
    path = save_safetensors(tmp_path / "gpt.safetensors", tensors)
    assert refused_import(path).endswith("does not record its number of heads; give it with --heads H")
    assert import_layer(path, name="x", heads=heads).spec.num_heads == heads
    (tmp_path / "config.json").write_text(json.dumps({"n_head": heads}))
    assert import_layer(path, name="x").spec.num_heads == heads
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert import_layer(tmp_path / "pytorch_model.bin", name="x").spec.num_heads == heads


@pytest.mark.parametrize(("width", "heads"), SIZES)
def test_the_scale_of_gpt2s_config_is_kept(tmp_path, width, heads):
    module = CausalAttention(width, heads, has_conv=True, scale=1 / 4)
    config = {"n_head": heads, "scale_attn_by_inverse_layer_idx": True}
    layer = import_layer(save_directory(tmp_path / "d", named(module, "h.3.attn."), config), name="x")
    x = random(9, width)
    torch.testing.assert_close(served(layer, x), module(x), atol=1e-5, rtol=1e-5)
    (tmp_path / "d" / "config.json").write_text(json.dumps({"n_head": heads, "scale_attn_weights": False}))
    assert import_layer(tmp_path / "d", name="x").spec.scale == 1.0
    bare = save_directory(tmp_path / "bare", named(module, ""), config)
    assert "needs the layer's number, which its keys lack; give --scale" in refused_import(bare)
    assert import_layer(bare, name="x", scale=0.5).spec.scale == 0.5


@pytest.mark.parametrize(
    ("width", "heads", "rows", "why"),
    [
        (12, 3, 20, "'h.0.attn.c_attn.weight' has the shape [20, 12]; 20 rows do not divide into 3 projections"),
        (12, 3, 12, "query.weight (from 'h.0.attn.c_attn.weight') has the shape [4, 12], expected [12, 12]"),
        (64, 4, 96, "query.weight (from 'h.0.attn.c_attn.weight') has the shape [32, 64], expected [64, 64]"),
    ],
)
def test_a_fused_weight_of_another_shape_is_refused(tmp_path, width, heads, rows, why):
    """GPT-BigCode's heads share one key and value; cross-attention fuses key and value only, and is another candidate."""
    tensors = named(CausalAttention(width, heads, has_conv=False), "h.0.attn.")
    tensors |= {"h.0.crossattention.c_attn.weight": random(width, 2 * width)}
    path = save_safetensors(tmp_path / "x.safetensors", tensors)
    assert import_layer(path, name="x", prefix="h.0.attn", heads=heads).family == "nanogpt"
    fused = {"h.0.attn.c_attn.weight": random(rows, width), "h.0.attn.c_attn.bias": random(rows)}
    save_safetensors(path, tensors | fused)
    assert why in refused_import(path, prefix="h.0.attn", heads=heads if rows != width else 1)


@pytest.mark.parametrize("has_conv", [True, False])
@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "gpt_bigcode"}, "model_type gpt_bigcode: its fused projection is ordered by heads"),
        ({"model_type": "qwen"}, "model_type qwen: its rotary positions are of no family"),
        (
            {"rotary_emb_base": 10000, "rope_scaling": None},
            "config.json has 'rotary_emb_base': its rotary positions are",
        ),
        ({"rope_theta": 1e6}, "config.json has 'rope_theta': its rotary positions are of no"),
    ],
)
def test_models_that_only_share_the_names_are_refused(tmp_path, config, why, has_conv):
    tensors = named(CausalAttention(12, 3, has_conv=has_conv), "transformer.h.0.attn.")
    path = save_directory(tmp_path / "d", tensors, {"n_head": 3, **config})
    assert why in refused_import(path)
    (path / "config.json").write_text(json.dumps({"n_head": 3, "rotary_emb_fraction": 0.0}))
    assert import_layer(path, name="x")


def test_rotary_keys_and_unknown_keys_of_the_module_are_refused(tmp_path):
    tensors = named(CausalAttention(12, 3, has_conv=False), "h.0.attn.")
    path = save_safetensors(tmp_path / "x.safetensors", tensors | {"h.0.attn.rotary_emb.inv_freq": random(2)})
    assert "'h.0.attn.rotary_emb.inv_freq': its rotary positions are of no family" in refused_import(path, heads=3)
    save_safetensors(path, tensors | {"h.0.attn.q_norm.weight": random(4)})
    assert refused_import(path, heads=3).endswith(": 'h.0.attn.q_norm.weight'")
    save_safetensors(path, tensors | {"h.0.attn.bias_k": random(12)})
    assert refused_import(path, heads=3).endswith(": 'h.0.attn.bias_k'")
