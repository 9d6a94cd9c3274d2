"""The articles' worked examples, with the calculated figures where the printed ones are wrong."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from service.attention.call import Call, WeightsWanted
from service.attention.layer import Layer
from service.attention.masks import CombinedMask, Sizes, ignore, lengths
from tests.attention_fixtures import CPU, full_weights, identity_layer, make_spec

wanted = WeightsWanted("heads", dtype=torch.float64)


def doubles(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)[None]


# --- A: two tokens, X 2 x 3, projections 3 x 2

X = doubles([[1, 0, 1], [0, 1, 0]])


@pytest.mark.parametrize(
    ("divisor", "first_row", "first_output"),
    [(2.0, [0.195570, 0.804430], 1.195570), (3.0, [0.239632, 0.760368], 1.239632)],
)
def test_example_a_two_tokens(divisor, first_row, first_output):
    """Keys are [[0,2],[1,1]], scores [[0,2],[2,2]] and the divisor sqrt(2): token 1 attends mostly to token 2.

    The article prints [[.88,.12],...] after four chained slips: a wrong key, wrong scores, sqrt(3), and no division at all.
    """
    q, k, v = doubles([[2, 0], [1, 1]]), doubles([[0, 2], [1, 1]]), doubles([[2, 1], [1, 1]])
    assert (q @ k.transpose(1, 2)).tolist() == [[[0, 2], [2, 2]]]
    answer = identity_layer(2, scale=divisor**-0.5).forward([Call(q, k, v, weights=wanted)])[0]
    np.testing.assert_allclose(full_weights(answer)[0, 0], [first_row, [0.5, 0.5]], atol=5e-7)
    np.testing.assert_allclose(answer.output[0], [[first_output, 1.0], [1.5, 1.0]], atol=5e-7)


def test_example_a_through_projections_from_width_3_to_width_2():
    """d_k is the projected width, 2, and not the model width, 3."""
    spec = make_spec(3, 1, biases=False, head_width=2, value_head_width=2, has_output=False, scale=2**-0.5)
    weights = {"query": [[2, 0], [1, 1], [0, 0]], "key": [[0, 2], [1, 1], [0, 0]], "value": [[2, 1], [1, 1], [0, 0]]}
    tensors = {f"{name}.weight": torch.tensor(w, dtype=torch.float64).T for name, w in weights.items()}
    layer = Layer(spec, tensors, dtype=torch.float64, device=CPU)
    answer = layer.forward([Call(X, weights=wanted)])[0]
    np.testing.assert_allclose(full_weights(answer)[0, 0], [[0.195570, 0.804430], [0.5, 0.5]], atol=5e-7)
    np.testing.assert_allclose(answer.output[0], [[1.195570, 1.0], [1.5, 1.0]], atol=5e-7)


# --- B: x = 1 ... 12 in three rows


def served_weights(x: torch.Tensor, scale: float) -> np.ndarray:
    answer = identity_layer(x.shape[-1], scale=scale).forward([Call(x, weights=wanted)])[0]
    return full_weights(answer)[0, 0].numpy()


@pytest.mark.parametrize(
    ("scale", "rows"),
    [
        (1.0, [[1.80e-35, 4.25e-18, 1.0], [4.6e-91, 6.8e-46, 1.0]]),
        (0.5, [[4.25e-18, 2.06e-9, 0.99999999794], [6.8e-46, 2.6e-23, 1.0], [1.1e-73, 3.3e-37, 1.0]]),
    ],
)
def test_example_b_is_one_hot_scaled_or_not(scale, rows):
    """The article's smooth rows (.011 .269 .720) are not what 1 ... 12 gives."""
    x = torch.arange(1.0, 13.0, dtype=torch.float64).view(1, 3, 4)
    assert (x @ x.transpose(1, 2)).tolist() == [[[30, 70, 110], [70, 174, 278], [110, 278, 446]]]
    np.testing.assert_allclose(served_weights(x, scale)[: len(rows)], rows, rtol=2e-2)
    assert served_weights(x, 0.5)[0, 2] == pytest.approx(0.99999999794, abs=1e-11)


@pytest.mark.parametrize(
    ("scale", "rows"),
    [
        (1.0, [[0.212, 0.316, 0.472], [0.085, 0.239, 0.676], [0.028, 0.153, 0.819]]),
        (0.5, [[0.269, 0.329, 0.402], [0.181, 0.305, 0.513], [0.115, 0.267, 0.618]]),
    ],
)
def test_example_b_divided_by_ten_shows_the_intended_effect(scale, rows):
    x = torch.arange(1.0, 13.0, dtype=torch.float64).view(1, 3, 4) / 10
    np.testing.assert_allclose(served_weights(x, scale), rows, atol=6e-4)


@pytest.mark.parametrize(
    ("width", "largest", "entropy"),
    [(16, (0.664, 0.227), (0.976, 2.413)), (64, (0.846, 0.250), (0.401, 2.344)), (512, (0.945, 0.245), (0.135, 2.362))],
)
def test_example_b_measured_scaling_keeps_weights_smooth_at_any_width(width, largest, entropy):
    """Unit normals, 16 keys: the largest weight and the entropy (at most 2.773), unscaled and scaled."""
    rng = np.random.default_rng(0)
    query = torch.from_numpy(rng.normal(size=(1, 400, width)))
    for scale, top, nats in zip((1.0, width**-0.5), largest, entropy, strict=True):
        found = []
        for _ in range(8):
            key = torch.from_numpy(rng.normal(size=(1, 16, width)))
            call = Call(query, key, weights=wanted)
            found.append(full_weights(identity_layer(width, scale=scale).forward([call])[0])[0, 0].numpy())
        weights = np.concatenate(found)
        assert weights.max(-1).mean() == pytest.approx(top, abs=0.04)
        assert -(weights * np.log(weights, out=np.zeros_like(weights), where=weights > 0)).sum(
            -1
        ).mean() == pytest.approx(nats, abs=0.12)


