"""D2L's valid lengths and masked softmax, and the formulas (rows 14 to 16 of `docs/conformance.md`), compared with a layer.

`valid_lens` says how many keys count: our `lengths`, per sequence or per query row.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from service.attention.call import Call, WeightsWanted
from service.attention.masks import CombinedMask, Sizes, lengths
from tests.attention_fixtures import full_weights, identity_layer, randn

wanted = WeightsWanted("heads", dtype=torch.float64)


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def masked_softmax(scores: torch.Tensor, valid_lens: torch.Tensor | None) -> torch.Tensor:
    """D2L's own, with its -1e6."""
    if valid_lens is None:
        return scores.softmax(-1)
    per_row = valid_lens[:, None].expand(scores.shape[:2]) if valid_lens.dim() == 1 else valid_lens
    return scores.masked_fill(torch.arange(scores.shape[-1]) >= per_row[..., None], -1e6).softmax(-1)


def dot_product_attention(queries, keys, values, valid_lens=None):
    scores = queries @ keys.transpose(1, 2) / math.sqrt(queries.shape[-1])
    weights = masked_softmax(scores, valid_lens)
    return weights @ values, weights


def valid(given: torch.Tensor | None, sizes: Sizes) -> CombinedMask | None:
    return None if given is None else CombinedMask(sizes, (lengths(given.reshape(len(given), -1)),))


@pytest.mark.parametrize("valid_lens", [None, [2, 6], [[1, 3, 5, 7], [7, 2, 4, 1]]], ids=str)
def test_row_14_dot_product_attention_with_valid_lens(valid_lens):
    """(B, n, d), (B, m, d), (B, m, v) -> (B, n, v), lengths (B,) or (B, n)."""
    queries, keys, values = (randn(2, n, d, seed=n + d, dtype=torch.float64) for n, d in ((4, 6), (7, 6), (7, 5)))
    given = None if valid_lens is None else torch.tensor(valid_lens)
    output, weights = dot_product_attention(queries, keys, values, given)
    call = Call(queries, keys, values, valid(given, Sizes(2, 1, 4, 7)), wanted)
    answer = identity_layer(6, 5, scale=6**-0.5).forward([call])[0]
    assert_near(answer.output, output)
    assert_near(full_weights(answer)[:, 0], weights)


def test_row_14_a_length_of_zero_gives_zeros_where_d2l_gives_the_mean():
    keys = randn(2, 5, 4, dtype=torch.float64)
    given = torch.tensor([0, 5])
    output, weights = dot_product_attention(keys[:, :1], keys, keys, given)
    torch.testing.assert_close(weights[0], torch.full((1, 5), 0.2, dtype=torch.float64))
    call = Call(keys[:, :1], keys, mask=valid(given, Sizes(2, 1, 1, 5)), weights=wanted)
    answer = identity_layer(4, scale=0.5).forward([call])[0]
    assert not answer.output[0].any()
    assert not full_weights(answer)[0].any()
    assert_near(answer.output[1], output[1])


def test_row_15_masked_softmax():
    """Scores over an identity of keys are the queries themselves: the weights are their masked softmax."""
    scores = randn(2, 4, 6, dtype=torch.float64)
    for given in (torch.tensor([2, 3]), torch.tensor([[1, 3, 6, 2], [2, 4, 1, 5]])):
        keys = torch.eye(6, dtype=torch.float64).expand(2, 6, 6)
        call = Call(scores, keys, mask=valid(given, Sizes(2, 1, 4, 6)), weights=wanted)
        weights = full_weights(identity_layer(6, scale=1.0).forward([call])[0])[:, 0]
        assert_near(weights, masked_softmax(scores, given))


def test_row_16_the_formula_with_projections():
    """Q = X W_Q and so on, softmax(Q K^T / sqrt d_k) V."""
    x, w = randn(1, 5, 6, seed=1, dtype=torch.float64), randn(3, 6, 4, seed=2, dtype=torch.float64)
    q, k, v = x @ w[0], x @ w[1], x @ w[2]
    expected = (q @ k.transpose(1, 2) / math.sqrt(4)).softmax(-1) @ v
    answer = identity_layer(4, scale=0.5).forward([Call(q, k, v)])[0]
    assert_near(answer.output, expected)


def test_row_16_the_softmax_jacobian():
    """d weight_i / d score_j = s_i (delta_ij - s_j), here as a central difference of served weights."""
    scores, step = np.array([0.3, -1.0, 0.8, 0.1]), 1e-6

    def served(x: np.ndarray) -> np.ndarray:
        keys = torch.eye(4, dtype=torch.float64)[None]
        call = Call(torch.from_numpy(x)[None, None], keys, weights=wanted)
        return full_weights(identity_layer(4, scale=1.0).forward([call])[0])[0, 0, 0].numpy()

    s = served(scores)
    found = np.stack([(served(scores + step * e) - served(scores - step * e)) / (2 * step) for e in np.eye(4)], 1)
    np.testing.assert_allclose(found, np.diag(s) - np.outer(s, s), atol=1e-9)
