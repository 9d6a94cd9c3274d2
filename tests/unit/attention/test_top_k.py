"""Top k: equal to a stable descending sort for any ties and any k."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from service.attention import top_k
from tests import oracle
from tests.attention_fixtures import THREADS, randn, same_bits, torch_threads
from tests.strategies import seeds

TINY = float(np.finfo(np.float32).smallest_subnormal)
# Values of the rows: a few numbers give many ties, at zero, among denormals and at the top.
GRIDS = ([0.0], [0.0, 1.0], [0.0, 0.25, 0.5], [0.0, TINY, 2 * TINY, 3 * TINY], [TINY, 1e-30, 1.0], None)
wide_dtypes = st.sampled_from([torch.float32, torch.float64])


@settings(max_examples=400)
@given(st.data(), st.integers(1, 6), st.integers(1, 90), seeds, st.sampled_from(GRIDS), wide_dtypes)
def test_the_list_equals_that_of_a_stable_sort(data, num_rows, keys, seed, grid, dtype):
    """Values, indices and order; masked rows of zeros and rows of NaN among the others; in steps of any size."""
    rows = rows_of(num_rows, keys, seed, grid, dtype)
    rows[data.draw(st.lists(st.integers(0, num_rows - 1)))] = 0.0
    rows[data.draw(st.lists(st.integers(0, num_rows - 1), max_size=1))] = torch.nan
    k = data.draw(st.one_of(st.integers(1, keys), st.integers(1, max(1, keys // 4))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(top_k, "SORTED_CELLS", data.draw(st.integers(1, 300)))
        found = top_k.largest(rows.clone(), k)
    values, indices = rows.sort(dim=-1, descending=True, stable=True)
    assert same_bits(found.values, values[:, :k])
    assert torch.equal(found.indices, indices[:, :k])
    torch.testing.assert_close(found.rest, values[:, k:].sum(-1), rtol=1e-6, atol=0, equal_nan=True)
    assert (found.rest[~found.rest.isnan()] >= 0).all()


@settings(max_examples=150)
@given(st.data(), st.integers(1, 5), st.integers(4, 60), seeds, st.sampled_from(GRIDS))
def test_choosing_sorting_and_the_reference_agree(data, num_rows, keys, seed, grid):
    """For every k, with MAX_CHOSEN_SHARE so low that every row is sorted and so high that none is."""
    rows = rows_of(num_rows, keys, seed, grid, torch.float64)
    k = data.draw(st.integers(1, keys - 1))
    values, indices, rest = oracle.top_k(rows.numpy(), k)
    for share in (0.0, 1.0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(top_k, "MAX_CHOSEN_SHARE", share)
            found = top_k.largest(rows.clone(), k)
        np.testing.assert_array_equal(found.values.numpy(), values)
        np.testing.assert_array_equal(found.indices.numpy(), indices)
        np.testing.assert_allclose(found.rest.numpy(), rest, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("keys", [7, 4700, 40_000])
def test_a_row_has_the_same_bits_alone_and_beside_others(keys, threads):
    """Its rest too, in rows so long that torch would sum them in parts on two threads."""
    rows = randn(9, keys).softmax(-1)
    with torch_threads(threads):
        together = top_k.largest(rows.clone(), 3)
        for i in range(len(rows)):
            alone = top_k.largest(rows[i : i + 1].clone(), 3)
            assert all(same_bits(one, every[i : i + 1]) for one, every in zip(alone, together, strict=True))


def test_a_masked_row_lists_the_first_keys_with_a_rest_of_zero():
    found = top_k.largest(torch.zeros(2, 50), 3)
    assert found.indices.tolist() == [[0, 1, 2]] * 2
    assert not found.values.any()
    assert not found.rest.any()


def rows_of(num_rows: int, keys: int, seed: int, grid: list[float] | None, dtype: torch.dtype) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    values = rng.random((num_rows, keys)) if grid is None else rng.choice(grid, (num_rows, keys))
    return torch.from_numpy(values).to(dtype)
