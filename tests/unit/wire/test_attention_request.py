"""Attention request: what becomes a call, and what is refused, with its code and its pointer."""

from __future__ import annotations

import math

import pytest
import torch

from service.attention.call import AttentionCall
from service.attention.masks import Run
from service.errors import BadDtype, BadMask, BadShape, CostLimit, InvalidInput, LayoutRequired, NonFinite, UnknownField
from service.wire.attend_request import CheckedRequest, RequestLimits
from service.wire.attention_request import check_attention

PLENTY = RequestLimits(*(2**62,) * 5)


def raw(*shape: int, dtype: str = "float32") -> dict[str, object]:
    size = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}[dtype]
    return {"dtype": dtype, "shape": shape, "data": memoryview(bytearray(math.prod(shape) * size))}


def body(**fields: object) -> dict[str, object]:
    return {"query": raw(2, 4, 3, 8), "key": raw(2, 2, 5, 8), "value": raw(2, 2, 5, 6), **fields}


def checked(**fields: object) -> CheckedRequest:
    return check_attention(body(**fields), PLENTY)


def call_of(request: CheckedRequest) -> AttentionCall:
    assert isinstance(request.call, AttentionCall)
    return request.call


def call(**fields: object) -> AttentionCall:
    return call_of(checked(**fields))


def test_a_call_has_four_axes_the_default_scale_and_nothing_that_was_not_requested():
    found = call()
    assert found.query.shape == (2, 4, 3, 8)
    assert found.scale == 8**-0.5
    assert (found.softcap, found.sinks, found.mask, found.weights, found.scores) == (None,) * 5
    assert not found.has_lse
    assert not found.has_present
    assert not found.rows_first


def test_the_cost_counts_every_query_head_and_the_past():
    cost = checked(past_key=raw(2, 2, 7, 8), past_value=raw(2, 2, 7, 6)).cost
    assert cost.sequences == 2
    assert cost.tokens == 2 * (3 + 12)
    assert cost.cells == 2 * 4 * 3 * 12
    assert cost.weights_bytes == 0


def test_what_is_returned_counts_in_bytes():
    plain = checked().cost.weights_bytes
    assert plain == 0
    assert checked(lse=True).cost.weights_bytes == 2 * 4 * 3 * 4
    assert checked(scores={"stage": "masked"}).cost.weights_bytes == 2 * 4 * 3 * 5 * 4
    assert checked(weights={"form": "heads"}).cost.weights_bytes == 2 * 4 * 3 * 5 * 4
    assert checked(present=True, value=raw(2, 2, 5, 6)).cost.weights_bytes == 2 * 2 * 5 * (8 + 6) * 4


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"surplus": 1}, UnknownField, "/surplus"),
        ({"scores": {"stage": "masked", "surplus": 1}}, UnknownField, "/scores/surplus"),
        ({"scores": {}}, InvalidInput, "/scores/stage"),
        ({"scores": {"stage": "raw"}}, InvalidInput, "/scores/stage"),
        ({"scores": {"stage": "masked", "heads": [4]}}, InvalidInput, "/scores/heads"),
        ({"key": None}, InvalidInput, "/key"),
        ({"layout": "dhl"}, InvalidInput, "/layout"),
        ({"query": raw(4, 3, 8)}, LayoutRequired, "/layout"),
        ({"layout": "hld"}, BadShape, "/query"),
        ({"num_heads": 4}, InvalidInput, "/num_heads"),
        ({"key": raw(1, 2, 5, 8)}, BadShape, "/key"),
        ({"key": raw(2, 3, 5, 8), "value": raw(2, 3, 5, 6)}, BadShape, "/key"),
        ({"key": raw(2, 2, 5, 7)}, BadShape, "/key"),
        ({"value": raw(2, 1, 5, 6)}, BadShape, "/value"),
        ({"value": raw(2, 2, 4, 6)}, BadShape, "/value"),
        ({"value": raw(2, 2, 0, 6)}, BadShape, "/value"),
        ({"scale": 0.0}, InvalidInput, "/scale"),
        ({"scale": 1e-60}, InvalidInput, "/scale"),
        ({"scale": 1e39}, InvalidInput, "/scale"),
        ({"scale": math.inf}, InvalidInput, "/scale"),
        ({"scale": "1"}, InvalidInput, "/scale"),
        ({"scale": True}, InvalidInput, "/scale"),
        ({"softcap": 0.0}, InvalidInput, "/softcap"),
        ({"softcap": -1.0}, InvalidInput, "/softcap"),
        ({"softcap": math.nan}, InvalidInput, "/softcap"),
        ({"past_key": raw(2, 2, 1, 8)}, InvalidInput, "/past_value"),
        ({"past_value": raw(2, 2, 1, 6)}, InvalidInput, "/past_key"),
        ({"past_key": raw(2, 1, 1, 8), "past_value": raw(2, 2, 1, 6)}, BadShape, "/past_key"),
        ({"past_key": raw(2, 2, 1, 8), "past_value": raw(2, 2, 2, 6)}, BadShape, "/past_value"),
        ({"past_key": raw(2, 2, 0, 8), "past_value": raw(2, 2, 0, 6)}, BadShape, "/past_key"),
        ({"past_key": raw(2, 2, 1, 8, dtype="float16"), "past_value": raw(2, 2, 1, 6)}, BadDtype, "/past_key"),
        ({"present": True, "value": raw(2, 2, 5, 6, dtype="float16")}, BadDtype, "/value"),
        ({"sinks": raw(2)}, BadShape, "/sinks"),
        ({"sinks": raw(4, 1)}, BadShape, "/sinks"),
        ({"masks": [{"kind": "lengths", "values": [6, 1]}]}, BadMask, "/masks/0/values"),
        ({"weights": {"form": "top_k", "k": 6}}, InvalidInput, "/weights/k"),
        ({"weights": {"form": "heads", "heads": [4]}}, InvalidInput, "/weights/heads"),
        ({"lse": 1}, InvalidInput, "/lse"),
        ({"present": "yes"}, InvalidInput, "/present"),
    ],
    ids=lambda value: None if isinstance(value, type) else str(value)[:40],
)
def test_what_is_wrong_is_refused_with_its_code_and_pointer(fields, error, param):
    with pytest.raises(error) as refused:
        checked(**fields)
    assert type(refused.value) is error
    assert refused.value.param == param


