"""Masks: every kind allows what it means, and masks of equal meaning give the same bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from service.attention import masks
from service.attention.call import Call, WeightsWanted
from service.attention.masks import CombinedMask, Mask, Sizes, masked_rows
from service.attention.spec import Window
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
    same_answers,
    same_bits,
    torch_threads,
)
from tests.strategies import masks_for, seeds

small_sizes = st.builds(Sizes, st.integers(1, 3), st.integers(1, 3), st.integers(1, 9), st.integers(1, 9))


@settings(max_examples=300)
@given(st.data(), small_sizes)
def test_every_combination_of_masks_allows_what_the_reference_allows(data, sizes):
    """Any masks of any kinds, any axis whole or 1, offsets far out of range."""
    drawn = data.draw(masks_for(sizes))
    combined = engine_mask(drawn, sizes)
    expected = oracle.may_attend(drawn, tuple(sizes))
    bias = oracle.added_bias(drawn, tuple(sizes))
    for b in range(sizes.sequences):
        for found in (
            ([combined.lowered(b, torch.float64), combined.of_sequence(b).lowered(0, torch.float64)])
            if combined
            else []
        ):
            whole = found.expand(*expected[b].shape)
            allowed = whole if found.dtype == torch.bool else whole != -torch.inf
            np.testing.assert_array_equal(allowed.numpy(), expected[b])
            if found.dtype != torch.bool:
                np.testing.assert_allclose(whole.numpy()[expected[b]], bias[b][expected[b]], rtol=1e-12, atol=1e-15)


@settings(max_examples=200)
@given(st.data(), small_sizes, st.integers(1, 40))
def test_masked_rows_have_no_allowed_key_in_some_head(data, sizes, step_cells):
    """For any size of a step; each step is a run of rows, and all steps together are the B x L rows."""
    drawn = data.draw(masks_for(sizes))
    combined = engine_mask(drawn, sizes) or CombinedMask(sizes, ())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masks, "STEP_CELLS", step_cells)
        steps = list(masked_rows(combined))
    alive = oracle.may_attend(drawn, tuple(sizes)).max(-1)
    assert torch.cat(steps).tolist() == (~alive.min(1)).flatten().tolist()


@settings(max_examples=60)
@given(st.data(), small_sizes, seeds)
def test_a_missing_mask_a_true_mask_and_a_zero_bias_are_equal(data, sizes, seed):
    layer, call = _layer_and_call(data, sizes, seed)
    ones = torch.ones(tuple(sizes), dtype=torch.bool)
    same: list[Mask] = [
        masks.Allowed(ones),
        masks.Allowed(ones[:1, :1, :1, :1]),
        masks.ignore(~ones),
        masks.Added(torch.zeros(1, 1, 1, sizes.keys)),
        masks.Added(torch.zeros(tuple(sizes), dtype=torch.float64)),
        masks.lengths(torch.full((1, 1), sizes.keys)),
        masks.window(sizes, 0, None, None),
        masks.causal(sizes, 10**30),
    ]
    _assert_all_the_same(layer, call, [None, *(_combined(sizes, mask) for mask in same)])


@settings(max_examples=80)
@given(st.data(), small_sizes, seeds)
def test_equivalent_lengths_attend_ignore_and_bias_give_the_same_bits(data, sizes, seed):
    """Per sequence and per row; broadcast or expanded; as one mask or as two that are and-ed."""
    layer, call = _layer_and_call(data, sizes, seed)
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, sizes.keys + 1, (sizes.sequences, data.draw(st.sampled_from([1, sizes.queries]))))
    lengths = torch.from_numpy(rows)
    true = torch.arange(sizes.keys) < lengths[:, None, :, None]
    minus = torch.where(true, 0.0, -torch.inf)
    half = torch.from_numpy(rng.random(true.shape) < 0.5)
    same: list[tuple[Mask, ...]] = [
        (masks.lengths(lengths),),
        (masks.Allowed(true),),
        (masks.Allowed(true.expand(tuple(sizes))),),
        (masks.Allowed(true.expand(tuple(sizes)).contiguous()),),
        (masks.ignore(~true),),
        (masks.Added(minus),),
        (masks.Added(minus.double().expand(tuple(sizes)).contiguous()),),
        (masks.Allowed(true | half), masks.ignore(~(true | ~half))),
        (masks.lengths(lengths), masks.lengths(torch.full((1, 1), sizes.keys)), masks.Allowed(true)),
        (masks.lengths(lengths), masks.Added(minus), masks.Added(torch.zeros(1, 1, 1, 1))),
    ]
    _assert_all_the_same(layer, call, [CombinedMask(sizes, ways) for ways in same])


@settings(max_examples=80)
@given(st.data(), small_sizes, seeds)
def test_causal_and_window_give_the_bits_of_the_same_mask_as_a_table(data, sizes, seed):
    layer, call = _layer_and_call(data, sizes, seed)
    offset = data.draw(st.integers(-sizes.queries - 2, sizes.keys + 2))
    left = data.draw(st.one_of(st.none(), st.integers(0, sizes.keys + 2)))
    i, j = torch.arange(sizes.queries)[:, None], torch.arange(sizes.keys)
    causal, near = j <= i + offset, torch.ones_like(j <= i) if left is None else j >= i + offset - left
    counts = (torch.arange(sizes.queries) + offset + 1).clamp(0, sizes.keys)[None]
    same: list[tuple[Mask, ...]] = [
        (masks.window(sizes, offset, left, 0),),
        (masks.causal(sizes, offset), masks.window(sizes, offset, left, None)),
        (masks.Allowed((causal & near)[None, None]),),
        (masks.ignore(~causal[None, None]), masks.Allowed(near[None, None])),
        (masks.lengths(counts), masks.Allowed(near[None, None])),
        (masks.Added(torch.where(causal & near, 0.0, -torch.inf)[None, None].expand(tuple(sizes))),),
    ]
    _assert_all_the_same(layer, call, [CombinedMask(sizes, ways) for ways in same])


@every_thread_count
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [65, 130, 513])
def test_equivalent_masks_give_the_same_bits_for_long_sequences(size, dtype, threads):
    """Longer than the blocks of the kernels."""
    sizes = Sizes(1, 2, size, size)
    true = torch.tril(torch.ones(size, size, dtype=torch.bool))[None, None]
    layer = make_layer(make_spec(16, 2), dtype)
    call = Call(randn(1, size, 16, dtype=torch.float64 if dtype == torch.float64 else torch.float32))
    written: list[Mask] = [
        masks.causal(sizes, 0),
        masks.Allowed(true),
        masks.Allowed(true.expand(tuple(sizes)).contiguous()),
        masks.Added(torch.where(true, 0.0, -torch.inf)),
        masks.lengths(torch.arange(1, size + 1)[None]),
    ]
    with torch_threads(threads):
        _assert_all_the_same(layer, call, [_combined(sizes, mask) for mask in written])


@pytest.mark.parametrize("shape", list(np.ndindex(2, 2, 2, 2)))
def test_every_combination_of_size_one_axes_means_its_expansion(shape):
    """Sixteen ways to write a mask smaller than the scores, as a boolean and as a bias."""
    sizes = Sizes(2, 3, 5, 4)
    layer, query, key = make_layer(make_spec(12, 3)), randn(2, 5, 12), randn(2, 4, 12, seed=1)
    values = randn(*(size if whole else 1 for size, whole in zip(sizes, shape, strict=True)), seed=2)
    for mask in (masks.Allowed(values > 0), masks.Added(torch.where(values > 0, values, -torch.inf))):
        expanded = type(mask)(mask.values.expand(tuple(sizes)).contiguous())
        call = Call(query, key)
        _assert_all_the_same(layer, call, [_combined(sizes, mask), _combined(sizes, expanded)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_biases_stay_finite(dtype):
    """A bias masks only where it is -inf: with sums of the largest numbers a row still sums to 1 and has no NaN."""
    sizes = Sizes(1, 2, 3, 4)
    call = Call(randn(1, 3, 8), randn(1, 4, 8, seed=1), weights=WeightsWanted("heads"))
    single = torch.finfo(torch.float32).max
    for values in ([-1e38, -1e38], [1e38, 1e38], [-single] * 3, [single, single, -single], [-1e9], [-1e308, 1e308]):
        everywhere = [masks.Added(torch.full((1, 1, 1, 1), value, dtype=torch.float64)) for value in values]
        onekey = [masks.Added(torch.tensor([0, 0, 0, value], dtype=torch.float64).view(1, 1, 1, 4)) for value in values]
        for biases in (everywhere, onekey):
            combined = CombinedMask(sizes, tuple(biases))
            answer = make_layer(make_spec(8, 2), dtype).forward([_with(call, combined)])[0]
            weights = full_weights(answer)
            assert torch.isfinite(answer.output).all(), values
            assert torch.allclose(weights.sum(-1), torch.ones(1)), values
            assert not any(step.any() for step in masked_rows(combined))
        if len(set(np.sign(values))) == 1:
            # The same bias on all keys changes no softmax; one key far below or above the others gets nothing or everything.
            assert weights[..., 3].unique().tolist() == [float(values[0] > 0)]


def test_a_huge_bias_takes_all_the_weight_and_equal_ones_share_it():
    """+1e38 on two keys of four leaves no digit of their scores: each gets half, the others nothing."""
    sizes = Sizes(1, 1, 1, 4)
    mask = masks.Added(torch.tensor([1e38, 0.0, 1e38, 0.0]).view(1, 1, 1, 4))
    call = Call(randn(1, 1, 8), randn(1, 4, 8), mask=_combined(sizes, mask), weights=WeightsWanted("heads"))
    assert full_weights(make_layer(make_spec(8, 1)).forward([call])[0]).flatten().tolist() == [0.5, 0.0, 0.5, 0.0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [-1e9, -1e38, -3.4e38])
def test_the_lowest_bias_is_still_above_a_blocked_key(value, dtype):
    """One key with a bias of -1e38 beside blocked keys: it gets all of the weight, the others none."""
    sizes, low = Sizes(1, 2, 3, 4), torch.tensor([0, value, 0, 0], dtype=torch.float32).view(1, 1, 1, 4)
    only = torch.tensor([False, True, False, False]).view(1, 1, 1, 4)
    call = Call(randn(1, 3, 8), randn(1, 4, 8, seed=1), weights=WeightsWanted("heads"))
    layer = make_layer(make_spec(8, 2), dtype)
    with_bias, without = (
        layer.forward([_with(call, CombinedMask(sizes, ways))])[0]
        for ways in ((masks.Allowed(only), masks.Added(low)), (masks.Allowed(only),))
    )
    assert full_weights(with_bias).flatten(0, 2).tolist() == [[0.0, 1.0, 0.0, 0.0]] * 6
    torch.testing.assert_close(with_bias.output, without.output)


@settings(max_examples=150)
@given(st.data(), small_sizes, st.integers(1, 60), st.sampled_from([torch.float32, torch.float64]))
def test_a_table_has_the_same_bits_for_every_block_size(data, sizes, step_cells, dtype):
    """Also with biases whose sums are clamped to the range of the dtype, and with appended columns."""
    drawn = engine_mask(data.draw(masks_for(sizes)), sizes)
    huge = masks.Added(torch.tensor(data.draw(st.sampled_from([0.0, 1e38, -1e308]))).double().view(1, 1, 1, 1))
    combined = CombinedMask(sizes, (*(drawn.masks if drawn else ()), huge, huge))
    whole, bare = combined.lowered(0, dtype, extra_keys=1), combined.lowered(0, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masks, "STEP_CELLS", step_cells)
        stepwise = combined.lowered(0, dtype, extra_keys=1)
    assert same_bits(stepwise, whole)
    assert not whole[..., sizes.keys :].any()
    assert same_bits(whole[..., : sizes.keys].contiguous(), bare)


def test_broadcast_biases_take_one_table_and_masked_rows_none():
    """Sixteen biases [N, L, 1] and [S] and a causal mask: one table of 4 x 600 x 600; all else is as small as a step."""
    sizes, step = Sizes(1, 4, 600, 600), masks.STEP_CELLS
    biases = [masks.Added(torch.zeros(1, 4, 600, 1) if i % 2 else torch.zeros(1, 1, 1, 600)) for i in range(16)]
    for huge in (0.0, 3e38):
        combined = CombinedMask(sizes, (*biases, masks.causal(sizes, 0), masks.Added(torch.full((1, 1, 1, 1), huge))))
        with Allocations() as made:
            combined.lowered(0, torch.float32)
        *others, largest = sorted(made.sizes)
        assert largest == 4 * 600 * 600
        assert max(others) <= step
        with Allocations() as made:
            assert not torch.cat(list(masked_rows(combined))).any()
        assert max(made.sizes) <= 4 * 601, "no mask differs by row and by key"


@pytest.mark.parametrize("huge", [0.0, 3e38], ids=["in-range", "clamped"])
def test_a_bias_that_differs_by_row_and_key_is_read_in_steps(huge, monkeypatch):
    """Of 4 x 600 x 600 scores only the table is as large; a batch may stop after each step of each reading."""
    sizes, step, num_points = Sizes(1, 4, 600, 600), masks.STEP_CELLS, 0

    def count() -> None:
        nonlocal num_points
        num_points += 1

    monkeypatch.setattr(masks, "stop_point", count)
    bias = randn(1, 4, 600, 600).masked_fill_(torch.rand(600, 600) < 0.5, -torch.inf)
    combined = CombinedMask(sizes, (masks.Added(bias), masks.Added(torch.full((1, 1, 1, 1), huge))))
    with Allocations() as made:
        combined.lowered(0, torch.float32)
    *others, largest = sorted(made.sizes)
    assert largest == bias.numel()
    assert max(others) <= step
    assert num_points >= 2 * bias.numel() // step
    with Allocations() as made:
        torch.cat(list(masked_rows(combined)))
    assert max(made.sizes) <= step


def test_the_runs_of_a_sequence_intersect_in_a_run_of_one_sequence():
    sizes = Sizes(3, 1, 4, 6)
    combined = CombinedMask(
        sizes, (masks.lengths(torch.tensor([[6], [5], [2]])), masks.window(sizes, [0, 1, 2], 1, None))
    )
    run = combined.run(1)
    assert run is not None
    assert run.low.flatten().tolist() == [0, 1, 2, 3]
    assert run.high.flatten().tolist() == [5, 5, 5, 5]


def test_integers_beyond_int64_keep_their_meaning():
    """Offset, left and right are Python integers; two huge ones may cancel."""
    sizes, far = Sizes(1, 1, 4, 6), 10**30
    for mask, expected in (
        (masks.causal(sizes, far), [(0, 6)] * 4),
        (masks.causal(sizes, -far), [(0, 0)] * 4),
        (masks.window(sizes, far, far, None), [(0, 6), (1, 6), (2, 6), (3, 6)]),
        (masks.window(sizes, far, far + 2, None), [(0, 6), (0, 6), (0, 6), (1, 6)]),
        (masks.window(sizes, -far, None, far), [(0, 1), (0, 2), (0, 3), (0, 4)]),
        (masks.window(sizes, -far, None, far + 1), [(0, 2), (0, 3), (0, 4), (0, 5)]),
        (masks.window(sizes, 2**62, 2**62, 2**62), [(0, 6), (1, 6), (2, 6), (3, 6)]),
    ):
        assert list(zip(mask.low.flatten().tolist(), mask.high.flatten().tolist(), strict=True)) == expected


def test_the_two_boolean_polarities_are_inverse():
    values = torch.rand(2, 1, 3, 4) > 0.5
    assert torch.equal(masks.Allowed(values).values, masks.ignore(~values).values)


def _layer_and_call(data: st.DataObject, sizes: Sizes, seed: int):
    dtype = data.draw(st.sampled_from(DTYPES))
    head_width, value_head_width = data.draw(st.sampled_from([(1, 1), (4, 4), (8, 8), (5, 3)]))
    spec = make_spec(12, sizes.heads, head_width=head_width, value_head_width=value_head_width)
    query_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    query = randn(sizes.sequences, sizes.queries, 12, seed=seed, dtype=query_dtype)
    key = randn(sizes.sequences, sizes.keys, 12, seed=seed + 1, dtype=query_dtype)
    return make_layer(spec, dtype), Call(query, key)


def _combined(sizes: Sizes, mask: Mask) -> CombinedMask:
    return CombinedMask(sizes, (mask,))


def _with(call: Call, mask: CombinedMask | None) -> Call:
    return Call(call.query, call.key, call.value, mask, call.weights)


def _assert_all_the_same(layer, call: Call, written: list[CombinedMask | None]) -> None:
    asked = Call(call.query, call.key, weights=WeightsWanted("heads"))
    first, *others = (layer.forward([_with(asked, mask)])[0] for mask in written)
    for i, other in enumerate(others, start=1):
        assert same_answers(first, other), f"the mask written in way {i} gives other bits than in way 0"


@given(st.data(), st.sampled_from([Window(2, 0), Window(None, 0), Window(3, 3), Window(0, None)]))
def test_a_window_of_positions_allows_the_keys_near_the_position_of_each_row(data, window):
    """Keys that ascend, also with equal positions as in left padding, give a run; others a table of the same keys."""
    sequences, keys = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6))
    places = st.lists(st.integers(0, 9), min_size=keys, max_size=keys)
    key_positions = torch.tensor([data.draw(places) for _ in range(data.draw(st.sampled_from([1, sequences])))])
    if is_ascending := data.draw(st.booleans()):
        key_positions = key_positions.sort().values
    positions = torch.tensor([data.draw(st.lists(st.integers(0, 9), min_size=4, max_size=4)) for _ in range(sequences)])
    mask = masks.of_positions(window, positions, key_positions)
    assert isinstance(mask, masks.Run) or not is_ascending
    combined = CombinedMask(Sizes(sequences, 1, 4, keys), (mask,))
    for b in range(sequences):
        distance = key_positions[b % len(key_positions)] - positions[b][:, None]
        allowed = torch.ones_like(distance, dtype=torch.bool)
        if window.left is not None:
            allowed &= distance >= -window.left
        if window.right is not None:
            allowed &= distance <= window.right
        assert torch.equal(combined.lowered(b, torch.float32)[0] == 0, allowed)
