"""Importer: a config and tensors of a family that contradict each other, or say half of a part, are refused with the reason."""

from __future__ import annotations

import pytest
import torch

from tests.unit.layers.checkpoints import random, save_directory
from tests.unit.layers.refusals import refused_import
from tests.unit.layers.test_importer_families import CASES, T5, T5_CONFIG, K, N, config, llama

NORMS = {"q_norm__weight": (4,), "k_norm__weight": (4,)}
ROPE = "rope_parameters"


def refused(tmp_path, tensors: dict[str, torch.Tensor], made: dict[str, object] | None, **options) -> str:
    return refused_import(save_directory(tmp_path / "d", tensors, made), **options)


OPTIONS: dict[str, tuple[dict[str, object], str]] = {
    "two thetas": (
        {ROPE: {"rope_theta": 5e5}},
        "contradicts itself: 'rope_theta' 10000.0, 'rope_parameters.rope_theta' 500000.0",
    ),
    "two types": (
        {"rope_scaling": {"type": "linear", "rope_type": "yarn"}},
        "contradicts itself: 'rope_type' 'yarn', 'type'",
    ),
    "two scalings": (
        {"rope_scaling": {"type": "linear", "factor": 2.0}, ROPE: {"type": "linear", "factor": 4.0}},
        "contradicts itself: 'rope_parameters.factor' 4.0, 'factor' 2.0",
    ),
    "key/value heads": ({"num_key_value_heads": N}, "gives 4 key/value heads, but the rows of key make 2"),
    "head width": ({"head_dim": 8}, "has head_dim 8, but the 16 rows of query make 4 heads of 4"),
    "width": ({"hidden_size": 16}, "contradicts itself: 'hidden_size' 16, 'the width of query' 8"),
    "bias": (
        {"attention_bias": True},
        "has attention_bias True, but of 'model.layers.3.self_attn.q_proj.bias' it is missing",
    ),
    "partial": (
        {"partial_rotary_factor": 0.5},
        "partial_rotary_factor is 0.5, but this family's models rotate whole heads",
    ),
    "theta": ({"rope_theta": -1}, "rope_theta in config.json must be a number above 0, not -1"),
    "dynamic": (
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "'dynamic': its frequencies depend on the length of a seq",
    ),
    "longrope": (
        {"rope_scaling": {"type": "longrope"}},
        "the scaling 'longrope': its frequencies depend on the length",
    ),
    "mrope": ({"rope_scaling": {"type": "mrope"}}, "the scaling 'mrope': the importer does not know it"),
    "mrope sections": ({ROPE: {"mrope_section": [1, 1]}}, "options that the importer does not know: 'mrope_section'"),
    "proportional": (
        {ROPE: {"rope_type": "proportional"}},
        "the scaling 'proportional': the importer does not know it",
    ),
    "llama3": ({ROPE: {"rope_type": "llama3"}}, "max_position_embeddings"),
    "no object": ({"rope_scaling": "linear"}, "rope_parameters and rope_scaling in config.json must be objects"),
    "chunks": (
        {"layer_types": ["chunked_attention"] * 4},
        "has 'chunked_attention', which a served layer does not support",
    ),
    "sliding": ({"layer_types": ["sliding_attention"] * 4}, "'sliding_attention', which contradicts the family llama"),
    "too few types": ({"layer_types": ["full_attention"] * 3}, "layer_types in config.json has no entry for layer 3"),
    "attention_chunk_size": ({"attention_chunk_size": 8}, "it attends inside of chunks"),
}


@pytest.mark.parametrize(("more", "why"), OPTIONS.values(), ids=OPTIONS)
def test_a_config_of_llama_that_contradicts_itself_or_the_tensors_is_refused(tmp_path, more, why):
    assert why in refused(tmp_path, llama(), config("llama", **more))


def without(name: str, key: str) -> dict[str, torch.Tensor]:
    return {other: value for other, value in CASES[name].tensors.items() if not other.endswith(key)}


