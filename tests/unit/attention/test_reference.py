"""The service's own reference and the tests' one, written apart, agree about every make of layer."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from service.attention.reference import attend
from tests import reference
from tests.engine_room import as_arrays, make_tensors
from tests.strategies import seeds, specs


@settings(max_examples=80, deadline=None)
@given(specs(width=st.integers(1, 40)), st.integers(1, 9), st.integers(1, 9), seeds)
def test_two_references_give_the_same_output_and_weights(spec, queries, keys, seed):
    rng, tensors = np.random.default_rng(seed), as_arrays(make_tensors(spec, seed))
    query = rng.normal(size=(1, queries, spec.query_width))
    key, value = (rng.normal(size=(1, keys, width)) for width in (spec.key_width, spec.value_width))
    expected, weights = reference.multi_head_attention(spec, tensors, (query, key, value))
    found, found_weights = attend(spec, tensors, query[0], key[0], value[0])
    np.testing.assert_allclose(found, expected[0], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found_weights, weights[0], rtol=1e-12, atol=1e-14)
