"""Unsupported models: a config or names of tensors show them, wherever they stand; what only looks like them is imported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from service.errors import LayerError
from service.layers.importer import import_layer
from service.layers.unsupported import (
    ALIBI,
    BY_HEAD,
    CHUNKED,
    GATED,
    LATENT,
    OTHER_NAMES,
    RELATIVE,
    ROTARY,
    TRANSFORMED,
    UNSCALED,
    UNTOLD,
    check_config,
)
from tests.unit.layers.checkpoints import bert, random, save_directory, save_safetensors
from tests.unit.layers.refusals import refused_import

ROLES = ("query", "key", "value", "output")


def own(prefix: str = "enc.3.attn.", names: str = "q k v o") -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors of a layer and its key map."""
    key_map = {role: f"{prefix}{name}.weight" for role, name in zip(ROLES, names.split(), strict=True)}
    return {key: random(8, 8, seed=i) for i, key in enumerate(key_map.values())}, key_map


def why_not(config: dict[str, object]) -> str:
    with pytest.raises(LayerError) as caught:
        check_config(config)
    assert len(caught.value.message) < 500
    return caught.value.message


OPTIONS: dict[str, tuple[str, list[dict[str, object]]]] = {
    "rotary": (
        ROTARY,
        [
            {"global_rope_theta": 160000.0, "local_rope_theta": 1e4},
            {"local_rope_theta": 1e4},
            {"partial_rotary_factor": 0.5},
            {"text_config": {"model_type": "llama", "rope_theta": 10000.0}},
            {"text_config": {"rope_theta": 10000.0}},
            {"model": {"decoder": [{"attention": {"use_rotary": True}}]}},
            {"rope_parameters": {"rope_type": "default"}},
            {"mrope_section": [16, 24]},
            {"useRoPE": True},
            {"rotary": float("nan")},
            {"position_embedding_type": "rope"},
            {"positional_encoding": "rotary"}, {"pe": "RoPE"}, {"attention_type": "rotary"}, {"embedding": "rope"},
            {"model_type": "qwen2_5_vl"}, {"model_type": "chatglm"}, {"model_type": "new"},
            {"model_type": "jais2"}, {"architecture": "vit_small_patch16_rope_224"},
        ],
    ),
    "relative": (
        "relative positions, which a served layer does not support",
        [
            {"relative_attention": True},
            {"position_buckets": 256},
            {"relative_attention_num_buckets": 32},
            {"encoder": {"use_relative_position_bias": True}},
            {"position_embedding_type": "relative_key_query"},
            {"position_embedding_type": ["odd"]},
            {"model_type": "deberta-v2"}, {"model_type": "xlnet"},
        ],
    ),
    "alibi": (
        ALIBI,
        [{"alibi": True}, {"attn_config": {"alibi": True}}, {"model_type": "falcon", "alibi": True}, {"model_type": "mpt"},
         {"position_embedding_type": "alibi"}],
    ),
    "by head": (BY_HEAD, [{"model_type": "bloom"}, {"model_type": "gpt_bigcode"}]),
    "transformed": (
        TRANSFORMED,
        [{"attn_config": {"clip_qkv": 8}}, {"use_qk_norm": True}, {"model_type": "roformer"},
         {"attn_logit_softcapping": 50.0}, {"use_softermax": True}],
    ),
    "unscaled": (UNSCALED, [{"model_type": "gpt_neo"}]),
    "under other names": (
        OTHER_NAMES,
        [{"model_type": name} for name in ("t5", "mt5", "mpnet", "gpt-neox", "modernbert", "phi3", "gte", "llama")],
    ),
    "latent": (LATENT, [{"model_type": "deepseek_v3"}, {"kv_lora_rank": 512}]),
    "gated": (GATED, [{"model_type": "qwen3_next"}, {"text_config": {"model_type": "qwen3_5_text"}}]),
    "chunked": (
        CHUNKED,
        [{"model_type": "llama4_text"}, {"attention_chunk_size": 8192}, {"architecture": "hiera_tiny_224"},
         {"backbone_config": {"model_type": "sam2_hiera_det_model"}}],
    ),
    "untold": (
        UNTOLD,
        [{"model_type": "git"}, {"model_type": "tipsv2_text_model"}, {"text_config": {"model_type": "blip_text_model"}}],
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("why", "config"), [(why, config) for why, configs in OPTIONS.values() for config in configs], ids=str
)
def test_a_config_that_names_another_arithmetic_is_refused_with_the_reason(tmp_path, why, config):
    """Under a map, from a file of any name beside the config, and from a directory or a file of a known family."""
    assert why in why_not(config)
    tensors, key_map = own()
    path = save_safetensors(tmp_path / "own.safetensors", tensors)
    (tmp_path / "config.json").write_text(json.dumps({"num_heads": 2, **config}))
    assert why in refused_import(path, key_map=key_map)
    directory = save_directory(tmp_path / "d", bert(1), {"num_attention_heads": 2, **config})
    assert why in refused_import(directory)
    (directory / "model.safetensors").rename(directory / "model_final.safetensors")
    assert why in refused_import(directory / "model_final.safetensors", heads=2)


def test_the_message_names_the_key_with_its_place():
    assert why_not({"text_config": {"rope_theta": 1e4}}) == f"config.json has 'text_config.rope_theta': {ROTARY}"
    assert why_not({"a": {"b": {"model_type": "llama"}}}) == f"'a.b.model_type' llama: {OTHER_NAMES}"
    assert why_not({"model_type": "longt5"}).startswith("model_type longt5: its scores are not scaled")
    odd = why_not({"\x1b[31m": {"rope\n": 1, "model_type": "llama\n"}})
    assert odd.isprintable()


def test_a_deep_config_is_searched_to_its_end():
    deep: dict[str, object] = {"rope_theta": 1e4}
    for _ in range(5000):
        deep = {"rotary_of": [], "a": deep}
    assert ROTARY in why_not(deep)


@pytest.mark.parametrize(
    "config",
    [
        {"rope_scaling": None, "rotary": False, "rope_theta": 0, "rotary_pct": 0.0, "rope_parameters": {}},
        {"position_embedding_type": "absolute"},
        {"position_embedding_type": None, "positional_encoding": "sinusoidal"},
        {"alibi": False, "attn_config": {"alibi": False}},
        {"relative_attention": False, "max_relative_positions": -1, "position_buckets": -1},
        {"qk_layernorm": False, "clip_qkv": None, "final_logit_softcapping": 30.0, "use_softermax": False},
        {"use_rotary": "none", "rotary": "0", "rope": [], "alibi": -1.0},
        {"_name_or_path": "my/rope-alibi-relative", "position_embedding_type": "sinusoidal"},
        {"property": 1, "properties": {"a": 1}, "europe": True, "drop_edge": 0.1, "dropedge": 0.1},
        {"label2id": {"rope": 3, "rotary": 1}},
        {"model_type": "bert"}, {"model_type": "clip", "text_config": {"model_type": "clip_text_model"}},
        {"model_type": "renewal"}, {"architectures": [3]}, {"model_type": 3},
        {"model_type": "big_bird", "attention_type": "original_full"},
    ],
    ids=str,
)  # fmt: skip
def test_an_option_that_is_off_and_a_word_that_only_looks_alike_do_not_count(tmp_path, config):
    assert import_layer(save_directory(tmp_path / "d", bert(1), {"num_attention_heads": 2, **config}), name="x")
    tensors, key_map = own()
    path = save_safetensors(tmp_path / "own.safetensors", tensors)
    (tmp_path / "config.json").write_text(json.dumps({"num_heads": 2, **config}))
    assert import_layer(path, name="x", key_map=key_map).spec.num_heads == 2


NAMES = {
    "llama": ("model.layers.3.self_attn.", "q_proj k_proj v_proj o_proj", ROTARY),
    "llava": ("language_model.model.layers.0.self_attn.", "q_proj k_proj v_proj o_proj", ROTARY),
    "eurobert": ("layers.0.self_attn.", "q_proj k_proj v_proj o_proj", ROTARY),
    "phi": ("model.layers.0.self_attn.", "q_proj k_proj v_proj dense", ROTARY),
    "gptj": ("transformer.h.0.attn.", "q_proj k_proj v_proj out_proj", ROTARY),
    "meta": ("layers.0.attention.", "wq wk wv wo", ROTARY),
    "gguf": ("blk.0.", "attn_q attn_k attn_v attn_output", ROTARY),
    "esm": ("esm.encoder.layer.0.attention.", "self.query self.key self.value output.dense", "changes queries or keys"),
    "canine": (
        "canine.initial_char_encoder.layer.0.attention.",
        "self.query self.key self.value output.dense",
        CHUNKED,
    ),
    "t5": ("encoder.block.3.layer.0.SelfAttention.", "q k v o", "its scores are not scaled"),
    "mpnet": ("encoder.layer.2.attention.attn.", "q k v o", RELATIVE),
    "deberta": (
        "encoder.layer.0.attention.",
        "self.query_proj self.key_proj self.value_proj output.dense",
        "adds scores of relative positions",
    ),
    "gpt-neo": ("transformer.h.0.attn.attention.", "q_proj k_proj v_proj out_proj", UNSCALED),
}
FUSED = {
    "modernbert": ("model.layers.0.attn.", "Wqkv Wo", ROTARY),
    "modernbert cut": ("", "Wqkv Wo", ROTARY),
    "xlm-roberta-flash": ("roberta.encoder.layers.0.mixer.", "Wqkv out_proj", ROTARY),
    "dbrx": ("transformer.blocks.0.norm_attn_norm.attn.", "Wqkv out_proj", ROTARY),
    "baichuan": ("model.layers.0.self_attn.", "W_pack o_proj", ROTARY),
    "baichuan cut": ("", "W_pack o_proj", ROTARY),
    "neox": ("gpt_neox.layers.0.attention.", "query_key_value dense", ROTARY),
    "chatglm": ("transformer.encoder.layers.0.self_attention.", "query_key_value dense", ROTARY),
    "internlm": ("model.layers.0.attention.", "wqkv wo", ROTARY),
    "mpt": ("transformer.blocks.0.attn.", "Wqkv out_proj", ALIBI),
    "bloom": ("transformer.h.0.self_attention.", "query_key_value dense", BY_HEAD),
}


@pytest.mark.parametrize("config", [None, {"num_attention_heads": 2}], ids=str)
@pytest.mark.parametrize(("prefix", "names", "why"), [*NAMES.values(), *FUSED.values()], ids=[*NAMES, *FUSED])
def test_names_that_only_such_models_have_are_refused_under_a_map(tmp_path, prefix, names, why, config):
    """With a config that does not say so, and without one."""
    roles = ROLES if len(names.split()) == 4 else ("qkv", "output")
    key_map = {role: f"{prefix}{name}.weight" for role, name in zip(roles, names.split(), strict=True)}
    tensors = {key: random(24 if role == "qkv" else 8, 8) for role, key in key_map.items()}
    path = save_directory(tmp_path / "d", tensors, config)
    message = refused_import(path, heads=2, key_map=key_map)
    assert "is a name of an unsupported model: " in message
    assert why in message


@pytest.mark.parametrize("tensors", [{"roformer.": 0}, {"nezha.": 0}, {"esm.": 0}], ids=str)
def test_such_names_are_refused_in_a_known_family_too(tmp_path, tensors):
    """RoFormer has BERT's names below its own."""
    (prefix,) = tensors
    path = save_safetensors(tmp_path / "x.safetensors", bert(1, prefix=prefix))
    assert f"'{prefix}encoder.layer.0.attention" in refused_import(path, heads=2)


@pytest.mark.parametrize(
    ("prefix", "names"),
    [
        ("", "q_proj k_proj v_proj o_proj"),
        ("attn.", "q_proj k_proj v_proj o_proj"),
        ("attn.", "Wq Wk Wv Wo"),
        ("text_model.encoder.layers.0.self_attn.", "q_proj k_proj v_proj out_proj"),
        ("model.decoder.layers.0.self_attn.", "q_proj k_proj v_proj out_proj"),
        ("vit.layers.0.attention.", "q_proj k_proj v_proj o_proj"),
        ("model.layers.0.attn.", "q k v o"),
        ("europe.", "q k v o"),
        ("selfattention.", "q k v o"),
    ],
)
def test_names_of_ones_own_are_no_names_of_such_models(tmp_path, prefix, names):
    """One's own module, CLIP, OPT, ViT."""
    tensors, key_map = own(prefix, names)
    assert import_layer(save_safetensors(tmp_path / "x.safetensors", tensors), name="x", heads=2, key_map=key_map)


@pytest.mark.parametrize(
    ("trace", "why"),
    [
        ("enc.3.attn.rotary_emb.inv_freq", ROTARY),
        ("enc.rotary_pos_emb.freqs", ROTARY),
        ("rope.cos", ROTARY),
        ("enc.rel_embeddings.weight", "it adds scores of relative positions, which a served layer does not support"),
        ("enc.relative_attention_bias.weight", RELATIVE),
        ("enc.3.attn.relative_position_bias_table", RELATIVE),
        ("enc.rel_pos_bias.weight", RELATIVE),
        ("enc.3.alibi_slopes", ALIBI),
    ],
)
def test_a_table_of_positions_in_the_module_or_above_it_is_refused(tmp_path, trace, why):
    """One of another tower does not count; the caller may ignore a table, but no rotation."""
    tensors, key_map = own()
    path = save_safetensors(tmp_path / "x.safetensors", {**tensors, trace: random(4)})
    remedy = "" if why == ROTARY else "; --ignore KEY, once for each, leaves out what does not change attention"
    assert refused_import(path, heads=2, key_map=key_map).endswith(f"{why}{remedy}")
    if why == ROTARY:
        assert ROTARY in refused_import(path, heads=2, key_map=key_map, ignore=[trace])
    else:
        assert import_layer(path, name="x", heads=2, key_map=key_map, ignore=[trace])
    save_safetensors(path, {**tensors, f"other.{trace}": random(4), "enc.4.attn.inv_freq": random(4)})
    assert import_layer(path, name="x", heads=2, key_map=key_map)


@pytest.mark.parametrize(
    "name", ["encoder.block.0.layer.0.LocalSelfAttention.q.weight", "encoder.rel_embeddings.weight"]
)
def test_a_source_of_no_known_family_says_what_its_names_look_like(tmp_path: Path, name):
    message = refused_import(save_safetensors(tmp_path / "x.safetensors", {name: random(8, 8)}))
    assert "its names look like those of an unsupported model: it" in message
    assert "found keys like" in message
