"""Progress: a batch stops at its next point without harm to others; its pieces cover a sequence once."""

from __future__ import annotations

import math
import threading

import pytest
import torch

from service.attention import kernels
from service.attention.call import Call, WeightsWanted
from service.attention.kernels import MAX_WORK, Heads, attend, may_share
from service.attention.masks import CombinedMask, Sizes, causal
from service.attention.progress import Progress, Stopped, current, stop_point
from service.attention.projection import PIECE_ROWS, Plain
from tests.attention_fixtures import (
    DTYPES,
    blas_keeps_rows,
    make_layer,
    make_spec,
    randn,
    random_heads,
    same_answers,
    same_bits,
)


class StopsAt(Progress):
    """Is stopped before its n-th point, as by another thread."""

    def __init__(self, at: int) -> None:
        self._at, self._num_points = at, 0
        super().__init__()

    @property
    def num_points(self) -> int:
        return self._num_points

    @num_points.setter
    def num_points(self, value: int) -> None:
        self._num_points = value
        if value == self._at:
            self.stop()


def test_a_stop_point_outside_a_batch_does_nothing():
    stop_point()
    assert current() is None


def test_a_batch_counts_its_points_and_stops_at_the_next_one():
    with Progress() as progress:
        stop_point()
        stop_point()
        assert progress.num_points == 2
        progress.stop()
        with pytest.raises(Stopped):
            stop_point()
    assert current() is None


def test_each_thread_has_a_batch_of_its_own():
    found = []
    with Progress():
        thread = threading.Thread(target=lambda: found.append(current()))
        thread.start()
        thread.join()
    assert found == [None]


def test_stopping_raises_no_exception_that_handlers_catch():
    assert not issubclass(Stopped, Exception)


def large_calls() -> dict[str, Call]:
    sizes = Sizes(1, 3, 300, 300)
    query = randn(1, 300, 24)
    return {
        "plain": Call(query),
        "many sequences": Call(randn(40, 5, 24)),
        "causal": Call(query, mask=CombinedMask(sizes, (causal(sizes, 0),))),
        "weights": Call(query, weights=WeightsWanted("heads")),
        "top_k": Call(query, weights=WeightsWanted("top_k", 200)),
        "mean": Call(query, weights=WeightsWanted("mean", None, (2, 0), (299, 5, 131))),
        "float64": Call(query.double()),
        "cross": Call(query, randn(1, 400, 24, seed=1), randn(1, 400, 24, seed=2)),
    }


@pytest.mark.parametrize("name", large_calls())
def test_each_kind_of_batch_can_stop_in_many_places(monkeypatch, name):
    """Between passes, heads and blocks of rows; what it does until then changes no later answer."""
    monkeypatch.setattr(kernels, "MAX_WORK", 10**6)  # so that a small sequence is computed in pieces
    monkeypatch.setattr(kernels, "MAX_SMALL_SCORES", 0)
    call = large_calls()[name]
    layer = make_layer(make_spec(24, 3), torch.float64 if name == "float64" else torch.float32)
    with Progress() as whole:
        (expected,) = layer.forward([call])
    assert whole.num_points > 3
    for at in {1, whole.num_points // 2, whole.num_points}:
        with pytest.raises(Stopped), StopsAt(at) as progress:
            layer.forward([call])
        assert progress.num_points == at
    assert same_answers(layer.forward([call])[0], expected)


# Pieces


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes", [Sizes(1, 3, 700, 300), Sizes(1, 8, 65, 40), Sizes(1, 1, 1, 999), Sizes(1, 2, 513, 257)]
)
@pytest.mark.parametrize("most", [1, 10**6, 3 * 10**7])
def test_the_pieces_hold_each_row_of_each_head_once_and_give_the_same_answer(monkeypatch, dtype, sizes, most):
    heads = random_heads(sizes, dtype)
    whole = attend(heads, None, 0.3)
    monkeypatch.setattr(kernels, "MAX_WORK", most)
    monkeypatch.setattr(kernels, "MAX_SMALL_SCORES", 0)
    seen = torch.zeros(sizes.heads, sizes.queries, dtype=torch.int64)
    for some, rows in kernels._pieces(heads):
        seen[some, rows] += 1
    assert bool((seen == 1).all())
    mask = torch.zeros(1, sizes.queries, sizes.keys, dtype=torch.promote_types(dtype, torch.float32))
    mask[:, : sizes.queries // 2, 0] = -torch.inf if sizes.keys > 1 else 0.0
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 2e-2)
    torch.testing.assert_close(attend(heads, None, 0.3), whole, rtol=tolerance, atol=tolerance)
    monkeypatch.setattr(kernels, "MAX_WORK", math.inf)
    uncut = attend(heads, mask, 0.3)
    monkeypatch.setattr(kernels, "MAX_WORK", most)
    torch.testing.assert_close(attend(heads, mask, 0.3), uncut, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_zero_mask_and_the_order_of_heads_change_no_bit_of_the_pieces(monkeypatch, dtype):
    monkeypatch.setattr(kernels, "MAX_WORK", 10**6)
    monkeypatch.setattr(kernels, "MAX_SMALL_SCORES", 0)
    heads = random_heads(Sizes(1, 3, 600, 50), dtype)
    zeros = torch.zeros(3, 600, 50, dtype=torch.promote_types(dtype, torch.float32))
    assert same_bits(attend(heads, None, 0.3), attend(heads, zeros.to(dtype), 0.3))
    other = Heads(heads.q.flip(0).contiguous(), heads.k.flip(0).contiguous(), heads.v.flip(0).contiguous())
    assert same_bits(attend(heads, None, 0.3), attend(other, None, 0.3).flip(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sequences_computed_in_pieces_share_no_call(dtype):
    like = torch.zeros(1, dtype=dtype)
    assert not may_share((1, 512, 512), like)
    assert 2**18 * (1024 + kernels.SOFTMAX_WORK) > MAX_WORK, "this sequence is computed in pieces"
    layer = make_layer(make_spec(512, 1, biases=False), dtype)
    calls = [Call(randn(1, 512, 512, seed=seed)) for seed in range(2)]
    together = layer.forward(calls)
    assert all(same_answers(layer.forward([call])[0], answer) for call, answer in zip(calls, together, strict=True))


@pytest.mark.parametrize("rows", [2 * PIECE_ROWS - 4, 2 * PIECE_ROWS, 2 * PIECE_ROWS + 4, 5 * PIECE_ROWS + 1000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_plain_product_of_many_rows_equals_that_of_its_pieces(rows, dtype):
    plain = Plain(randn(36, 24, dtype=dtype), randn(36, seed=1, dtype=dtype))
    x = randn(rows, 24, seed=2, dtype=dtype)
    torch.testing.assert_close(plain(x, 4), torch.nn.functional.linear(x, plain.weight, plain.bias))
    if blas_keeps_rows():
        assert same_bits(plain(x, 4)[:1024], plain(x[:1024].clone(), 4))
