"""Importer: a tiny state dict of each family gives its spec and, after splitting and transposing, its tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

from service.attention.spec import Norm, RelativeBias, Rotary, Window
from service.layers.importer import import_layer
from service.layers.store import StoredLayer
from tests.unit.layers.checkpoints import random, save_directory, save_npz, save_safetensors
from tests.unit.layers.refusals import refused_import

D, N, K, H = 8, 4, 2, 4  # width, heads, key/value heads, head width
CAUSAL = Window(None, 0)
ROLES = ("query", "key", "value", "output")


def shaped(prefix: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    return {prefix + key: random(*shape, seed=seed) for seed, (key, shape) in enumerate(shapes.items())}


def llama(prefix: str = "model.layers.3.self_attn.", /, **more: tuple[int, ...]) -> dict[str, torch.Tensor]:
    shapes = {
        "q_proj.weight": (N * H, D),
        "k_proj.weight": (K * H, D),
        "v_proj.weight": (K * H, D),
        "o_proj.weight": (D, N * H),
    }
    return shaped(prefix, shapes | {key.replace("__", "."): shape for key, shape in more.items()})


def square(prefix: str, *modules: str, unbiased: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """Return four Linears of the width D."""
    shapes = {f"{module}.weight": (D, D) for module in modules}
    return shaped(prefix, shapes | {f"{module}.bias": (D,) for module in modules if module not in unbiased})


def rotary(width: int, theta: float = 1e4, layout: Any = "half", divisor: float = 1.0) -> Rotary:
    powers = theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    return Rotary(layout, tuple((1 / powers / divisor).tolist()))


def config(model: str, **more: object) -> dict[str, object]:
    sizes = {"num_attention_heads": N, "num_key_value_heads": K, "head_dim": H, "hidden_size": D}
    return {"model_type": model, **sizes, "rope_theta": 1e4, **more}


class Case(NamedTuple):
    tensors: dict[str, torch.Tensor]
    config: dict[str, object]
    parts: dict[str, object]
    options: Mapping[str, Any] = MappingProxyType({})


NORMS = {"q_norm__weight": (H,), "k_norm__weight": (H,)}
BIASES = {"q_proj__bias": (N * H,), "k_proj__bias": (K * H,), "v_proj__bias": (K * H,)}
RMS = Norm("rms", "head", 1e-6)
WHISPER = square(
    "model.decoder.layers.1.", *(f"self_attn.{n}_proj" for n in ("q", "k", "v", "out")), unbiased=("self_attn.k_proj",)
)
SIDES = {"encoder_attention_heads": 2, "decoder_attention_heads": 4}
BART = {
    key: value
    for module in ("encoder.layers.1.self_attn.", "decoder.layers.1.self_attn.", "decoder.layers.1.encoder_attn.")
    for key, value in square(module, "q_proj", "k_proj", "v_proj", "out_proj").items()
}
CLIP = {
    key: value
    for tower in ("text_model", "vision_model")
    for key, value in square(f"{tower}.encoder.layers.0.self_attn.", "q_proj", "k_proj", "v_proj", "out_proj").items()
}
TOWERS = {"text_config": {"model_type": "clip_text_model", "num_attention_heads": 2},
          "vision_config": {"model_type": "clip_vision_model", "num_attention_heads": 4}}  # fmt: skip
T5_NAMES = {"q.weight": (N * H, D), "k.weight": (N * H, D), "v.weight": (N * H, D), "o.weight": (D, N * H)}
T5 = {
    **shaped("encoder.block.2.layer.0.SelfAttention.", T5_NAMES),
    **shaped("decoder.block.2.layer.0.SelfAttention.", T5_NAMES),
    **shaped("decoder.block.2.layer.1.EncDecAttention.", T5_NAMES),
    **shaped("encoder.block.0.layer.0.SelfAttention.", {"relative_attention_bias.weight": (32, N)}),
    **shaped("decoder.block.0.layer.0.SelfAttention.", {"relative_attention_bias.weight": (32, N)}),
}
T5_CONFIG = {"model_type": "t5", "num_heads": N, "d_kv": H, "d_model": D}
ESM = square("esm.encoder.layer.0.attention.", "self.query", "self.key", "self.value", "output.dense") | shaped(
    "esm.encoder.layer.0.attention.", {"self.rotary_embeddings.inv_freq": (1,), "LayerNorm.weight": (D,)}
)
NEOX = shaped(
    "gpt_neox.layers.1.attention.",
    {"query_key_value.weight": (24, 8), "query_key_value.bias": (24,), "dense.weight": (8, 8), "dense.bias": (8,)}
    | {"bias": (1, 1, 4, 4), "rotary_emb.inv_freq": (1,)},
)
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3}
GEMMA3 = {"query_pre_attn_scalar": 9, "sliding_window": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4}
LINEAR = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
OSS = llama(sinks=(N,), **BIASES, o_proj__bias=(D,))
COHERE_NORMS = {"q_norm__weight": (N, H), "k_norm__weight": (K, H)}

CASES = {
    "llama": Case(llama(), config("llama"), {"rotary": rotary(H), "window": CAUSAL, "num_kv_heads": K}),
    "llama in another model": Case(
        llama("language_model.model.layers.3.self_attn."),
        {"model_type": "llava", "text_config": config("llama"), "vision_config": {"model_type": "clip_vision_model"}},
        {"rotary": rotary(H), "num_kv_heads": K},
    ),
    "llama without a model_type": Case(
        llama(), {"rope_theta": 5e5}, {"rotary": rotary(H, 5e5), "num_kv_heads": K}, {"family": "llama", "heads": N}
    ),
    "llama, not causal": Case(llama(), config("llama", is_causal=False), {"window": None}),
    "llama of linear scaling": Case(llama(), config("llama", **LINEAR), {"rotary": rotary(H, divisor=8.0)}),
    "mistral": Case(llama(), config("mistral", sliding_window=5), {"window": Window(4, 0)}),
    "mistral of its class": Case(llama(), config("mistral"), {"window": Window(4095, 0)}),
    "mistral without a window": Case(llama(), config("mistral", sliding_window=None), {"window": CAUSAL}),
    "qwen2": Case(llama(**BIASES), config("qwen2"), {"biases": ROLES[:3], "window": CAUSAL}),
    "qwen2 with a window": Case(llama(**BIASES), config("qwen2", **QWEN_WINDOW), {"window": Window(4, 0)}),
    "qwen2 before its window": Case(
        llama(**BIASES), config("qwen2", **QWEN_WINDOW | {"max_window_layers": 4}), {"window": CAUSAL}
    ),
    "qwen3": Case(llama(**NORMS), config("qwen3"), {"norm": RMS, "rotary": rotary(H)}),
    "gemma2": Case(
        llama(), config("gemma2", query_pre_attn_scalar=9, sliding_window=6),
        {"scale": 1 / 3, "softcap": 50.0, "window": CAUSAL},
    ),
    "gemma2 by layer_types": Case(
        llama(), config("gemma2", sliding_window=6, layer_types=["full_attention"] * 3 + ["sliding_attention"]),
        {"scale": 1 / 16, "window": Window(5, 0)},
    ),
    "gemma3, sliding": Case(
        llama(**NORMS), config("gemma3_text", **GEMMA3, **LINEAR),
        {"norm": Norm("rms", "head", 1e-6, plus_one=True), "rotary": rotary(H, 1e4), "window": Window(5, 0), "scale": 1 / 3},
    ),
    "gemma3, full": Case(
        llama("language_model.model.layers.5.self_attn.", **NORMS),
        {"model_type": "gemma3", "text_config": config("gemma3_text", **GEMMA3, **LINEAR)},
        {"rotary": rotary(H, 1e6, divisor=8.0), "window": CAUSAL},
    ),
    "gemma3, bidirectional": Case(
        llama(**NORMS), config("gemma3_text", **GEMMA3, use_bidirectional_attention=True), {"window": Window(3, 3)}
    ),
    "olmo2": Case(
        llama(q_norm__weight=(N * H,), k_norm__weight=(K * H,)), config("olmo2"), {"norm": Norm("rms", "width", 1e-5)}
    ),
    "cohere": Case(
        llama(**COHERE_NORMS), config("cohere", use_qk_norm=True),
        {"norm": Norm("layer", "head", 1e-5, has_head_weights=True), "rotary": rotary(H, layout="interleaved")},
    ),
    "cohere2, full": Case(llama(), config("cohere2"), {"rotary": None, "window": CAUSAL}),
    "cohere2, sliding": Case(
        llama("model.layers.2.self_attn."), config("cohere2", sliding_window=3),
        {"rotary": rotary(H, layout="interleaved"), "window": Window(2, 0)},
    ),
    "gpt-oss": Case(OSS, config("gpt_oss"), {"has_sinks": True, "window": CAUSAL, "biases": ROLES}),
    "nomic-bert": Case(
        shaped("encoder.layers.0.attn.", {"Wqkv.weight": (24, 8), "out_proj.weight": (8, 8)}),
        {"model_type": "nomic_bert", "n_head": 2}, {"rotary": rotary(4, 1000.0), "window": None},
    ),
    "nomic-bert, wide heads": Case(
        shaped("encoder.layers.0.attn.", {"Wqkv.weight": (36, 8), "out_proj.weight": (8, 12)}),
        {"model_type": "nomic_bert", "num_attention_heads": 2, "head_dim": 6}, {"rotary": rotary(6, 1000.0)},
    ),
    "nomic-bert by new names": Case(
        square("layers.0.self_attn.", "q_proj", "k_proj", "v_proj", "o_proj",
               unbiased=("q_proj", "k_proj", "v_proj", "o_proj")),
        {"model_type": "nomic_bert", "num_attention_heads": 2, "rope_parameters": {"rope_theta": 500}},
        {"rotary": rotary(4, 500.0)},
    ),
    "esm": Case(
        ESM, {"model_type": "esm", "num_attention_heads": 2, "position_embedding_type": "rotary"}, {"rotary": rotary(4)}
    ),
    "esm of absolute positions": Case(ESM, {"model_type": "esm", "num_attention_heads": 2}, {"rotary": None}),
    "mpnet": Case(
        square("mpnet.encoder.layer.1.attention.attn.", *"qkvo")
        | shaped("mpnet.encoder.", {"relative_attention_bias.weight": (32, 2)}),
        {"model_type": "mpnet", "num_attention_heads": 2, "relative_attention_num_buckets": 32},
        {"relative_bias": RelativeBias(32, 128, is_bidirectional=True)},
    ),
    "t5, encoder": Case(
        T5, T5_CONFIG, {"scale": 1.0, "relative_bias": RelativeBias(32, 128, is_bidirectional=True), "window": None},
        {"prefix": "encoder"},
    ),
    "t5, decoder": Case(
        T5, T5_CONFIG, {"relative_bias": RelativeBias(32, 128, is_bidirectional=False), "window": CAUSAL},
        {"prefix": "decoder.block.2.layer.0"},
    ),
    "t5, cross": Case(T5, T5_CONFIG, {"relative_bias": None, "window": None}, {"prefix": "decoder.block.2.layer.1"}),
    "bart, encoder": Case(BART, {"model_type": "bart", **SIDES}, {"num_heads": 2, "window": None}, {"prefix": "encoder"}),
    "bart, decoder": Case(
        BART, {"model_type": "mbart", **SIDES}, {"num_heads": 4, "window": CAUSAL}, {"prefix": "decoder.layers.1.self_attn"}
    ),
    "bart, cross": Case(BART, {"model_type": "bart", **SIDES}, {"window": None}, {"prefix": "decoder.layers.1.encoder_attn"}),
    "whisper": Case(WHISPER, {"model_type": "whisper", **SIDES}, {"biases": ("query", "value", "output"), "window": CAUSAL}),
    "whisper by OpenAI's names": Case(
        square("decoder.blocks.0.cross_attn.", "query", "key", "value", "out", unbiased=("key",)), {}, {"window": None},
        {"heads": 2},
    ),
    "clip, text": Case(CLIP, {"model_type": "clip", **TOWERS}, {"num_heads": 2, "window": CAUSAL}, {"prefix": "text_model"}),
    "clip, vision": Case(CLIP, {"model_type": "clip", **TOWERS}, {"num_heads": 4, "window": None}, {"prefix": "vision_model"}),
    "clip by OpenAI's names": Case(
        shaped("transformer.resblocks.0.attn.", {"in_proj_weight": (24, 8), "in_proj_bias": (24,), "out_proj.weight": (8, 8),
                                                 "out_proj.bias": (8,)}), {}, {"window": CAUSAL}, {"heads": 2},
    ),
    "vit by new names": Case(
        square("vit.layers.0.attention.", "q_proj", "k_proj", "v_proj", "o_proj"),
        {"model_type": "vit", "num_attention_heads": 2}, {"biases": ROLES},
    ),
    "bert, decoder": Case(
        square("encoder.layer.0.attention.", "self.query", "self.key", "self.value", "output.dense"),
        {"model_type": "bert", "num_attention_heads": 2, "is_decoder": True}, {"window": CAUSAL},
    ),
}  # fmt: skip


def imported(tmp_path, case: Case) -> StoredLayer:
    return import_layer(save_directory(tmp_path / "d", case.tensors, case.config or None), name="x", **case.options)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_layer_has_the_parts_of_its_family(tmp_path, case):
    layer = imported(tmp_path, case)
    for name, part in case.parts.items():
        assert getattr(layer.spec, name) == part or math.isclose(getattr(layer.spec, name), part)


def test_the_tensors_of_llama_keep_their_roles(tmp_path):
    layer = imported(tmp_path, CASES["llama"])
    for name, letter in zip(ROLES, "qkvo", strict=True):
        assert torch.equal(
            layer.tensors[f"{name}.weight"], CASES["llama"].tensors[f"model.layers.3.self_attn.{letter}_proj.weight"]
        )


def test_phi3_has_the_rows_of_all_queries_then_keys_then_values(tmp_path):
    tensors = shaped(
        "model.layers.0.self_attn.", {"qkv_proj.weight": ((N + 2 * K) * H, D), "o_proj.weight": (D, N * H)}
    )
    made = config("phi3", partial_rotary_factor=0.5, sliding_window=7)
    layer = imported(tmp_path, Case(tensors, made, {}))
    rows = tensors["model.layers.0.self_attn.qkv_proj.weight"].split([N * H, K * H, K * H])
    assert all(torch.equal(layer.tensors[f"{name}.weight"], part) for name, part in zip(ROLES, rows, strict=False))
    assert (layer.spec.num_kv_heads, layer.spec.rotary, layer.spec.window) == (K, rotary(2), Window(6, 0))


def test_gpt_neox_has_the_rows_of_query_key_and_value_of_each_head(tmp_path):
    layer = imported(tmp_path, Case(NEOX, {"model_type": "gpt_neox", "num_attention_heads": 2, "rotary_pct": 0.5}, {}))
    rows = NEOX["gpt_neox.layers.1.attention.query_key_value.weight"].view(2, 3, 4, 8)
    for index, name in enumerate(ROLES[:3]):
        assert torch.equal(layer.tensors[f"{name}.weight"], rows[:, index].reshape(8, 8))
    assert (layer.spec.rotary, layer.spec.window) == (rotary(2), CAUSAL)


def test_modernbert_has_a_theta_and_a_window_by_the_kind_of_its_layer(tmp_path):
    made: dict[str, object] = {"model_type": "modernbert", "num_attention_heads": 2, "local_attention": 6}
    for number, theta, window in ((0, 160000.0, None), (1, 1e4, Window(3, 3)), (3, 160000.0, None)):
        tensors = shaped(f"model.layers.{number}.attn.", {"Wqkv.weight": (24, 8), "Wo.weight": (8, 8)})
        layer = imported(tmp_path, Case(tensors, made, {}))
        assert (layer.spec.rotary, layer.spec.window) == (rotary(4, theta), window)
        thirds = tensors[f"model.layers.{number}.attn.Wqkv.weight"].chunk(3)
        assert all(
            torch.equal(layer.tensors[f"{name}.weight"], part) for name, part in zip(ROLES, thirds, strict=False)
        )


@pytest.mark.parametrize("has_norms", [True, False])
def test_timm_has_layer_norms_of_query_and_key_or_none(tmp_path, has_norms):
    shapes: dict[str, tuple[int, ...]] = {"qkv.weight": (24, 8), "proj.weight": (8, 8), "proj.bias": (8,)}
    norms: dict[str, tuple[int, ...]] = {f"{name}_norm.{kind}": (4,) for name in "qk" for kind in ("weight", "bias")}
    tensors = shaped("blocks.0.attn.", shapes | (norms if has_norms else {}))
    layer = imported(tmp_path, Case(tensors, {}, {}, {"heads": 2}))
    assert (layer.family, layer.spec.norm) == (
        "timm",
        Norm("layer", "head", 1e-6, has_bias=True) if has_norms else None,
    )
    del tensors["blocks.0.attn.q_norm.bias" if has_norms else "blocks.0.attn.proj.bias"]
    assert "keys of the timm layer are missing" in refused_import(
        save_safetensors(tmp_path / "x.safetensors", tensors), heads=2
    )


@pytest.mark.parametrize(
    ("family", "output", "kv_heads"),
    [("keras", "attention_output", 2), ("keras", "attention_output", 1), ("flax", "out", 2)],
)
def test_kernels_with_a_dimension_of_heads_become_linear(tmp_path, family, output, kv_heads):
    """The output of x by the kernel equals that by the stored weight; heads come from the shapes."""
    shapes = {f"{name}.kernel": (6, 2 if name == "query" else kv_heads, 3) for name in ROLES[:3]} | {
        f"{output}.kernel": (2, 3, 6)
    }
    biases = {f"{name}.bias": (2 if name == "query" else kv_heads, 3) for name in ROLES[:3]} | {f"{output}.bias": (6,)}
    norms: dict[str, tuple[int, ...]] = {"query_ln.scale": (3,), "key_ln.scale": (3,)} if family == "flax" else {}
    tensors = shaped("attention.", shapes | biases | norms)
    paths = {key.replace(".", "/"): value.numpy() for key, value in tensors.items()}
    layer = import_layer(save_npz(tmp_path / "x.npz", **paths), name="x")
    x = random(5, 6)
    for name in ROLES[:3]:
        expected = (
            torch.einsum("ld,dnh->lnh", x, tensors[f"attention.{name}.kernel"]) + tensors[f"attention.{name}.bias"]
        )
        made = x @ layer.tensors[f"{name}.weight"].T + layer.tensors[f"{name}.bias"]
        torch.testing.assert_close(made, expected.flatten(1))
    heads = random(5, 2, 3)
    expected = torch.einsum("lnh,nhd->ld", heads, tensors[f"attention.{output}.kernel"])
    torch.testing.assert_close(heads.flatten(1) @ layer.tensors["output.weight"].T, expected)
    assert (layer.family, layer.spec.num_heads, layer.spec.num_kv_heads) == (family, 2, kv_heads)
    assert (layer.spec.norm is not None) == (family == "flax")


def test_the_cross_attention_of_gpt2_has_a_fused_key_and_value(tmp_path):
    shapes = {"q_attn.weight": (8, 8), "q_attn.bias": (8,), "c_attn.weight": (8, 16), "c_attn.bias": (16,)}
    tensors = shaped("h.0.crossattention.", {**shapes, "c_proj.weight": (8, 8), "c_proj.bias": (8,)})
    layer = imported(tmp_path, Case(tensors, {"model_type": "gpt2", "n_head": 2}, {}))
    assert torch.equal(layer.tensors["value.weight"], tensors["h.0.crossattention.c_attn.weight"][:, 8:].T)
    assert layer.spec.window is None


@pytest.mark.parametrize("shard", [1, 2])
def test_t5_reads_the_table_of_block_0_also_from_another_shard(tmp_path, shard):
    save_directory(tmp_path / "d", {})
    (tmp_path / "d" / "model.safetensors").unlink()
    tables = {key: value for key, value in T5.items() if "relative" in key}
    for number, tensors in ((shard, tables), (3 - shard, {key: T5[key] for key in T5.keys() - tables.keys()})):
        save_safetensors(tmp_path / "d" / f"model-0000{number}-of-00002.safetensors", tensors)
    (tmp_path / "d" / "config.json").write_text('{"model_type": "t5", "num_heads": 4, "d_kv": 4, "d_model": 8}')
    layer = import_layer(tmp_path / "d", name="x", prefix="encoder")
    assert torch.equal(
        layer.tensors["relative_bias"], tables["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
    )
