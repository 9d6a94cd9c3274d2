"""The service's reference and the oracle of the tests, written independently, agree on every kind of layer."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from service.attention.reference import attend
from tests import oracle
from tests.attention_fixtures import as_arrays, make_spec, make_tensors
from tests.strategies import seeds, specs


@settings(max_examples=80)
@given(specs(width=st.integers(1, 40)), st.integers(1, 9), st.integers(1, 9), seeds)
def test_two_references_give_the_same_output_and_weights(spec, queries, keys, seed):
    rng, tensors = np.random.default_rng(seed), as_arrays(make_tensors(spec, seed))
    query = rng.normal(size=(1, queries, spec.query_width))
    key, value = (rng.normal(size=(1, keys, width)) for width in (spec.key_width, spec.value_width))
    expected, weights = oracle.multi_head_attention(spec, tensors, (query, key, value))
    found, found_weights = attend(spec, tensors, query[0], key[0], value[0])
    np.testing.assert_allclose(found, expected[0], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found_weights, weights[0], rtol=1e-12, atol=1e-14)


def test_an_overflow_gives_no_warning():
    """NumPy's warnings have paths, and commands print one line."""
    spec, x = make_spec(4, 2), np.ones((3, 4))
    tensors = {name: np.full(shape, 1e200) for name, shape in spec.tensor_shapes().items()}
    assert np.isnan(attend(spec, tensors, x, x, x)[0]).all()
