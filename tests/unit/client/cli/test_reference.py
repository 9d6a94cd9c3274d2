"""The client's reference and the oracle of the tests, written independently, agree on attention without a layer."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_client.cli.reference import added_by, scaled_dot_product
from tests import oracle
from tests.strategies import seeds


def test_an_overflow_gives_no_warning():
    """NumPy's warnings have paths, and commands print one line."""
    x = np.full((1, 1, 3, 4), 1e200)
    assert np.isnan(scaled_dot_product((x, x, x), np.zeros(1), scale=1.0)[0]).all()


@settings(max_examples=40)
@given(
    st.sampled_from([(1, 1), (4, 2), (3, 3)]), st.integers(1, 5), st.integers(1, 6), seeds, st.booleans(), st.booleans()
)
def test_two_references_of_attention_without_a_layer_agree(heads, queries, keys, seed, is_capped, has_sinks):
    rng = np.random.default_rng(seed)
    inputs = (
        rng.normal(size=(2, heads[0], queries, 8)),
        rng.normal(size=(2, heads[1], keys, 8)),
        rng.normal(size=(2, heads[1], keys, 3)),
    )
    bias = np.where(rng.random((2, 1, queries, keys)) < 0.4, -np.inf, rng.normal(size=(2, 1, queries, keys)))
    sinks = rng.normal(size=heads[0]) if has_sinks else None
    softcap = 1.5 if is_capped else None
    expected = oracle.scaled_dot_product(inputs, [oracle.Bias(bias)], scale=0.7, softcap=softcap, sinks=sinks)
    output, lse = scaled_dot_product(inputs, bias, scale=0.7, softcap=softcap, sinks=sinks)
    np.testing.assert_allclose(output, expected.output, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(lse, expected.lse, rtol=1e-12, atol=1e-12)


@settings(max_examples=40)
@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 3), seeds)
def test_two_references_lower_a_mask_alike(queries, keys, width, seed):
    rng, shape = np.random.default_rng(seed), (2, 3, queries, keys)
    lengths, flags, bias = rng.integers(0, keys + 1, 2), rng.random((2, keys)) < 0.5, rng.normal(size=shape[1:])
    offset = keys - queries
    pairs: list[tuple[dict[str, Any], oracle.Mask]] = [
        ({"kind": "causal", "align": "top_left"}, oracle.Causal(0)),
        ({"kind": "causal", "align": "bottom_right"}, oracle.Causal(offset)),
        ({"kind": "window", "left": width, "right": 1, "align": "top_left"}, oracle.Window(0, width, 1)),
        ({"kind": "window", "left": 1, "right": width, "align": "bottom_right"}, oracle.Window(offset, 1, width)),
        ({"kind": "lengths", "values": lengths}, oracle.Lengths(lengths)),
        ({"kind": "attend", "axes": "bs", "values": flags}, oracle.Attend(flags[:, None, None])),
        ({"kind": "ignore", "axes": "bs", "values": flags}, oracle.Ignore(flags[:, None, None])),
        ({"kind": "bias", "axes": "hls", "values": bias}, oracle.Bias(bias[None])),
    ]
    for mask, expected in pairs:
        blocked = np.where(oracle.may_attend([expected], shape), 0.0, -np.inf)
        wanted = blocked + oracle.added_bias([expected], shape)
        np.testing.assert_array_equal(np.broadcast_to(added_by(mask, queries, keys), shape), wanted)
