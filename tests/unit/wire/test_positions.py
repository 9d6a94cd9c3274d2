"""Positions: what a request must say of them, what it may leave out, and what is refused, with its code and its pointer."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from service.attention import masks
from service.attention.call import Call
from service.attention.masks import CombinedMask, Run
from service.attention.spec import MAX_POSITION, RelativeBias, Rotary, Window
from service.errors import BadDtype, BadShape, CostLimit, InvalidInput, MaskedRow, PositionsRequired
from service.wire.attend_request import CheckedRequest, RequestLimits, check_request
from tests.attention_fixtures import make_spec

PLAIN = make_spec(8, 4, num_kv_heads=2)
ROTARY = dataclasses.replace(PLAIN, rotary=Rotary("half", (1.0,)))
CAUSAL = dataclasses.replace(PLAIN, window=Window(None, 0))
PLENTY = RequestLimits(*(2**62,) * 5)
ROW = [0.5] * 8
PAST: dict[str, Any] = {"past_key": [[[0.5, 1.0]] * 4] * 2, "past_value": [[[0.5, 1.0]] * 4] * 2}


def check(spec: Any = ROTARY, rows: Any = 3, limits: Any = PLENTY, **fields: Any) -> CheckedRequest:
    return check_request({"query": [ROW] * rows, **fields}, "decoder", spec, limits)


def call(spec: Any = ROTARY, rows: Any = 3, **fields: Any) -> Call:
    found = check(spec, rows, **fields).call
    assert isinstance(found, Call)
    return found


def places(found: Call) -> list[Any]:
    return [None if one is None else one.tolist() for one in (found.positions, found.key_positions)]


def run_of(found: Call) -> list[list[int]]:
    """The first key and the end of the keys that each query row may attend to."""
    assert found.mask is not None
    run = found.mask.run(0)
    assert run is not None
    low, high = torch.broadcast_tensors(*run)
    return torch.stack([low.flatten(), high.flatten()], 1).tolist()


def test_rows_and_keys_of_one_number_stand_at_0_1_and_so_on():
    assert places(call()) == [None, None]
    assert places(call(key=[ROW] * 3)) == [None, None]
    # A call without positions has no past, so here they are written out.
    assert places(call(key=[ROW], rows=5, **PAST)) == [[[*range(5)]]] * 2


def test_the_keys_of_self_attention_stand_where_their_rows_do():
    assert places(call(positions=[7, 8, 9])) == [[[7, 8, 9]], [[7, 8, 9]]]
    assert places(call(positions=[7, 8, 9], key_positions=[1, 1, 2])) == [[[7, 8, 9]], [[1, 1, 2]]]


def test_a_batch_has_one_row_of_positions_or_one_for_each_sequence():
    batch = {"query": [[ROW] * 2] * 3}
    assert places(call(**batch, positions=[4, 5])) == [[[4, 5]]] * 2
    each = [[4, 5], [0, 1], [2, 2]]
    assert places(call(**batch, positions=each, key_positions=[4, 5])) == [each, [[4, 5]]]


def test_with_as_many_keys_as_rows_what_is_not_sent_is_0_1_and_so_on():
    assert places(call(key=[ROW] * 3, positions=[4, 5, 6])) == [[[4, 5, 6]], [[0, 1, 2]]]
    assert places(call(key=[ROW] * 3, key_positions=[4, 5, 6])) == [[[0, 1, 2]], [[4, 5, 6]]]


@pytest.mark.parametrize(
    ("rows", "fields", "missing", "bottom_right"),
    [
        (3, {"key": [ROW] * 5}, "positions", "positions 2 to 4 with key_positions 0 to 4"),
        (1, PAST, "positions", "positions 4 with key_positions 0 to 4"),
        (3, {"key": [ROW]}, "positions", "positions 0 to 2 with key_positions 2"),
        (1, {**PAST, "positions": [4]}, "key_positions", "positions 4 with key_positions 0 to 4"),
    ],
)
def test_where_two_readings_are_usual_the_request_must_say_and_the_error_shows_both(
    rows, fields, missing, bottom_right
):
    with pytest.raises(PositionsRequired, match=f"^{missing} is required: .*{bottom_right} ") as caught:
        check(rows=rows, **fields)
    assert caught.value.param == f"/{missing}"
    assert "top left" in caught.value.message


def test_a_layer_whose_window_does_not_apply_needs_no_positions():
    with pytest.raises(PositionsRequired):
        check(CAUSAL, key=[ROW] * 5)
    assert call(CAUSAL, key=[ROW] * 5, layer_masks="none").mask is None
    with pytest.raises(PositionsRequired):
        check(key=[ROW] * 5, layer_masks="none")


@pytest.mark.parametrize("name", ["positions", "key_positions"])
def test_a_layer_that_uses_no_positions_says_so(name):
    with pytest.raises(InvalidInput, match=f'^{name} changes nothing: layer "decoder" uses no positions; ') as caught:
        check(PLAIN, **{name: [0, 1, 2]})
    assert (caught.value.code, caught.value.param) == ("invalid", f"/{name}")
    assert call(PLAIN, rows=1, **PAST, layer_masks="none").mask is None


@pytest.mark.parametrize("name", ["positions", "key_positions"])
@pytest.mark.parametrize(
    ("values", "kind", "words"),
    [
        (
            [0, -1, 2],
            InvalidInput,
            r"a number out of range at index \[1\], expected whole numbers from 0 to 16,777,215",
        ),
        ([0, 1, MAX_POSITION], InvalidInput, r"a number out of range at index \[2\]"),
        ([0, 1, 2**70], BadDtype, "a number beyond"),
        ([0, 0.5, 1], BadDtype, r"a fraction at index \[1\]"),
        ([0, True, 1], BadDtype, r"a boolean at index \[1\]"),
        ({"dtype": "float32", "shape": [3], "data": [0, 1, 2]}, BadDtype, "must be one of int32, int64"),
        ("012", InvalidInput, "got a string"),
        ([0, 1], BadShape, r"must be \[3\], .*, got \[2\]"),
        ([[0, 1, 2]], BadShape, r"must be \[3\], .*, got \[1, 3\]"),
        ([], BadShape, r"got \[0\]"),
        (5, BadShape, r"got \[\]"),
    ],
)
def test_positions_are_whole_numbers_from_0_one_for_each_row(name, values, kind, words):
    others = {"positions": [0, 1, 2], "key_positions": [0, 1, 2]}
    with pytest.raises(kind, match=f"{name}.* {words}") as caught:
        check(**{**others, name: values})
    assert type(caught.value) is kind
    assert caught.value.param in (f"/{name}", f"/{name}/dtype")


def test_key_positions_cover_the_past():
    with pytest.raises(BadShape, match=r"^key_positions must be \[5\], one for each key, the past included, got \[1\]"):
        check(rows=1, **PAST, positions=[4], key_positions=[4])
    found = call(rows=1, **PAST, positions=[4], key_positions=[0, 1, 2, 3, 4])
    assert places(found) == [[[4]], [[0, 1, 2, 3, 4]]]
    assert found.past_key is not None
    assert found.past_key.shape == (1, 2, 4, 2)


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"past_value": None}, InvalidInput, "past_key and past_value come together"),
        ({"past_key": [[[0.5, 1.0]] * 4] * 4}, BadShape, 'past_key has 4 key/value heads, layer "decoder" has 2'),
        ({"past_value": [[[0.5]] * 4] * 2}, BadShape, 'past_value has 1 features a head, layer "decoder" has 2'),
        ({"past_value": [[[0.5, 1.0]] * 3] * 2}, BadShape, "past_value has 3 rows, past_key has 4"),
        ({"past_key": [[0.5, 1.0]] * 4}, BadShape, r"past_key must be \[Hkv, P, d\], no axis empty, got \[4, 2\]"),
        ({"past_key": [[], []]}, BadShape, r"past_key must be \[Hkv, P, d\], no axis empty, got \[2, 0\]"),
    ],
)
def test_a_past_has_the_axes_and_widths_of_the_layer(fields, kind, words):
    with pytest.raises(kind, match=words):
        check(PLAIN, rows=1, **{**PAST, **fields})


def test_a_past_of_other_sequences_is_refused():
    batch = {name: [past] * 2 for name, past in PAST.items()}
    assert check(PLAIN, query=[[ROW]] * 2, **batch).cost.tokens == 2 * 5
    with pytest.raises(BadShape, match="past_key has 2 sequences, query has 3"):
        check(PLAIN, query=[[ROW]] * 3, **batch)


def test_the_past_and_the_present_count_in_the_cost():
    plain, found = check(PLAIN, rows=1).cost, check(PLAIN, rows=1, **PAST, present=True).cost
    assert (found.tokens, found.cells) == (5, 4 * 5)
    assert found.input_bytes == plain.input_bytes + 2 * 2 * 4 * 2 * 4
    assert found.weights_bytes == 2 * 5 * (2 + 2) * 4
    # The past is projected already.
    keys = check(PLAIN, rows=1, key=[ROW] * 5).cost
    assert plain.flops < found.flops < keys.flops


def test_the_window_of_a_layer_is_a_mask_of_the_call():
    assert run_of(call(CAUSAL)) == [[0, 1], [0, 2], [0, 3]]
    assert run_of(call(CAUSAL, masks=[{"kind": "lengths", "values": 2}])) == [[0, 1], [0, 2], [0, 2]]
    assert run_of(call(CAUSAL, rows=1, **PAST, positions=[3], key_positions=[0, 1, 2, 3, 4])) == [[0, 4]]
    assert call(CAUSAL, layer_masks="none").mask is None
    near = dataclasses.replace(PLAIN, window=Window(1, 1))
    assert run_of(call(near, rows=4)) == [[0, 2], [0, 3], [1, 4], [2, 4]]


def test_a_causal_mask_starts_behind_the_past():
    assert run_of(call(PLAIN, rows=2, **PAST, masks=[{"kind": "causal"}])) == [[0, 5], [0, 6]]


def test_rows_before_all_keys_are_masked_rows():
    far = {"positions": [0, 5, 6], "key_positions": [5, 6, 7]}
    found = check(CAUSAL, **far)
    assert (found.masked_rows, found.is_counted) == (1, True)
    with pytest.raises(MaskedRow, match="query row 0 of sequence 0"):
        check(CAUSAL, **far, masked_rows="error")
    assert check(CAUSAL, masked_rows="error").masked_rows == 0


def test_keys_that_do_not_ascend_give_the_same_mask():
    """Left padding: the positions of padded keys are those of the first real ones."""
    spec = dataclasses.replace(PLAIN, window=Window(1, 0))
    found = call(spec, positions=[3, 1, 2], key_positions=[3, 1, 2]).mask
    assert isinstance(found, CombinedMask)
    blocked = found.lowered(0, torch.float32)[0] == -torch.inf
    assert blocked.tolist() == [[False, True, False], [True, False, True], [True, False, False]]


@pytest.mark.parametrize("limit", range(3), ids=["sequences", "tokens", "cells"])
def test_what_costs_too_much_is_refused_before_the_window_is_made(monkeypatch, limit):
    def made(*_: object) -> Run:
        raise AssertionError("the mask of a refused request was made")

    monkeypatch.setattr(masks, "window", made)
    monkeypatch.setattr(masks, "of_positions", made)
    limits = RequestLimits(*(2**62 if i != limit else 0 for i in range(5)))
    for fields in ({}, {"positions": [0, 1, 2]}):
        with pytest.raises(CostLimit):
            check(CAUSAL, limits=limits, **fields)


def test_a_relative_bias_and_explicit_scores_count_in_the_tables():
    """A relative bias is a table of every head, rows and keys; a softcap or sinks need the scores of a block."""
    batch = {"query": [[ROW] * 6] * 2}
    near = RelativeBias(8, 16, is_bidirectional=True)
    for spec, bytes_ in (({"relative_bias": near}, 4 * 6 * 6 * 4), ({"softcap": 1.0}, 4 * 4 * 6 * 6 * 4)):
        layer = dataclasses.replace(PLAIN, **spec)
        check(layer, limits=RequestLimits(*(2**62,) * 4, max_table_bytes=bytes_), **batch)
        with pytest.raises(CostLimit, match=f"needs {bytes_:,} bytes of tables"):
            check(layer, limits=RequestLimits(*(2**62,) * 4, max_table_bytes=bytes_ - 1), **batch)
        assert check(layer, **batch).cost.flops > check(PLAIN, **batch).cost.flops


def test_a_window_over_keys_that_do_not_ascend_makes_no_table_before_the_limits_are_checked():
    found = call(CAUSAL, rows=512, positions=[1] * 512, key_positions=[2, 1] * 256).mask
    assert found is not None
    assert sum(part.numel() for mask in found.masks for part in mask) == 3 * 512
