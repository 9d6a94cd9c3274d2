"""Checkpoint families: the table is consistent, and keys and shapes identify a family."""

from __future__ import annotations

import pytest

from service.attention.spec import PROJECTIONS
from service.layers.families import FAMILIES, FAMILY_NAMES, find_candidates
from service.layers.family import Candidate
from tests.unit.layers.families_page import PAGE, page

BERT = next(family for family in FAMILIES if family.name == "bert")
STACKED = (8, 24)  # the shape that GPT-2's fused projection must have


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_entry_of_the_table_gives_a_layer(family):
    """Canonical names once each, weights of query, key and value at least; optional keys, anchors and needs are parts."""
    canonical = [name for names in family.parts.values() for name in names]
    modules = (*PROJECTIONS, "query_norm", "key_norm")
    legal = {f"{name}.{kind}" for name in modules for kind in ("weight", "bias")} | {"bias_k", "bias_v", "sinks"}
    assert {f"{name}_norm.weight" in canonical for name in ("query", "key")} == {family.norm is not None}
    assert set(family.flags.values()) <= family.parts.keys()
    assert family.is_open or family.models
    assert all(key.endswith(".") for key in family.ignored)
    assert len(set(canonical)) == len(canonical)
    assert {"query.weight", "key.weight", "value.weight"} <= set(canonical) <= legal
    assert ("output.weight" in canonical) != family.is_single_head
    assert {*family.anchors, *family.needs} <= family.parts.keys()
    assert family.anchors
    assert all(set(group) <= family.parts.keys() for group in family.optional)
    assert all(key.startswith(family.scope) for key in (*family.parts, *family.ignored))


def test_the_table_has_the_families_of_the_articles_and_of_the_field():
    assert FAMILY_NAMES == (
        "clip", "torch-mha", "esm", "bert", "distilbert", "albert", "mpnet", "vit", "timm", "bart", "whisper", "t5", "umt5",
        "modernbert", "nomic-bert", "gte", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "olmo2", "phi3", "cohere",
        "cohere2", "gpt-oss", "gpt-neox", "gpt2", "nanogpt", "keras", "flax", "annotated", "wq-wk-wv-fc", "d2l", "numpy",
        "single-head",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("key", "family", "prefix"),
    [
        ("in_proj_weight", "torch-mha", ""),
        ("a.layers.3.self_attn.in_proj_weight", "torch-mha", "a.layers.3.self_attn."),
        ("cross.q_proj_weight", "torch-mha", "cross."),
        ("encoder.layer.11.attention.self.query.weight", "bert", "encoder.layer.11."),
        ("roberta.encoder.layer.0.attention.self.key.weight", "bert", "roberta.encoder.layer.0."),
        ("distilbert.transformer.layer.5.attention.q_lin.weight", "distilbert", "distilbert.transformer.layer.5."),
        (
            "albert.encoder.albert_layer_groups.0.albert_layers.0.attention.query.weight",
            "albert",
            "albert.encoder.albert_layer_groups.0.albert_layers.0.",
        ),
        ("vit.encoder.layer.2.attention.attention.value.weight", "vit", "vit.encoder.layer.2."),
        ("linears.2.weight", "annotated", ""),
        ("encoder.layers.1.self_attn.linears.0.weight", "annotated", "encoder.layers.1.self_attn."),
        ("attn.W_Q.weight", "wq-wk-wv-fc", "attn."),
        ("attn.W_q.weight", "d2l", "attn."),
        ("W_v", "single-head", ""),
        ("transformer.h.0.attn.c_attn.weight", "gpt2", "transformer.h.0.attn."),
        ("transformer.h.0.crossattention.c_attn.weight", "gpt2", "transformer.h.0.crossattention."),
        ("encoder.layer.0.crossattention.self.query.weight", "bert", "encoder.layer.0."),
    ],
)
def test_a_key_identifies_the_family_and_the_prefix(key, family, prefix):
    """Among other keys, by one query, key or value weight."""
    found = find_candidates(dict.fromkeys([key, "embeddings.weight", "lm_head.bias"], STACKED))
    assert [(candidate.family.name, candidate.prefix) for candidate in found] == [(family, prefix)]


@pytest.mark.parametrize(
    "key",
    [
        "model.layers.0.self_attn.q_proj.weight",
        "encoder.block.0.layer.0.SelfAttention.q.weight",
        "blocks.0.attn.qkv.weight",
        "blk.0.attn_q.weight",
        "encoder.layer.0.attention.query.weight",
        "my_in_proj_weight",
        "xW_q",
        "x.W_o",
        "out_proj.weight",
        "attention.self.query.weight.more",
    ],
)
def test_names_that_only_resemble_a_family_are_unknown(key):
    """Llama and T5 without their models, timm without its output, GGUF and accidents."""
    assert find_candidates({key: STACKED}) == []


def test_w_o_distinguishes_several_heads_from_one():
    names = dict.fromkeys(["a.W_q", "a.W_k", "a.W_v"], (8, 8))
    assert [found.family.name for found in find_candidates(names)] == ["single-head"]
    assert [found.family.name for found in find_candidates(names | {"a.W_o": (8, 8)})] == ["numpy"]
    assert [found.family.name for found in find_candidates(names | {"b.W_o": (8, 8)})] == ["single-head"]
    assert find_candidates(names, "numpy") == []


@pytest.mark.parametrize(
    ("shape", "family"), [((8, 24), "gpt2"), ((24, 8), "nanogpt"), ((64, 192), "gpt2"), ((192, 64), "nanogpt")]
)
def test_the_shape_of_c_attn_distinguishes_conv1d_from_linear(shape, family):
    """Any other shape counts as nanogpt's, whose checks refuse it by name."""
    found = find_candidates({"a.c_attn.weight": shape})
    assert [candidate.family.name for candidate in found] == [family]
    for odd in ((8, 8), (24,), (24, 24)):
        assert find_candidates({"c_attn.weight": odd})[0].family.name == "nanogpt"


def test_candidates_come_in_the_order_of_their_numbers():
    """2 before 10; a prefix is one candidate however many of its keys are seen."""
    keys = [f"l.layer.{i}.attention.self.{name}.weight" for i in (10, 2, 0) for name in PROJECTIONS[:3]]
    assert [found.number for found in find_candidates(dict.fromkeys(keys, (8, 8)))] == [0, 2, 10]


@pytest.mark.parametrize(
    ("prefix", "number"),
    [
        ("", None),
        ("a.b.", None),
        ("3.", 3),
        ("a.12.b.", 12),
        ("a.1.b.2.c.", 2),
        ("layer3.", None),
        (f"{'9' * 5000}.", 10**18 - 1),
    ],
)
def test_the_number_of_a_layer_is_the_last_separate_number_of_its_prefix(prefix, number):
    assert Candidate(BERT, prefix).number == number


def test_the_page_has_the_table_of_the_rows():
    """`python -m tests.unit.layers.families_page` writes it."""
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text
