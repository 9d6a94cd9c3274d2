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


@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_written_only_if_the_layer_has_it(part):
    assert part not in SPEC.to_json()
    spec = dataclasses.replace(SPEC, **{part: PARTS[part]})
    fields = json.loads(json.dumps(spec.to_json()))
    assert fields.keys() - SPEC.to_json().keys() == {part}
    assert LayerSpec.from_json(fields) == spec


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
