"""LayerSpec: a spec that exists is consistent, survives JSON, and names its tensors."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from service.attention.spec import MAX_HEADS, MAX_WIDTH, LayerSpec, Norm, RelativeBias, Rotary, Window
from service.errors import LayerError
from tests.attention_fixtures import make_spec
from tests.strategies import specs

SPEC = make_spec(24, 3)


@given(specs())
@settings(max_examples=60)
def test_a_spec_survives_a_round_trip_through_json(spec):
    assert LayerSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("query_width", 0),
        ("key_width", -1),
        ("value_width", 1.0),
        ("out_width", True),
        ("num_heads", "3"),
        ("num_heads", None),
        ("num_kv_heads", 2),
        ("head_width", 0),
        ("value_head_width", 0),
        ("scale", 0.0),
        ("scale", -1.0),
        ("scale", 1e-46),
        ("scale", 1e300),
        ("scale", float("inf")),
        ("scale", float("nan")),
        ("scale", 1),
        ("scale", "1"),
        ("biases", ["query", "query"]),
        ("biases", ["other"]),
        ("biases", "query"),
        ("biases", [1]),
        ("has_output", 1),
        ("has_output", False),
        ("has_bias_kv", None),
        ("add_zero_attn", "no"),
    ],
)
def test_a_contradictory_spec_is_refused(field, value):
    """Three heads cannot share two key/value heads; a layer without an output projection has no output bias."""
    with pytest.raises(LayerError):
        LayerSpec.from_json({**SPEC.to_json(), field: value})


@pytest.mark.parametrize("scale", [1e-45, 3.4e38])
def test_the_least_and_the_largest_scale_are_finite_and_not_0_in_float32(scale):
    assert LayerSpec.from_json({**SPEC.to_json(), "scale": scale}).scale == scale
    assert 0 < np.float32(scale) < np.inf


def test_a_layer_without_output_projection_is_as_wide_as_its_heads_together():
    with pytest.raises(LayerError, match="out_width must be num_heads times value_head_width"):
        make_spec(24, 3, has_output=False).from_json({**make_spec(24, 3, has_output=False).to_json(), "out_width": 23})


@pytest.mark.parametrize("value", [None, [], "spec", 3])
def test_a_spec_must_be_an_object(value):
    with pytest.raises(LayerError):
        LayerSpec.from_json(value)


def test_missing_and_unknown_fields_are_named():
    fields = SPEC.to_json()
    del fields["scale"]
    with pytest.raises(LayerError, match="lacks scale"):
        LayerSpec.from_json(fields)
    with pytest.raises(LayerError, match="rope"):
        LayerSpec.from_json({**SPEC.to_json(), "rope": True})


PARTS: dict[str, Any] = {
    "rotary": Rotary("half", (1.0, 0.25)),
    "norm": Norm("rms", "head", 1e-6),
    "relative_bias": RelativeBias(32, 128, is_bidirectional=True),
    "window": Window(None, 0),
    "softcap": 50.0,
    "has_sinks": True,
}


SPEC_OF_PARTS = dataclasses.replace(SPEC, **PARTS).to_json()


@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_written_only_if_the_layer_has_it(part):
    assert part not in SPEC.to_json()
    spec = dataclasses.replace(SPEC, **{part: PARTS[part]})
    fields = json.loads(json.dumps(spec.to_json()))
    assert fields.keys() - SPEC.to_json().keys() == {part}
    assert LayerSpec.from_json(fields) == spec


ROTARY, NORM, BIAS = (SPEC_OF_PARTS[name] for name in ("rotary", "norm", "relative_bias"))


@pytest.mark.parametrize(
    "part",
    [
        {"rotary": {**ROTARY, "layout": "both"}},
        {"rotary": {**ROTARY, "inverse_frequencies": []}},
        {"rotary": {**ROTARY, "inverse_frequencies": [1.0] * 5}},
        {"rotary": {**ROTARY, "inverse_frequencies": [1.0, -1.0]}},
        {"rotary": {**ROTARY, "inverse_frequencies": [1]}},
        {"rotary": {**ROTARY, "inverse_frequencies": 1.0}},
        {"rotary": {**ROTARY, "attention_factor": 0.0}},
        {"rotary": {"layout": "half"}},
        {"rotary": {**ROTARY, "theta": 1e4}},
        {"rotary": None},
        {"norm": {**NORM, "kind": "batch"}},
        {"norm": {**NORM, "over": "rows"}},
        {"norm": {**NORM, "eps": -1e-6}},
        {"norm": {**NORM, "eps": 0}},
        {"norm": {**NORM, "plus_one": 1}},
        {"norm": {**NORM, "over": "width", "has_head_weights": True}},
        {"norm": []},
        {"relative_bias": {**BIAS, "buckets": 31}},
        {"relative_bias": {**BIAS, "buckets": 2}},
        {"relative_bias": {**BIAS, "buckets": 10**6}},
        {"relative_bias": {**BIAS, "max_distance": 8}},
        {"relative_bias": {**BIAS, "max_distance": 2**16 + 1}},
        {"relative_bias": {**BIAS, "max_distance": 128.0}},
        {"relative_bias": {**BIAS, "is_bidirectional": 1}},
        {"window": {"left": None, "right": None}},
        {"window": {"left": -1, "right": 0}},
        {"window": {"left": 1.0, "right": 0}},
        {"window": {"left": True, "right": 0}},
        {"window": {"right": 0}},
        {"softcap": 0.0},
        {"softcap": 50},
        {"softcap": -1.0},
        {"has_sinks": None},
    ],
    ids=range(33),
)
def test_half_a_part_or_a_contradictory_one_is_refused(part):
    with pytest.raises(LayerError):
        LayerSpec.from_json({**SPEC.to_json(), **part})


@pytest.mark.parametrize(
    ("part", "uses_positions"),
    [
        ("rotary", True),
        ("relative_bias", True),
        ("window", True),
        ("norm", False),
        ("softcap", False),
        ("has_sinks", False),
    ],
)
def test_a_layer_that_turns_masks_or_biases_by_position_uses_positions(part, uses_positions):
    assert dataclasses.replace(SPEC, **{part: PARTS[part]}).uses_positions is uses_positions


@pytest.mark.parametrize(
    ("fields", "shapes"),
    [
        ({"over": "head"}, [(8,), (8,)]),
        ({"over": "head", "has_head_weights": True}, [(4, 8), (2, 8)]),
        ({"over": "width"}, [(32,), (16,)]),
    ],
)
def test_a_norm_has_weights_for_a_head_for_each_head_or_for_all_heads_together(fields, shapes):
    spec = make_spec(24, 4, num_kv_heads=2, head_width=8, norm=Norm("layer", eps=1e-5, has_bias=True, **fields))
    found = spec.tensor_shapes()
    assert [found[f"{name}_norm.{kind}"] for kind in ("weight", "bias") for name in ("query", "key")] == shapes * 2


def test_tensor_shapes_name_every_tensor():
    spec = make_spec(
        20,
        4,
        num_kv_heads=2,
        key_width=6,
        value_width=7,
        out_width=9,
        head_width=5,
        value_head_width=3,
        has_bias_kv=True,
    )
    assert spec.tensor_shapes() == {
        "query.weight": (20, 20),
        "key.weight": (10, 6),
        "value.weight": (6, 7),
        "output.weight": (9, 12),
        "query.bias": (20,),
        "key.bias": (10,),
        "value.bias": (6,),
        "output.bias": (9,),
        "bias_k": (10,),
        "bias_v": (6,),
    }
    assert set(make_spec(24, 3, has_output=False, biases=False).tensor_shapes()) == {
        "query.weight",
        "key.weight",
        "value.weight",
    }


@pytest.mark.parametrize(
    ("has_bias_kv", "add_zero_attn", "expected"),
    [(False, False, 0), (True, False, 1), (False, True, 1), (True, True, 2)],
)
def test_extra_keys_are_the_columns_that_a_layer_appends(has_bias_kv, add_zero_attn, expected):
    assert make_spec(8, 2, has_bias_kv=has_bias_kv, add_zero_attn=add_zero_attn).extra_keys == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"query_width": MAX_WIDTH + 1},
        {"key_width": MAX_WIDTH + 1},
        {"value_width": MAX_WIDTH + 1},
        {"out_width": MAX_WIDTH + 1},
        {"head_width": MAX_WIDTH // 3 + 1},
        {"value_head_width": MAX_WIDTH // 3 + 1},
        {"num_heads": MAX_HEADS + 1, "num_kv_heads": 1, "head_width": 1, "value_head_width": 1},
    ],
    ids=str,
)
def test_a_spec_that_would_exhaust_the_memory_is_refused(changes):
    """A million heads one wide over one feature are 16 MB of weights, and 4 GB for each matrix of a forward pass."""
    with pytest.raises(LayerError, match="expected at most"):
        dataclasses.replace(SPEC, **changes)