# --- C: the variance of a product of unit normals


@pytest.mark.parametrize("width", [4, 16, 64, 256])
def test_example_c_the_variance_of_scores_is_the_width_and_one_after_scaling(width):
    """The weights of a layer with a zero key give the scores: log(weight / weight of the zero key) = q.k * scale."""
    for scale, variance in ((width**-0.5, 1.0), (0.1 * width**-0.5, 0.01)):
        spec = make_spec(width, 1, biases=False, has_output=False, add_zero_attn=True, scale=scale)
        eye = torch.eye(width)
        tensors = {f"{name}.weight": eye for name in ("query", "key", "value")}
        layer = Layer(spec, tensors, dtype=torch.float64, device=CPU)
        query, key = torch.from_numpy(np.random.default_rng(1).normal(size=(2, 1, 400, width)))
        weights = full_weights(layer.forward([Call(query, key, weights=wanted)])[0])[0, 0]
        scores = (weights[:, :-1] / weights[:, -1:]).log()
        torch.testing.assert_close(scores, scale * (query @ key.transpose(1, 2))[0], rtol=1e-9, atol=1e-9)
        assert float(scores.var()) == pytest.approx(variance, rel=0.1)


# --- D: the NumPy article, run as it is written


def test_example_d_the_first_demo_with_seed_42():
    """Query, key and value of 5 x 64, float32 as the article has them."""
    rng = np.random.RandomState(42)
    q, k, v = (torch.from_numpy(rng.randn(1, 5, 64).astype(np.float32)).double() for _ in range(3))
    answer = identity_layer(64, scale=0.125).forward([Call(q, k, v, weights=wanted)])[0]
    weights = full_weights(answer)[0, 0]
    np.testing.assert_allclose(weights[0], [0.48400854, 0.01720043, 0.10994758, 0.30193370, 0.08690975], atol=2e-8)
    assert float(weights.min()) == pytest.approx(0.017200, abs=5e-7)
    assert float(weights.max()) == pytest.approx(0.630798, abs=5e-7)
    np.testing.assert_allclose(answer.output[0, 0, :4], [-0.57593899, 0.79844549, 0.02453211, -0.75947502], atol=1e-7)


def test_example_d_the_second_demo_768_wide_in_12_heads():
    """Projections of 0.02 x unit normals, made before the input from one stream."""
    rng = np.random.RandomState(42)
    weights = [rng.randn(768, 768) * 0.02 for _ in range(4)]
    spec = make_spec(768, 12, biases=False)
    names = ("query", "key", "value", "output")
    tensors = {f"{name}.weight": torch.from_numpy(w.T.copy()) for name, w in zip(names, weights, strict=True)}
    layer = Layer(spec, tensors, dtype=torch.float64, device=CPU)
    answer = layer.forward([Call(torch.from_numpy(rng.randn(2, 10, 768)), weights=wanted)])[0]
    found = full_weights(answer)
    assert found.shape == (2, 12, 10, 10)
    assert answer.output.shape == (2, 10, 768)
    assert float(found.min()) == pytest.approx(0.034150, abs=5e-7)
    assert float(found.max()) == pytest.approx(0.254741, abs=5e-7)
    assert float(answer.output.std(correction=0)) == pytest.approx(0.108416, abs=5e-7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_example_d_a_fully_blocked_row_leaks_nothing_in_any_dtype(dtype):
    """The article's -1e9 gives every key 0.1, and is -inf in float16; ours is zero everywhere."""
    mask = CombinedMask(Sizes(1, 1, 10, 10), (ignore(torch.ones(1, 1, 1, 1, dtype=torch.bool)),))
    layer = identity_layer(8, scale=0.25, dtype=dtype)
    answer = layer.forward([Call(torch.ones(1, 10, 8), mask=mask, weights=WeightsWanted("heads"))])[0]
    assert not answer.output.any()
    assert not full_weights(answer).any()


# --- E: D2L


def test_example_e_keys_of_ones_average_the_valid_values():
    """Values 0 ... 39 in ten rows, the first 2 of the first sequence and the first 6 of the second."""
    values = torch.arange(40.0).view(1, 10, 4).repeat(2, 1, 1)
    query, keys = torch.randn(2, 1, 2), torch.ones(2, 10, 2)
    for given, expected in (
        ([2, 6], [[2, 3, 4, 5], [10, 11, 12, 13]]),
        ([0, 10], [[0, 0, 0, 0], [18, 19, 20, 21]]),
    ):
        mask = CombinedMask(Sizes(2, 1, 1, 10), (lengths(torch.tensor(given)[:, None]),))
        layer = identity_layer(2, 4, scale=2**-0.5, dtype=torch.float32)
        answer = layer.forward([Call(query, keys, values, mask)])[0]
        np.testing.assert_allclose(answer.output[:, 0], expected, rtol=1e-5)
