"""Importer: the spec that keys, shapes, config and caller imply, and what does not fit; no tensor is read."""

from __future__ import annotations

import math

import pytest
import torch

from service.attention.spec import LayerSpec
from service.errors import LayerError
from service.layers.derivation import derive
from service.layers.importer import choose, present_parts
from service.layers.source import Entry, Source
from tests.unit.layers.checkpoints import bert, linears, mha, random


def imported_spec(tensors: dict[str, torch.Tensor], config: dict[str, object] | None = None, **options) -> LayerSpec:
    """Return the spec after every step of an import that reads no tensor."""

    def unread() -> torch.Tensor:
        raise AssertionError("a tensor was read")

    source = Source("x", config, {key: Entry(tuple(value.shape), unread) for key, value in tensors.items()})
    chosen = choose(source, family=None, prefix=None, layer=None)
    present = present_parts(chosen, source)
    return derive(chosen, present, source, **{"heads": None, "scale": None, "add_zero_attn": False, **options})


def refused(tensors: dict[str, torch.Tensor], config: dict[str, object] | None = None, **options) -> str:
    with pytest.raises(LayerError) as caught:
        imported_spec(tensors, config, **options)
    assert len(caught.value.message) <= 500
    return caught.value.message


BERT = bert(layers=1)
BELOW = "bert.encoder.layer.0.attention."


def test_bert_is_known_by_its_keys_and_its_config():
    spec = imported_spec(BERT, {"num_attention_heads": 4})
    assert spec == LayerSpec(8, 8, 8, 8, 4, 4, 2, 2, 1 / math.sqrt(2), ("query", "key", "value", "output"))


@pytest.mark.parametrize("key", [key for key in BERT if key.startswith(BELOW) and "LayerNorm" not in key])
def test_a_missing_key_is_named(key):
    """F4: any one of them, weights and biases."""
    lacking = {name: value for name, value in BERT.items() if name != key}
    assert refused(lacking, heads=2) == f"keys of the bert layer are missing: {key!r}"


@pytest.mark.parametrize("key", [key for key in BERT if key.startswith(BELOW) and "LayerNorm" not in key])
@pytest.mark.parametrize("shape", [(9, 8), (8, 9), (9,), (8, 8, 1), (8, 0), (0,), ()])
def test_a_wrong_shape_is_named_with_what_was_expected(key, shape):
    """F4: whichever tensor is wrong, and however."""
    message = refused({**BERT, key: torch.zeros(shape)}, heads=2)
    assert "expected" in message or "do not divide" in message


def test_an_embedding_of_512_in_a_layer_of_768_is_refused_with_both_numbers():
    tensors = {**BERT, f"{BELOW}self.key.weight": random(8, 5)}
    assert (
        refused(tensors, heads=2)
        == f"key.weight (from {BELOW + 'self.key.weight'!r}) has the shape [8, 5], expected [8, 8]"
    )


@pytest.mark.parametrize(
    "extra", ["self.rel.weight", "output.dense.scale", "gate.weight", "query.weight", "self.query.weight_g"]
)
def test_an_unknown_key_inside_the_module_is_refused(extra):
    """F4: without it the layer would compute something else. Keys outside the module do not matter."""
    assert refused({**BERT, BELOW + extra: random(3)}, heads=2).endswith(
        "keys that the bert layer does not use (--ignore KEY, once for each, leaves out what does not change attention): "
        f"{BELOW + extra!r}"
    )
    assert imported_spec({**BERT, "bert.encoder.layer.0.intermediate.dense.weight": random(3)}, heads=2)


def test_layer_norms_are_known_and_left_out():
    legacy = {f"{BELOW}output.LayerNorm.gamma": random(8), f"{BELOW}output.LayerNorm.beta": random(8)}
    assert imported_spec({**BERT, **legacy}, heads=2) == imported_spec(BERT, heads=2)


def test_relative_positions_and_rotary_embeddings_are_refused_with_a_reason():
    relative = {**BERT, f"{BELOW}self.distance_embedding.weight": random(3, 4)}
    assert "it uses relative positions, which a served layer does not support; --ignore" in refused(relative, heads=2)
    rotary = {**BERT, f"{BELOW}self.rotary_embeddings.inv_freq": random(3)}
    assert refused(rotary, heads=2).endswith(": its rotary positions are of no family that the importer knows")


def test_heads_come_from_the_config_or_the_caller_and_must_agree():
    assert imported_spec(BERT, {"n_heads": 2}).num_heads == 2
    assert imported_spec(BERT, {"hidden_size": 8}, heads=4).num_heads == 4
    assert imported_spec(BERT, {"num_attention_heads": 4}, heads=4).num_heads == 4
    assert refused(BERT, {"num_attention_heads": 4}, heads=2).endswith("4 by num_attention_heads, 2 by the caller")
    assert refused(BERT, {"num_attention_heads": 4, "n_heads": 2}).endswith("4 by num_attention_heads, 2 by n_heads")
    assert "give it with --heads H" in refused(BERT)
    assert "give it with --heads H" in refused(BERT, {})


@pytest.mark.parametrize("heads", [3, 5, 16])
def test_heads_that_do_not_divide_the_width_are_refused_with_numbers(heads):
    assert refused(BERT, heads=heads) == f"{heads} heads do not divide the 8 out features of query"


