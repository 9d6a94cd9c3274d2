"""The request: what it costs is known before anything is made of it."""

from __future__ import annotations

from typing import Any

import pytest

from service.attention import masks
from service.errors import CostLimit
from service.wire.attend_request import CheckedRequest, RequestLimits, check_request
from service.wire.attention_request import check_attention
from tests.attention_fixtures import make_spec

SPEC = make_spec(8, 4)
PLENTY = RequestLimits(*(2**62,) * 5)
ROWS = [[0.5] * 8] * 6
# Apart they are as small as the query; their sum is a table of every head.
BY_ROW = {"kind": "bias", "values": [[[0.0]] * 6] * 4}
BY_KEY = {"kind": "bias", "values": [0.0] * 6}


def check(limits: RequestLimits = PLENTY, **fields: Any) -> CheckedRequest:
    return check_request({"query": ROWS, **fields}, "layer", SPEC, limits)


def limited(table_bytes: int) -> RequestLimits:
    return RequestLimits(*(2**62,) * 4, max_table_bytes=table_bytes)


def test_deadlines_and_shares_count_the_work_of_weights_and_masks():
    """A second pass costs, top_k more than a mean, all rows more than one; a mask costs what its table has."""
    weights = [None, {"form": "mean"}, {"form": "top_k", "k": 1}, {"form": "top_k", "k": 6}]
    costs = [check(weights=wanted).cost.flops for wanted in weights]
    assert costs == sorted(set(costs))
    assert check(masks=[BY_KEY]).cost.flops < check(masks=[BY_KEY, BY_ROW]).cost.flops


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("float16", 4), ("float64", 8)])
def test_mask_tables_are_counted_in_their_own_dtype(dtype, size):
    query = {"dtype": dtype, "shape": [6, 8], "data": [0.5] * 48}
    need = 4 * 6 * 6 * size
    check(limited(need), query=query, masks=[BY_ROW, BY_KEY])
    with pytest.raises(
        CostLimit, match=f"needs {need:,} bytes of tables for its masks and weights, expected at most {need - 1:,} "
    ):
        check(limited(need - 1), query=query, masks=[BY_ROW, BY_KEY])


def test_a_batch_needs_the_tables_of_one_sequence():
    batch = {"query": [ROWS] * 5, "masks": [{"kind": "causal"}]}
    check(limited(6 * 6 * 4), **batch)
    with pytest.raises(CostLimit):
        check(limited(6 * 6 * 4 - 1), **batch)


def test_the_workspace_of_weights_counts_with_the_masks():
    check(limited(0))
    with pytest.raises(CostLimit):
        check(limited(1000), weights={"form": "top_k", "k": 1})


@pytest.mark.parametrize("limit", range(4), ids=["sequences", "tokens", "cells", "returned"])
@pytest.mark.parametrize("route", ["layer", "attention"])
def test_a_request_whose_shapes_cost_too_much_is_refused_before_masks_are_made(monkeypatch, limit, route):
    """Offsets of its own for each sequence make a mask of 16 bytes a query row: 16 of them took 2 GiB with a body of 16 MiB."""

    def made(*_: object) -> None:
        raise AssertionError("a mask of a refused request was made")

    monkeypatch.setattr(masks, "window", made)
    limits = RequestLimits(*(2**62 if i != limit else 0 for i in range(5)))
    batch = {"query": [ROWS, ROWS], "masks": [{"kind": "causal", "offset": [0, 1]}], "weights": "heads"}
    requests = {
        "layer": lambda: check(limits, **batch),
        "attention": lambda: check_attention(
            {**batch, "key": [ROWS] * 2, "value": [ROWS] * 2, "layout": "bld"}, limits
        ),
    }
    with pytest.raises(CostLimit):
        requests[route]()


@pytest.mark.parametrize(
    ("sequences", "kinds", "is_counted"),
    [(1, 16, True), (60, 1, True), (64, 1, False), (4, 16, False), (1024, 1, False), (1024, 0, True)],
)
def test_masked_rows_of_many_short_sequences_are_counted_by_the_caller(sequences, kinds, is_counted):
    """Each sequence takes 10 to 20 µs a mask: 1,024 sequences of one row with 16 windows held the event loop for 160 ms."""
    request = check(query=[[[0.5] * 8]] * sequences, masks=[{"kind": "causal", "offset": -1}] * kinds)
    assert request.is_counted == is_counted
    assert request.counted().masked_rows == (sequences if kinds else 0)


def test_a_request_with_too_large_mask_tables_is_refused_before_its_rows_are_counted(monkeypatch):
    def looked_at(*_: object) -> None:
        raise AssertionError("the masks of a refused request were looked at")

    monkeypatch.setattr(masks, "_of_sequence", looked_at)
    with pytest.raises(CostLimit):
        check(limited(100), masks=[BY_ROW, BY_KEY])
