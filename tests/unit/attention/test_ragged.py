"""Ragged packing: split undoes pack, filler rows are zeros that nobody sees, and the row counts are the measured ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from service.attention.call import Call
from service.attention.projection import pack, padded_rows, padded_width, split
from tests.engine_room import DTYPES, make_layer, make_spec, randn, same_bits
from tests.strategies import seeds

shapes = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9)), min_size=1, max_size=6)


@given(shapes, st.integers(1, 19), st.integers(0, 15), st.sampled_from(DTYPES), seeds)
@settings(max_examples=150, deadline=None)
def test_split_undoes_pack_exactly(shapes, width, filler, dtype, seed):
    parts = [randn(*shape, width, seed=seed + i, dtype=dtype) for i, shape in enumerate(shapes)]
    rows = sum(b * length for b, length in shapes)
    packed = pack(parts, rows + filler, like=torch.empty(0, dtype=dtype))
    back = split(packed[:, :width], shapes)
    assert packed.shape == (rows + filler, padded_width(width))
    assert all(same_bits(one, other) for one, other in zip(parts, back, strict=True))
    assert not packed[rows:].any()
    assert not packed[:, width:].any()


@given(shapes, st.integers(1, 19), st.sampled_from(DTYPES))
@settings(max_examples=60, deadline=None)
def test_filler_rows_never_hold_old_memory(shapes, width, dtype):
    """A packed matrix made in memory full of NaN has none."""
    rows = sum(b * length for b, length in shapes) + 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", lambda self, *size: self.new_full(size, torch.nan))
        packed = pack([randn(*shape, width, dtype=dtype) for shape in shapes], rows, like=torch.empty(0, dtype=dtype))
    assert torch.isfinite(packed).all()


def test_a_layer_gives_the_same_results_in_memory_full_of_nan():
    """Nothing of the filler rows or the padded width reaches an answer."""
    layer, call = make_layer(make_spec(10, 2, head_width=3, value_head_width=3)), Call("layer", randn(1, 5, 10))
    clean = layer.forward([call])[0].output
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", lambda self, *size: self.new_full(size, torch.nan))
        assert same_bits(layer.forward([call])[0].output, clean)


def test_pack_accepts_non_contiguous_input_and_converts_the_dtype():
    wide = randn(2, 6, 8)
    parts = [wide[:, ::2, ::2], wide.transpose(1, 2)[:1, :, :4], wide[:, :1, :4].expand(2, 3, 4).double()]
    packed = pack(parts, 24, like=torch.empty(0, dtype=torch.float64))
    for part, back in zip(parts, split(packed, [part.shape[:2] for part in parts]), strict=True):
        assert same_bits(back, part.double())


def test_parts_do_not_share_memory_with_the_packed_matrix():
    part = randn(1, 12, 4)
    pack([part], 12, like=part).zero_()
    assert part.any()


@pytest.mark.parametrize(
    ("tokens", "least", "expected"),
    [(1, 4, 4), (5, 4, 8), (8, 4, 8), (1, 12, 12), (13, 12, 16), (1, 17, 20), (1, 4097, 4100), (4096, 12, 4096)],
)
def test_rows_are_rounded_up_to_a_multiple_of_four_and_to_the_minimum(tokens, least, expected):
    assert padded_rows(tokens, least) == expected


@pytest.mark.parametrize(("width", "expected"), [(1, 4), (3, 4), (4, 4), (5, 8), (384, 384), (511, 512)])
def test_an_inner_width_is_rounded_up_to_a_multiple_of_four(width, expected):
    assert padded_width(width) == expected