@pytest.mark.parametrize("heads", [0, -2, 4097, 10**30, 2.0, True, "2", {}])
def test_an_invalid_number_of_heads_is_refused(heads):
    """From the config and from the caller."""
    assert "given by num_attention_heads must be a whole number from 1 to 4096" in refused(
        BERT, {"num_attention_heads": heads}
    )
    assert "given by the caller must be a whole number from 1 to 4096" in refused(BERT, heads=heads)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_must_be_a_finite_number_above_zero(scale):
    assert "scale" in refused(BERT, heads=2, scale=scale)
    assert imported_spec(BERT, heads=2, scale=2).scale == 2.0


def test_add_zero_attn_belongs_to_torch():
    assert imported_spec(mha(), heads=2, add_zero_attn=True).add_zero_attn
    assert "is for the family torch-mha; this layer has the family bert" in refused(BERT, heads=2, add_zero_attn=True)


def test_half_of_a_pair_is_refused_with_the_name_of_the_other():
    """torch's module has all biases or none, and bias_k with bias_v."""
    whole = mha(add_bias_kv=True)
    for lacking, missing in (
        ("bias_k", "bias_k"),
        ("in_proj_bias", "in_proj_bias"),
        ("out_proj.bias", "out_proj.bias"),
    ):
        tensors = {key: value for key, value in whole.items() if key != lacking}
        assert refused(tensors, heads=2).endswith(f"missing: {missing!r}")


def test_a_fused_projection_of_odd_size_is_refused():
    assert "25 rows do not divide into 3 projections" in refused({**mha(), "in_proj_weight": random(25, 8)}, heads=2)
    assert "expected [5, 5]" in refused({**mha(), "in_proj_weight": random(24, 5)}, heads=1)
    assert "(from 'out_proj.weight') has the shape [8, 9]" in refused(
        {**mha(), "out_proj.weight": random(8, 9)}, heads=2
    )


@pytest.mark.parametrize("shape", [(8,), (1, 8), (2, 1, 8), (1, 1, 1, 8)])
def test_bias_k_has_torchs_shape(shape):
    whole = mha(add_bias_kv=True)
    message = refused({**whole, "bias_k": random(*shape)}, heads=2)
    assert "'bias_k' has the shape" in message
    assert "expected [1, 1, width]" in message


def test_bias_k_of_another_width_is_refused():
    assert "bias_k (from 'bias_k') has the shape [4], expected [8]" in refused(
        {**mha(add_bias_kv=True), "bias_k": random(1, 1, 4)}, heads=2
    )


def test_both_forms_of_torchs_projection_at_once_are_refused():
    both = {**mha(), "q_proj_weight": random(8, 8)}
    assert "keys that the torch-mha layer does not use (--ignore KEY" in refused(both, heads=2)
    assert refused(both, heads=2).endswith(": 'q_proj_weight'")


def test_the_annotated_layer_keeps_its_width_throughout():
    tensors = linears("", "linears.0", "linears.1", "linears.2", "linears.3")
    assert imported_spec(tensors, heads=4).head_width == 2
    wrong = {**tensors, "linears.1.weight": random(4, 8), "linears.1.bias": random(4)}
    assert "key.weight (from 'linears.1.weight') has the shape [4, 8], expected [8, 8]" in refused(wrong, heads=4)


def test_a_single_head_layer_has_one_head_for_any_option():
    """A numpy layer without its W_o does not count as one with many heads."""
    tensors = {name: random(8, 8) for name in ("W_q", "W_k", "W_v")}
    spec = imported_spec(tensors)
    assert (spec.num_heads, spec.has_output, spec.scale) == (1, False, 1 / math.sqrt(8))
    assert imported_spec(tensors, heads=1) == spec
    assert "1 by the family single-head, 8 by the caller" in refused(tensors, heads=8)


def test_a_numpy_weight_is_checked_along_the_axis_it_is_applied_on():
    """`X @ W`: [in, out] in the file, [out, in] in the message."""
    tensors = {name: random(8, 8) for name in ("W_q", "W_k", "W_v", "W_o")}
    message = refused({**tensors, "W_q": random(8, 6)}, heads=2)
    assert message == "query.weight (from 'W_q', transposed) has the shape [6, 8], expected [8, 8]"


def test_torchs_separate_projections_are_as_wide_as_the_query():
    """kdim and vdim are input widths of key and value; the heads are as wide as without them."""
    whole = mha(kdim=5, vdim=6, bias=False)
    assert imported_spec(whole, heads=2).key_width == 5
    narrow = {"q_proj_weight": random(4, 8), "k_proj_weight": random(4, 5), "v_proj_weight": random(4, 6)}
    message = refused({**narrow, "out_proj.weight": random(8, 4)}, heads=2)
    assert message == "query.weight (from 'q_proj_weight') has the shape [4, 8], expected [8, 8]"
    message = refused({**whole, "v_proj_weight": random(4, 6), "out_proj.weight": random(8, 4)}, heads=2)
    assert message == "value.weight (from 'v_proj_weight') has the shape [4, 6], expected [8, 6]"
