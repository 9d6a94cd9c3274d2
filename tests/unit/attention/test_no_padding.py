"""P3: no work is done for positions that do not exist, counted at torch's own functions."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from service.attention import projection
from service.attention.call import Call
from service.attention.masks import CombinedMask, Sizes, causal
from service.attention.progress import Progress
from tests.attention_fixtures import DTYPES, THREADS, make_layer, make_spec, randn, torch_threads

LENGTHS = (1, 500, 3, 64, 7, 7, 129)


@pytest.fixture
def counted(monkeypatch):
    """Rows of every product, and heads, query rows and key rows of every attention call, as they happen."""
    rows: list[int] = []
    shapes: list[tuple[int, int, int]] = []
    linear, attention, scores = functional.linear, functional.scaled_dot_product_attention, torch.baddbmm

    def counting_linear(x, *args):
        rows.append(x.shape[0])
        return linear(x, *args)

    def counting_attention(q, k, v, **kwargs):
        shapes.append((q.shape[0] * q.shape[1], q.shape[2], k.shape[2]))
        return attention(q, k, v, **kwargs)

    def counting_scores(table, q_MLH, k_MHS, **kwargs):
        shapes.append((q_MLH.shape[0], q_MLH.shape[1], k_MHS.shape[2]))
        return scores(table, q_MLH, k_MHS, **kwargs)

    def counting_piece(self, x):
        pieces.append(x.shape[0])
        return piece(self, x)

    def counting_packed(self, x, *args):
        """One product, in however many pieces."""
        pieces.clear()
        found = product(self, x, *args)
        rows.append(sum(pieces))
        return found

    pieces: list[int] = []
    piece, product = projection.Packed._product, projection.Packed.__call__
    monkeypatch.setattr(projection.Packed, "_product", counting_piece)
    monkeypatch.setattr(projection.Packed, "__call__", counting_packed)
    monkeypatch.setattr(functional, "linear", counting_linear)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", counting_attention)
    monkeypatch.setattr(torch, "baddbmm", counting_scores)
    return rows, shapes


@pytest.fixture
def plain(monkeypatch):
    """As on a machine without oneDNN's product."""
    monkeypatch.setattr(projection, "has_packed_product", lambda: False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_have_the_rows_of_all_sequences_and_at_most_three_more(counted, dtype):
    """711 tokens of very unequal lengths: 712 rows a product, where padding would make it 3,500."""
    rows, _ = counted
    layer = make_layer(make_spec(64, 4), dtype)
    with Progress() as progress:
        layer.forward([Call(randn(1, length, 64)) for length in LENGTHS])
    tokens = sum(LENGTHS)
    assert tokens == 711
    # Query, key and value in one product where that gives the same bits, then the output.
    assert rows == [712] * (4 if dtype == torch.float64 else 2)
    assert progress.filler_rows == len(rows)


@pytest.mark.parametrize("threads", THREADS)
def test_no_attention_call_has_more_rows_than_its_sequences(counted, threads):
    """With one thread, sequences of one length share a call. None is padded to the length of another."""
    _, shapes = counted
    calls = [Call(randn(1, length, 64)) for length in LENGTHS]
    calls.append(Call(randn(3, 5, 64), randn(3, 11, 64)))
    sizes = Sizes(1, 4, 9, 9)
    calls.append(Call(randn(1, 9, 64), mask=CombinedMask(sizes, (causal(sizes, 0),))))
    with torch_threads(threads):
        make_layer(make_spec(64, 4)).forward(calls)
    same_length = (
        [(1, 1), (1, 3), (2, 7), (1, 64), (1, 129), (1, 500)] if threads == 1 else [(1, length) for length in LENGTHS]
    )
    groups = [(count, length, length) for count, length in same_length] + [(1, 9, 9)] + [(1, 5, 11)] * 3
    assert sorted(shapes) == sorted((4 * count, queries, keys) for count, queries, keys in groups)


def test_cross_attention_packs_queries_and_keys_separately(counted):
    """Four queries over 100 keys and 40 over 3: neither side is padded to the other."""
    rows, _ = counted
    calls = [Call(randn(1, a, 8), randn(1, b, 8)) for a, b in ((4, 100), (40, 3))]
    make_layer(make_spec(8, 2)).forward(calls)
    assert rows == [44, 104, 104, 44]


@pytest.mark.skipif(not projection.has_packed_product(), reason="torch has no oneDNN here")
def test_a_single_token_costs_four_rows_and_reports_them(counted):
    """Filler rows are counted, so that the metrics can show them."""
    rows, _ = counted
    layer = make_layer(make_spec(64, 4))
    with Progress() as progress:
        layer.forward([Call(randn(1, 1, 64))])
    assert rows == [4, 4]
    assert progress.filler_rows == 6


@pytest.mark.skipif(not projection.has_packed_product(), reason="torch has no oneDNN here")
def test_a_layer_without_an_output_projection_counts_no_filler_for_it(counted):
    rows, _ = counted
    layer = make_layer(make_spec(64, 4, has_output=False))
    with Progress() as progress:
        layer.forward([Call(randn(1, 1, 64))])
    assert rows == [4]
    assert progress.filler_rows == 3


@pytest.mark.usefixtures("plain")
def test_a_single_token_costs_twelve_rows_with_the_product_of_torch(counted):
    rows, _ = counted
    layer = make_layer(make_spec(64, 4))
    with Progress() as progress:
        layer.forward([Call(randn(1, 1, 64))])
    assert rows == [12, 12]
    assert progress.filler_rows == 22


@pytest.mark.usefixtures("plain")
def test_a_small_16_bit_layer_needs_more_filler_with_the_product_of_torch(counted):
    rows, _ = counted
    make_layer(make_spec(8, 2), torch.bfloat16).forward([Call(randn(1, 1, 8))])
    # The output projection has 64 weights: 65 x 64 is the first product above 4,096, and 68 the next multiple of 4.
    assert rows == [68, 68]