TENSORS = {
    "half a norm": (without("qwen3", "k_norm.weight"), config("qwen3"), "keys of the qwen3 layer are missing"),
    "a norm of llama": (llama(**NORMS), config("llama"), "the module has keys that the llama layer does not use"),
    "a norm's length": (llama(q_norm__weight=(5,), k_norm__weight=(4,)), config("qwen3"), "has the shape [5], expected [4]"),
    "a norm over the width": (llama(**NORMS), config("olmo2"), "has the shape [4], expected [16]"),
    "no sinks": (without("gpt-oss", "sinks"), config("gpt_oss"), "keys of the gpt-oss layer are missing"),
    "the shape of sinks": (
        CASES["gpt-oss"].tensors | {"model.layers.3.self_attn.sinks": random(N + 1)}, config("gpt_oss"),
        "sinks (from 'model.layers.3.self_attn.sinks') has the shape [5], expected [4]",
    ),
    "a gate in the query": (
        llama() | {"model.layers.3.self_attn.q_proj.weight": random(32, 8)}, config("qwen3"),
        "keys of the qwen3 layer are missing",
    ),
    "a bias of a Whisper key": (
        CASES["whisper"].tensors | {"model.decoder.layers.1.self_attn.k_proj.bias": random(8)}, CASES["whisper"].config,
        "the module has keys that the whisper layer does not use",
    ),
    "bart without a bias": (
        CASES["whisper"].tensors, {**CASES["whisper"].config, "model_type": "bart"}, "keys of the bart layer are missing"
    ),
    "a latent vector": (llama(kv_a_proj_with_mqa__weight=(4, 8)), config("deepseek_v3"), "of a latent vector (MLA)"),
    "a gated layer": (llama(**NORMS), config("qwen3_next"), "it gates the output of its heads"),
    "heads that do not divide": (
        llama(), config("llama", num_attention_heads=3, num_key_value_heads=None, head_dim=None), "do not make heads for 3 heads"
    ),
    "a softcap of Gemma 3": (
        CASES["gemma3, sliding"].tensors, config("gemma3_text", attn_logit_softcapping=50.0), "has 'attn_logit_softcapping'"
    ),
    "an odd window": (
        CASES["gemma3, sliding"].tensors, config("gemma3_text", sliding_window=257, use_bidirectional_attention=True),
        "it is halved, so it must be even",
    ),
    "one base for two": (
        CASES["gemma3, sliding"].tensors, config("gemma3_text", rope_parameters={"rope_theta": 1e4}),
        "must have full_attention and sliding_attention",
    ),
    "a switch that is off": (
        CASES["qwen2"].tensors, config("qwen2", layer_types=["sliding_attention"] * 4), "but use_sliding_window is off"
    ),
    "cohere without a base": (llama(), config("cohere", rope_theta=None), "nothing says rope_theta"),
    "scaled nomic": (
        CASES["nomic-bert"].tensors, {**CASES["nomic-bert"].config, "rotary_scaling_factor": 2}, "has 'rotary_scaling_factor'"
    ),
    "another number of buckets": (T5, {**T5_CONFIG, "relative_attention_num_buckets": 16}, "has 32 buckets, expected 16"),
    "buckets that MPNet has not": (
        CASES["mpnet"].tensors, {**CASES["mpnet"].config, "relative_attention_num_buckets": 16}, "has 32 buckets, expected 16"
    ),
    "esm's other positions": (
        CASES["esm"].tensors, {**CASES["esm"].config, "position_embedding_type": "relative_key"}, "is neither rotary nor absolute"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("tensors", "made", "why"), TENSORS.values(), ids=TENSORS)
def test_half_a_part_and_a_part_of_another_family_are_refused(tmp_path, tensors, made, why):
    options = {"prefix": "encoder"} if tensors is T5 else {}
    assert why in refused(tmp_path, tensors, made, **options)


def test_the_table_of_block_0_must_be_there(tmp_path):
    tensors = {key: value for key, value in T5.items() if "relative" not in key}
    message = refused(tmp_path, tensors, T5_CONFIG, prefix="encoder")
    assert "'encoder.block.0.layer.0.SelfAttention.relative_attention" in message


@pytest.mark.parametrize("made", [None, {"model_type": "own", "num_attention_heads": N, "num_key_value_heads": K}])
def test_names_of_several_families_need_a_model_type_or_a_family(tmp_path, made):
    message = refused(tmp_path, llama(), made)
    assert "its names are those of several families (nomic-bert, gte, llama, mistral, qwen2, qwen3" in message
    assert "must name a model of one" in message


def test_a_family_without_a_config_has_no_class_defaults(tmp_path):
    """A base that nothing records is not guessed; heads come from the caller."""
    assert refused(tmp_path, llama(), None, family="llama").endswith("give it with --heads H")
    assert "nothing says rope_theta; it is read from the config.json" in refused(
        tmp_path, llama(), None, family="llama", heads=N
    )


def test_a_layer_of_another_tower_is_no_layer_of_the_family(tmp_path):
    message = refused(tmp_path, llama("audio_tower.layers.0.self_attn."), config("llama"))
    assert "its rotary positions are of no family" in message
