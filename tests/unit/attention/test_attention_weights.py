"""Attention weights of one sequence: any selection of them, their rows, and their agreement with the output."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from service.attention import kernels
from service.attention.attention_weights import BLOCK_ROWS, MAX_CELLS, attend_with_extras, extras_alone
from service.attention.call import Call, TopK, WeightsWanted
from service.attention.kernels import Heads
from service.attention.masks import Sizes
from tests import oracle
from tests.attention_fixtures import (
    DTYPES,
    Allocations,
    engine_mask,
    every_thread_count,
    full_weights,
    make_layer,
    make_spec,
    randn,
    random_heads,
    same_bits,
    same_weights,
    torch_threads,
)
from tests.strategies import extras_wanted, masks_for, seeds, weights_wanted

heads_wanted = WeightsWanted("heads")


def attention_weights(heads, mask, scale, wanted: WeightsWanted):
    """The weights that `attend_with_extras` returns beside the output, without the B axis."""
    _, found = output_and_weights(heads, mask, scale, wanted)
    return TopK(*(part[0] for part in found)) if isinstance(found, TopK) else found[0]


def output_and_weights(heads, mask, scale, wanted: WeightsWanted) -> tuple[torch.Tensor, torch.Tensor | TopK]:
    matrix = randn(5, len(heads.v) * heads.v.shape[2], seed=9)
    output, found = attend_with_extras(heads, mask, scale, Call(torch.empty(0), weights=wanted), matrix)
    assert found is not None
    assert found.weights is not None
    return output, found.weights


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_thread_count
def test_a_selection_is_bit_for_bit_the_slice_of_the_full_answer(dtype, threads):
    """Heads, query rows, mean and top_k, over lengths beyond one block of rows, with any masks."""
    length = st.one_of(st.integers(1, 20), st.sampled_from([127, 128, 129, 150, 260]))

    @settings(max_examples=50)
    @given(st.data(), st.integers(1, 5), length, length, seeds)
    def check(data: st.DataObject, num_heads: int, queries: int, keys: int, seed: int) -> None:
        sizes = Sizes(1, num_heads, queries, keys)
        combined = engine_mask(data.draw(masks_for(sizes, max_masks=2)), sizes)
        mask = None if combined is None else combined.lowered(0, torch.promote_types(dtype, torch.float32))
        heads = random_heads(sizes, dtype, seed)
        wanted = data.draw(weights_wanted(sizes))
        exact = torch.promote_types(dtype, torch.float32)
        all_heads = WeightsWanted("contributions" if wanted.form == "contributions" else "heads", dtype=exact)
        full = attention_weights(heads, mask, 0.3, all_heads)
        assert isinstance(full, torch.Tensor)
        found = attention_weights(heads, mask, 0.3, dataclasses.replace(wanted, dtype=exact))
        assert same_weights(found, sliced(full, wanted))
        every = attention_weights(heads, mask, 0.3, WeightsWanted(wanted.form, wanted.k, wanted.heads, dtype=exact))
        found = attention_weights(heads, mask, 0.3, wanted)
        assert same_weights(found, rows_of(every, wanted))

    with torch_threads(threads):
        check()


def sliced(full: torch.Tensor, wanted: WeightsWanted):
    """Return what `wanted` selects, by plain indexing of all weights [N, L, S]."""
    chosen = list(range(len(full)) if wanted.heads is None else wanted.heads)
    rows = list(range(full.shape[1]) if wanted.queries is None else wanted.queries)
    if wanted.form in ("heads", "contributions"):
        return full[chosen][:, rows]
    if wanted.form == "mean":
        total = torch.zeros_like(full[0])
        for head in sorted(chosen):
            total = total + full[head]
        return (total / len(chosen))[rows]
    assert wanted.k is not None
    part = full[chosen][:, rows]
    values, indices, _ = oracle.top_k(part.numpy(), wanted.k)
    listed = torch.from_numpy(indices)
    return TopK(torch.from_numpy(values), listed.int(), part.scatter(-1, listed, 0.0).sum(-1))


def rows_of(weights, wanted: WeightsWanted):
    """Return the requested query rows, in the requested dtype, of an answer that has all rows."""
    rows = slice(None) if wanted.queries is None else list(wanted.queries)
    if isinstance(weights, TopK):
        return TopK(
            weights.values[:, rows].to(wanted.dtype), weights.indices[:, rows], weights.rest[:, rows].to(wanted.dtype)
        )
    return weights[..., rows, :].to(wanted.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_thread_count
def test_output_and_weights_together_equal_each_alone(dtype, threads):
    """Both below and above the limit for small sequences."""

    @settings(max_examples=60)
    @given(st.data(), st.integers(1, 40), st.integers(1, 40), seeds)
    def check(data: st.DataObject, queries: int, keys: int, seed: int) -> None:
        sizes = Sizes(1, 3, queries, keys)
        combined = engine_mask(data.draw(masks_for(sizes, max_masks=1)), sizes)
        mask = None if combined is None else combined.lowered(0, torch.promote_types(dtype, torch.float32))
        heads, wanted = random_heads(sizes, dtype, seed), data.draw(weights_wanted(sizes))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "MAX_SMALL_SCORES", data.draw(st.sampled_from([600, kernels.MAX_SMALL_SCORES])))
            alone = kernels.attend(heads, mask, 0.3).clone()
            output, weights = output_and_weights(heads, mask, 0.3, wanted)
            assert same_bits(output, alone)
            assert same_weights(weights, output_and_weights(heads, mask, 0.3, wanted)[1])

    with torch_threads(threads):
        check()


@settings(max_examples=60)
@given(st.data(), st.integers(1, 40), st.integers(1, 40), seeds, st.sampled_from(DTYPES))
def test_what_else_a_call_requests_changes_no_bit_of_a_result(data, queries, keys, seed, dtype):
    sizes = Sizes(1, 3, queries, keys)
    heads, fields = random_heads(sizes, dtype, seed), data.draw(extras_wanted(sizes))
    combined = engine_mask(data.draw(masks_for(sizes, max_masks=1)), sizes)
    mask = None if combined is None else combined.lowered(0, torch.promote_types(dtype, torch.float32))

    def found(**asked: Any) -> dict[str, Any]:
        extras = attend_with_extras(heads, mask, 0.3, Call(torch.empty(0), **asked))[1]
        assert extras is not None
        return extras._asdict()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "MAX_SMALL_SCORES", data.draw(st.sampled_from([600, kernels.MAX_SMALL_SCORES])))
        together = found(**fields)
        for field, value in fields.items():
            name = field.removeprefix("has_")
            assert same_weights(found(**{field: value})[name], together[name])
        returned = {name for name, value in together.items() if value is not None}
        assert returned == {field.removeprefix("has_") for field in fields}


def test_selecting_the_largest_weights_changes_no_bit_of_the_entropy():
    heads = random_heads(Sizes(1, 3, 5, 7), torch.float32)
    calls = [Call(torch.empty(0), weights=wanted, has_entropy=True) for wanted in (None, WeightsWanted("top_k", k=1))]
    plain, selecting = (attend_with_extras(heads, None, 0.3, call)[1] for call in calls)
    assert plain is not None
    assert selecting is not None
    assert same_weights(plain.entropy, selecting.entropy)


@settings(max_examples=150)
@given(
    st.data(),
    st.builds(Sizes, st.just(1), st.integers(1, 4), st.integers(1, 40), st.integers(1, 40)),
    seeds,
    st.sampled_from(DTYPES),
)
def test_rows_of_weights_sum_to_one_or_are_exactly_zero(data, sizes, seed, dtype):
    """Masked columns are exactly zero."""
    drawn = data.draw(masks_for(sizes))
    combined = engine_mask(drawn, sizes)
    mask = None if combined is None else combined.lowered(0, torch.promote_types(dtype, torch.float32))
    weights = attention_weights(random_heads(sizes, dtype, seed), mask, 1.0, heads_wanted)
    assert isinstance(weights, torch.Tensor)
    allowed = torch.from_numpy(oracle.may_attend(drawn, tuple(sizes))[0])
    alive = allowed.any(-1)
    assert weights.dtype == torch.float32
    assert ((weights.sum(-1) - 1).abs() <= 1e-6)[alive].all()
    assert not weights[~alive].any()
    assert not weights[~allowed].any()
    assert ((weights >= 0) & (weights <= 1)).all()


@settings(max_examples=80)
@given(
    st.data(),
    st.builds(Sizes, st.just(1), st.integers(1, 3), st.integers(1, 30), st.integers(1, 30)),
    seeds,
)
def test_the_weights_reproduce_the_output(data, sizes, seed):
    """The fast kernel and the second pass agree: weights times values is what `attend` returns."""
    combined = engine_mask(data.draw(masks_for(sizes)), sizes)
    mask = None if combined is None else combined.lowered(0, torch.float64)
    heads = random_heads(sizes, torch.float64, seed)
    wanted = WeightsWanted("heads", dtype=torch.float64)
    weights = attention_weights(heads, mask, 0.4, wanted)
    assert isinstance(weights, torch.Tensor)
    torch.testing.assert_close(kernels.attend(heads, mask, 0.4), weights @ heads.v, rtol=1e-12, atol=1e-12)


def test_top_k_breaks_ties_by_the_lower_index():
    """With equal keys it returns the first k, in order; the rest is the sum of the others."""
    heads = Heads(torch.ones(2, 3, 4), torch.ones(2, 8, 4), torch.ones(2, 8, 4))
    top = attention_weights(heads, None, 1.0, WeightsWanted("top_k", k=3))
    assert isinstance(top, TopK)
    assert top.indices.dtype == torch.int32
    assert top.indices.flatten(0, 1).tolist() == [[0, 1, 2]] * 6
    assert (top.values == 0.125).all()
    assert (top.rest == 0.625).all()


def test_top_k_with_equal_keys_and_a_mask_lists_allowed_keys_first():
    heads = Heads(
        torch.ones(1, 2, 4), torch.tensor([0.0, 1, 1, 0, 1, 1]).view(1, 6, 1).expand(1, 6, 4), torch.ones(1, 6, 4)
    )
    mask = torch.tensor([[0, -torch.inf, 0, 0, 0, 0], [-torch.inf] * 6])[None]
    top = attention_weights(heads, mask, 1.0, WeightsWanted("top_k", k=6))
    assert isinstance(top, TopK)
    assert top.indices[0].tolist() == [[2, 4, 5, 0, 3, 1], [0, 1, 2, 3, 4, 5]]
    assert top.values[0, 0, 5] == 0
    assert not top.values[0, 1].any()
    assert not top.rest.any(), "k = S leaves nothing, and a masked row has nothing"


@settings(max_examples=60)
@given(st.integers(1, 60), st.data(), seeds)
def test_top_k_and_its_rest_sum_to_the_row(keys, data, seed):
    sizes = Sizes(1, 2, 5, keys)
    k = data.draw(st.integers(1, keys))
    top = attention_weights(random_heads(sizes, torch.float32, seed), None, 1.0, WeightsWanted("top_k", k=k))
    assert isinstance(top, TopK)
    assert (top.rest >= 0).all()
    assert ((top.values.sum(-1) + top.rest - 1).abs() < 1e-6).all()
    assert (top.values.diff(dim=-1) <= 0).all()
    assert all(len(set(row)) == k for row in top.indices.flatten(0, 1).tolist())


def test_a_mean_does_not_depend_on_the_order_of_the_requested_heads():
    heads = random_heads(Sizes(1, 5, 6, 7), torch.float32)
    means = [
        attention_weights(heads, None, 1.0, WeightsWanted("mean", heads=order))
        for order in ((4, 0, 2), (0, 2, 4), (2, 4, 0))
    ]
    assert all(same_weights(means[0], mean) for mean in means)


def test_weights_in_float16_are_the_rounded_float32_ones():
    heads = random_heads(Sizes(1, 2, 9, 30), torch.float32)
    narrow = attention_weights(heads, None, 1.0, WeightsWanted("heads", dtype=torch.float16))
    wide = attention_weights(heads, None, 1.0, heads_wanted)
    assert isinstance(narrow, torch.Tensor)
    assert isinstance(wide, torch.Tensor)
    assert same_bits(narrow, wide.half())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_of_a_16_bit_layer_are_computed_in_float32(dtype):
    heads = random_heads(Sizes(1, 2, 9, 30), dtype)
    wide = Heads(*(x.float() for x in heads))
    assert same_weights(
        attention_weights(heads, None, 0.5, heads_wanted),
        attention_weights(wide, None, 0.5, heads_wanted),
    )


@pytest.mark.parametrize("form", ["heads", "contributions"])
def test_a_few_rows_of_a_long_sequence_allocate_no_more_than_one_block(form):
    """Two rows of one head of 4,096 x 4,096 scores, with a mask: no allocation has the size of a head's or mask's full table."""
    sizes, rows = Sizes(1, 8, 4096, 4096), (1, 4000)
    heads = random_heads(sizes, torch.float32, width=4)
    mask = torch.zeros(1, 1, 1).expand(8, 4096, 4096)
    with Allocations() as made:
        attention_weights(heads, mask, 1.0, WeightsWanted(form, heads=(1,), queries=rows))
    assert 0 < max(made.sizes) <= BLOCK_ROWS * 4096


def test_the_entropy_of_a_long_sequence_allocates_no_more_than_one_block():
    heads = random_heads(Sizes(1, 8, 1024, 4096), torch.float32, width=4)
    with Allocations() as made:
        extras_alone(heads, None, 1.0, Call(torch.empty(0), has_entropy=True), None)
    assert 0 < max(made.sizes) <= max(BLOCK_ROWS * 4096, MAX_CELLS)


@pytest.mark.parametrize("form", ["mean", "top_k"])
def test_the_workspace_does_not_grow_with_the_number_of_heads(form):
    """64 heads of 128 x 512: no allocation exceeds two heads, and no whole row is sorted."""
    sizes = Sizes(1, 64, BLOCK_ROWS, 512)
    heads, wanted = random_heads(sizes, torch.float32, width=4), WeightsWanted(form, k=2 if form == "top_k" else None)
    with pytest.MonkeyPatch.context() as patch, Allocations() as made:
        patch.setattr("service.attention.attention_weights.MAX_CELLS", 2 * BLOCK_ROWS * 512)
        attention_weights(heads, None, 1.0, wanted)
    assert max(made.sizes) <= 2 * BLOCK_ROWS * 512
    assert all(keys <= 2 for keys in made.sorted_keys)


@settings(max_examples=40)
@given(st.data(), st.integers(1, 7), st.integers(1, 150), st.integers(1, 40), st.sampled_from(DTYPES), seeds)
def test_bits_do_not_depend_on_how_many_heads_are_computed_together(data, num_heads, queries, keys, dtype, seed):
    sizes = Sizes(1, num_heads, queries, keys)
    combined = engine_mask(data.draw(masks_for(sizes, max_masks=2)), sizes)
    mask = None if combined is None else combined.lowered(0, torch.promote_types(dtype, torch.float32))
    heads, wanted = random_heads(sizes, dtype, seed), data.draw(weights_wanted(sizes))
    together = attention_weights(heads, mask, 0.3, wanted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("service.attention.attention_weights.MAX_CELLS", 1)
        assert same_weights(attention_weights(heads, mask, 0.3, wanted), together)


def test_weights_include_the_columns_that_a_layer_appends():
    """bias_k and the zeros come after the caller's keys; a mask does not block them."""
    spec = make_spec(12, 3, has_bias_kv=True, add_zero_attn=True)
    sizes = Sizes(1, 3, 4, 5)
    mask = engine_mask([oracle.Attend(np.zeros((1, 1, 1, 5), bool))], sizes)
    call = Call(randn(1, 4, 12), randn(1, 5, 12, seed=1), mask=mask, weights=heads_wanted)
    weights = full_weights(make_layer(spec).forward([call])[0])
    assert weights.shape == (1, 3, 4, 7)
    assert not weights[..., :5].any()
    torch.testing.assert_close(weights[..., 5:].sum(-1), torch.ones(1, 3, 4))
