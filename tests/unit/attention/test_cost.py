"""Cost: the estimated bytes are those of the tables, and every part of a call adds to its flops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from service.attention.attention_weights import BLOCK_ROWS
from service.attention.call import AttentionCall, Call, WeightsWanted
from service.attention.cost import PRODUCT_FLOPS, WORKSPACE_TABLES, attention_flops, flops, table_bytes
from service.attention.masks import Added, CombinedMask, Sizes, causal
from tests.attention_fixtures import DTYPES, engine_mask, make_spec
from tests.strategies import masks_for, weights_wanted

sizes_drawn = st.builds(Sizes, st.integers(1, 3), st.integers(1, 3), st.integers(1, 300), st.integers(1, 40))


def call(dtype: torch.dtype = torch.float32, **fields) -> Call:
    return Call(torch.empty(1, 1, 1, dtype=dtype), **fields)


@settings(max_examples=150)
@given(st.data(), sizes_drawn, st.booleans())
def test_the_table_of_masks_is_counted_to_the_byte(data, sizes, has_extra):
    combined = engine_mask(data.draw(masks_for(sizes)), sizes)
    for dtype in DTYPES:
        computed = torch.float64 if dtype == torch.float64 else torch.float32
        table = None if combined is None else combined.lowered(0, computed, has_extra)
        found = table_bytes(call(dtype, mask=combined), sizes._replace(keys=sizes.keys + has_extra))
        assert found == (0 if table is None else table.nbytes)


def test_the_workspace_of_weights_is_one_block_of_rows():
    sizes, block = Sizes(5, 3, 10**6, 10**7), BLOCK_ROWS * 10**7 * WORKSPACE_TABLES * 4
    for wanted in (WeightsWanted("heads"), WeightsWanted("top_k", k=1, heads=(2,), queries=(0,))):
        assert table_bytes(call(weights=wanted), sizes) == block
    few = call(weights=WeightsWanted("mean"))
    assert table_bytes(few, Sizes(1, 3, 2, 50)) == 3 * 2 * 50 * WORKSPACE_TABLES * 4


def test_a_call_without_masks_and_weights_costs_two_flops_per_multiply_add():
    """By hand: a 24-wide layer with 3 heads of 8, 5 query rows, 7 key rows."""
    projections, pairs = 5 * 2 * 24 * 24 + 7 * 2 * 24 * 24, 35 * 3 * (8 + 8)
    sizes = Sizes(1, 3, 5, 7)
    assert flops(make_spec(24, 3), sizes, None, None) == 2 * (projections + pairs)
    assert flops(make_spec(24, 3), sizes._replace(sequences=2), None, None) == 4 * (projections + pairs)
    bare = make_spec(24, 3, has_output=False)
    assert flops(bare, sizes, None, None) == 2 * (projections + pairs - 5 * 24 * 24)
    extra = make_spec(24, 3, add_zero_attn=True)
    assert flops(extra, sizes, None, None) == 2 * (projections + 40 * 3 * (8 + 8))


@pytest.mark.parametrize(
    "fields", [{"scores": WeightsWanted("heads", stage="scaled")}, {"has_lse": True}, {"has_entropy": True}], ids=str
)
def test_scores_lse_and_entropy_of_a_layer_cost_flops_and_a_workspace(fields):
    sizes, spec = Sizes(1, 3, 5, 7), make_spec(24, 3)
    passes = sum(value is True for value in fields.values())
    assert flops(spec, sizes, None, None, fields.get("scores"), num_passes=passes) > flops(spec, sizes, None, None)
    assert table_bytes(call(**fields), sizes) == 3 * 5 * 7 * WORKSPACE_TABLES * 4


def test_contributions_cost_the_projected_values_and_their_lengths():
    """By hand: 7 keys of 3 heads, 8 value features each, projected to 24; in float32, and once more in float64."""
    spec, sizes, wanted = make_spec(24, 3), Sizes(1, 3, 5, 7), WeightsWanted("contributions")
    more = flops(spec, sizes, None, wanted) - flops(spec, sizes, None, WeightsWanted("heads"))
    assert more >= 2 * 7 * 24 * 24
    one = flops(spec, sizes, None, WeightsWanted("contributions", heads=(1,)))
    assert one < flops(spec, sizes, None, wanted)
    spec = make_spec(24, 3)
    plain = table_bytes(call(weights=WeightsWanted("heads")), sizes, spec)
    assert table_bytes(call(weights=wanted), sizes, spec) - plain == 4 * (3 * 7 + 7 * 24 * 3)


def test_flops_are_whole_numbers_of_any_size():
    assert flops(make_spec(4096, 32), Sizes(1, 32, 2**40, 2**40), None, None) > 2**90


@settings(max_examples=150)
@given(st.data(), sizes_drawn)
def test_masks_and_weights_add_flops_and_more_of_them_add_more(data, sizes):
    spec = make_spec(12, sizes.heads)
    combined, wanted = engine_mask(data.draw(masks_for(sizes)), sizes), data.draw(weights_wanted(sizes))
    nothing, masked = flops(spec, sizes, None, None), flops(spec, sizes, combined, None)
    both = flops(spec, sizes, combined, wanted)
    assert (masked > nothing) == (combined is not None)
    assert both > masked
    assert both <= flops(spec, sizes, combined, WeightsWanted(wanted.form, wanted.k))
    if combined is not None:
        more = CombinedMask(sizes, (*combined.masks, causal(sizes, 0)))
        assert flops(spec, sizes, more, None) > masked


@pytest.mark.parametrize(
    ("wanted", "least"),
    [
        (WeightsWanted("mean"), 1.4),
        (WeightsWanted("top_k", k=1), 2),
        (WeightsWanted("top_k", k=2000), 10),
        (WeightsWanted("mean", queries=(0, 1999)), 1.05),
    ],
    ids=["mean", "top_k of 1", "top_k of all", "two rows"],
)
def test_the_cost_of_weights_of_a_long_sequence_matches_the_measurement(wanted, least):
    """Twelve heads of 32 over 2,000 keys, as in docs/internals/performance.md: within a factor of two."""
    spec, sizes = make_spec(384, 12), Sizes(1, 12, 2000, 2000)
    share = flops(spec, sizes, None, wanted) / flops(spec, sizes, None, None)
    assert least <= share <= 3 * least


def test_a_selection_costs_the_blocks_that_it_touches():
    spec, sizes = make_spec(24, 3), Sizes(1, 3, 1000, 50)
    of_rows = [
        flops(spec, sizes, None, WeightsWanted("mean", queries=rows)) for rows in ((0,), (1, 127), (0, 128), (999,))
    ]
    assert of_rows[0] == of_rows[1] < of_rows[2]
    assert of_rows[3] < of_rows[0], "the last block is shorter"


def test_a_bias_equal_for_all_rows_needs_no_table_of_rows():
    sizes, columns = Sizes(1, 12, 4700, 4700), Added(torch.zeros(1, 1, 1, 4700))
    assert table_bytes(call(mask=CombinedMask(sizes, (columns,))), sizes) == 4 * 4700
    rows = Added(torch.zeros(1, 12, 4700, 1))
    assert table_bytes(call(mask=CombinedMask(sizes, (rows, columns))), sizes) == 4 * 12 * 4700**2


def attention_call(heads: int, rows: int, keys: int, width: int, value_width: int, **fields) -> AttentionCall:
    query, key, value = (
        torch.empty(2, heads, rows, width),
        torch.empty(2, 1, keys, width),
        torch.empty(2, 1, keys, value_width),
    )
    return AttentionCall(query, key, value, 1.0, **fields)


def test_attention_without_a_layer_counts_the_products_of_every_query_head():
    sizes = Sizes(2, 3, 5, 7)
    assert attention_flops(attention_call(3, 5, 7, 8, 8), sizes) == 2 * (2 * 3 * 5 * 7) * 16
    assert table_bytes(attention_call(3, 5, 7, 8, 8), sizes) == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"softcap": 2.0},
        {"sinks": torch.zeros(3)},
        {"weights": WeightsWanted("heads")},
        {"scores": WeightsWanted("heads", stage="masked")},
        {"has_lse": True},
        {"has_entropy": True},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_each_option_of_attention_without_a_layer_costs_flops_and_a_workspace(fields):
    sizes = Sizes(2, 3, 5, 7)
    plain, more = attention_call(3, 5, 7, 8, 8), attention_call(3, 5, 7, 8, 8, **fields)
    assert attention_flops(more, sizes) > attention_flops(plain, sizes)
    assert table_bytes(more, sizes) == 3 * 5 * 7 * WORKSPACE_TABLES * 4


def test_many_small_products_cost_their_calls():
    """4,096 heads of one number each: their arithmetic takes no time, their 4,096 calls take 40 ms."""
    sizes = Sizes(2, 4096, 1, 1)
    one_call, many = attention_call(4096, 1, 1, 1, 1), attention_call(4096, 1, 1, 1, 1, softcap=1.0)
    assert attention_flops(one_call, sizes) < 10**6
    assert attention_flops(many, sizes) >= 2 * 2 * 4096 * PRODUCT_FLOPS
    shared = one_call._replace(key=torch.empty(2, 2048, 1, 1), value=torch.empty(2, 2048, 1, 1))
    assert attention_flops(shared, sizes) >= 2 * 2048 * PRODUCT_FLOPS