def test_a_value_that_is_not_finite_is_refused():
    values = bytearray(16)
    values[:4] = b"\x00\x00\xc0\x7f"
    with pytest.raises(NonFinite) as refused:
        checked(sinks=raw(4) | {"data": memoryview(values)})
    assert refused.value.param == "/sinks"


@pytest.mark.parametrize("scale", [1e39, 1e-60])
def test_a_scale_that_only_float64_holds_is_taken_with_a_float64_query(scale):
    wide = {
        name: raw(*shape, dtype="float64") for name, shape in (("query", (3, 8)), ("key", (5, 8)), ("value", (5, 6)))
    }
    assert call_of(check_attention({**wide, "scale": scale}, PLENTY)).scale == scale


def test_a_scale_may_be_a_whole_number_and_negative():
    assert call(scale=-2).scale == -2


def test_causal_starts_behind_the_past_unless_it_says_otherwise():
    past = {"past_key": raw(2, 2, 7, 8), "past_value": raw(2, 2, 7, 6)}
    for fields, offset in (({}, 7), ({"align": "top_left"}, 0), ({"align": "bottom_right"}, 9), ({"offset": 2}, 2)):
        found = call(**past, masks=[{"kind": "causal", **fields}])
        assert found.mask is not None
        (run,) = found.mask.masks
        assert isinstance(run, Run)
        assert run.high.flatten().tolist() == [min(12, i + offset + 1) for i in range(3)]


@pytest.mark.parametrize(
    ("limit", "fields", "words"),
    [
        (RequestLimits(1, *(2**62,) * 4), {}, "2 sequences"),
        (RequestLimits(2**62, 15, *(2**62,) * 3), {}, "16 query and key rows"),
        (RequestLimits(2**62, 2**62, 119, 2**62, 2**62), {}, "120 attention scores"),
        (RequestLimits(*(2**62,) * 3, 95, 2**62), {"lse": True}, "96 bytes"),
        (RequestLimits(*(2**62,) * 4, 0), {"softcap": 1.0}, "bytes of tables"),
    ],
    ids=["sequences", "tokens", "cells", "returned", "tables"],
)
def test_what_costs_more_than_its_limit_is_refused(limit, fields, words):
    with pytest.raises(CostLimit, match=words):
        check_attention(body(**fields), limit)


def test_packed_and_split_heads_are_the_same_call():
    rows = torch.randn(3, 8)

    def request(layout: str, tensor: torch.Tensor, **fields: object) -> CheckedRequest:
        given = raw(*tensor.shape) | {"data": memoryview(bytearray(tensor.numpy().tobytes()))}
        return check_attention({"query": given, "key": given, "value": given, "layout": layout, **fields}, PLENTY)

    packed, split = request("packed", rows, num_heads=2), request("lhd", rows.reshape(3, 2, 4))
    assert torch.equal(packed.call.query, split.call.query)
    assert call_of(packed).rows_first


@pytest.mark.parametrize("form", ["heads", "mean"])
def test_the_name_of_a_form_of_weights_is_its_short_form(form):
    assert call(weights=form).weights == call(weights={"form": form}).weights


@pytest.mark.parametrize("weights", ["top_k", "all", ["heads"], 1])
def test_another_value_is_no_short_form(weights):
    with pytest.raises(InvalidInput, match="weights") as refused:
        checked(weights=weights)
    assert (refused.value.param or "").startswith("/weights")
