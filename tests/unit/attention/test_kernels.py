"""Kernels: how a sequence is computed, and that other sequences of its call do not change its bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from service.attention import kernels
from service.attention.kernels import Heads
from service.attention.masks import Sizes
from tests.attention_fixtures import DTYPES, randn, random_heads, same_bits, torch_threads
from tests.strategies import seeds


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sequences_that_may_share_a_call_keep_their_bits(dtype):
    """Below, at and above the lengths of the kernel's blocks of queries and keys."""
    lengths = st.one_of(st.integers(1, 70), st.sampled_from([127, 128, 191, 192, 200, 256, 257]))

    @settings(max_examples=150)
    @given(
        lengths,
        st.integers(1, 6),
        st.sampled_from([1, 2, 3, 4, 8, 12]),
        st.sampled_from([1, 2, 4, 8, 16, 32, 33, 64]),
        seeds,
    )
    def check(length: int, count: int, num_heads: int, width: int, seed: int) -> None:
        shape = (num_heads, length, width)
        rows = randn(count * length, 3 * num_heads * width, seed=seed).to(dtype)
        if not kernels.may_share(shape, rows):
            return
        together = rows.new_empty(len(rows), num_heads * width)
        kernels.attend_same_length(rows.chunk(3, dim=1), num_heads, length, 0.3, together)
        for one, found in zip(rows.split(length), together.split(length), strict=True):
            heads = [by_heads(x, num_heads).contiguous() for x in one.chunk(3, dim=1)]
            alone = kernels.attend(Heads(*heads), None, 0.3).transpose(0, 1).flatten(1)
            assert same_bits(found, alone)

    with torch_threads(1):
        check()


def test_a_small_sequence_is_unmasked_in_float32_or_float64_and_has_few_scores():
    """8 heads of 256 x 256 are 2^19 scores."""
    most, mask = Sizes(1, 8, 256, 256), torch.zeros(1, 1, 256)
    assert kernels.is_small(random_heads(most, torch.float32), None, 8)
    assert kernels.is_small(random_heads(most, torch.float64), None, 8)
    assert not kernels.is_small(random_heads(most._replace(keys=257), torch.float32), None, 8)
    assert not kernels.is_small(random_heads(most, torch.float32), mask, 8)
    assert not kernels.is_small(random_heads(most, torch.bfloat16), None, 8)
    # Two sequences of four heads: each is small by itself.
    assert kernels.is_small(random_heads(Sizes(1, 8, 300, 300), torch.float32), None, 4)


def test_a_shared_call_has_an_axis_of_sequences_and_an_axis_of_heads(monkeypatch):
    """CUDA's kernels take at most 65,535 on the axis of heads; torch splits only the axis of sequences."""
    shapes = []

    def attention(q, k, v, **kwargs):
        shapes.append(tuple(q.shape))
        return torch.empty_like(q)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", attention)
    columns = [torch.empty(2048, 256, device="meta") for _ in range(3)]
    kernels.attend_same_length(columns, 32, 1, 0.3, torch.empty(2048, 256, device="meta"))
    assert shapes == [(2048, 32, 1, 8)]


def test_heads_of_width_one_share_no_call():
    """A single such head is multiplied as a vector, which rounds differently from a matrix."""
    with torch_threads(1):
        assert not kernels.may_share((1, 32, 1), torch.zeros(1))
        assert kernels.may_share((1, 32, 2), torch.zeros(1))


def test_sequences_share_a_call_only_in_one_thread_and_if_each_begins_aligned():
    """A sequence of 2 x 1 x 8 floats takes 64 bytes, so the next one begins aligned; one of 3 x 1 x 8 does not."""
    like = torch.zeros(1)
    with torch_threads(1):
        assert kernels.may_share((2, 1, 8), like)
        assert not kernels.may_share((3, 1, 8), like)
        assert kernels.may_share((3, 2, 8), like)
        assert not kernels.may_share((3, 2, 8), like.half())
    with torch_threads(2):
        assert not kernels.may_share((2, 1, 8), like)


def by_heads(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows [R, D] as a view [N, R, D/N]."""
    rows: torch.Tensor = x.unflatten(-1, (num_heads, -1))
    return rows.transpose(0, 1)
