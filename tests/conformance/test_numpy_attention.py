"""The articles' NumPy code (rows 5 to 13 of `docs/conformance.md`), re-implemented in short, compared with a layer.

Its masks say True = blocked: our `ignore`. Where every key of a row is blocked it gives uniform weights; we give zeros.
"""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from rich.console import Console

from attention_client.cli import heat_map
from service.attention.call import Call, WeightsWanted
from service.attention.layer import Layer
from service.attention.masks import CombinedMask, Sizes, causal, ignore
from tests.attention_fixtures import CPU, full_weights, identity_layer, make_spec

wanted = WeightsWanted("heads", dtype=torch.float64)


def assert_near(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-12)


def softmax(x, axis=-1):
    powers = np.exp(x - x.max(axis=axis, keepdims=True))
    return powers / powers.sum(axis=axis, keepdims=True)


def scaled_dot_product_attention(Q, K, V, mask=None):
    scores = np.einsum("...qd,...kd->...qk", Q, K) / np.sqrt(Q.shape[-1])
    if mask is not None:
        scores = np.where(mask, -1e9, scores)
    weights = softmax(scores)
    return np.einsum("...qk,...kv->...qv", weights, V), weights


class MultiHeadAttention:
    def __init__(self, hidden_size, num_heads, rng):
        self.num_heads = num_heads
        self.W = [rng.normal(0, hidden_size**-0.5, (hidden_size, hidden_size)) for _ in range(4)]

    def split_heads(self, X):
        return X.reshape(*X.shape[:2], self.num_heads, -1).transpose(0, 2, 1, 3)

    def forward(self, Q, K, V, mask=None):
        q, k, v = (self.split_heads(X @ W) for X, W in zip((Q, K, V), self.W, strict=False))
        out, weights = scaled_dot_product_attention(q, k, v, None if mask is None else mask[:, None])
        return out.transpose(0, 2, 1, 3).reshape(*Q.shape[:2], -1) @ self.W[3], weights


def layer_of(weights, num_heads: int, *, has_output: bool = True) -> Layer:
    """x @ W of the article is x @ W.T of a torch Linear; no biases."""
    names = ("query", "key", "value", "output")[: len(weights)]
    width = len(weights[0])
    spec = make_spec(width, num_heads, biases=False, has_output=has_output, scale=(width // num_heads) ** -0.5)
    tensors = {f"{name}.weight": torch.from_numpy(w.T.copy()) for name, w in zip(names, weights, strict=True)}
    return Layer(spec, tensors, dtype=torch.float64, device=CPU)


def ask(layer: Layer, Q, K=None, V=None, mask=None) -> tuple[np.ndarray, np.ndarray]:
    """Output and weights [B, h, Lq, Lk] for arrays, with a mask [B, Lq, Lk] where True = blocked."""
    query, key, value = (None if X is None else torch.from_numpy(X) for X in (Q, K, V))
    assert query is not None
    sizes = Sizes(len(Q), layer.spec.num_heads, Q.shape[1], (Q if K is None else K).shape[1])
    combined = None if mask is None else CombinedMask(sizes, (ignore(torch.from_numpy(mask).unsqueeze(1)),))
    answer = layer.forward([Call(query, key, value, combined, wanted)])[0]
    return answer.output.numpy(), full_weights(answer).numpy()


@pytest.fixture
def rng():
    return np.random.default_rng(3)


def blocked(rng, *shape: int) -> np.ndarray:
    found: np.ndarray = rng.random(shape) < 0.4
    found[..., 0] = False
    return found


def test_row_5_softmax_also_of_large_numbers(rng):
    """One query of one feature, 1.0, over keys that are the numbers: its weights are their softmax."""
    for x in (rng.normal(0, 1, (3, 8)), rng.normal(0, 300, (3, 8)), np.array([[1000.0, 1001.0, -1000.0]])):
        _, weights = ask(identity_layer(1, scale=1.0), np.ones((len(x), 1, 1)), x[..., None])
        assert_near(weights[:, 0, 0], softmax(x))


@pytest.mark.parametrize("keys", [6, 9])
def test_row_6_scaled_dot_product_attention_square_and_rectangular(rng, keys):
    Q, K, V = rng.normal(size=(2, 6, 8)), rng.normal(size=(2, keys, 8)), rng.normal(size=(2, keys, 5))
    layer = identity_layer(8, 5, scale=8**-0.5)
    for mask in (None, blocked(rng, 2, 6, keys)):
        for found, expected in zip(ask(layer, Q, K, V, mask), scaled_dot_product_attention(Q, K, V, mask), strict=True):
            assert_near(found.reshape(expected.shape), expected)


def test_row_6_a_fully_blocked_row_is_zero_where_the_article_leaks_the_mean_of_the_values(rng):
    X, mask = rng.normal(size=(1, 10, 4)), np.zeros((1, 10, 10), bool)
    mask[0, 3] = True
    out, weights = scaled_dot_product_attention(X, X, X, mask)
    np.testing.assert_allclose(weights[0, 3], 0.1)
    found, ours = ask(identity_layer(4, scale=0.5), X, mask=mask)
    assert not found[0, 3].any()
    assert not ours[0, 0, 3].any()
    assert_near(np.delete(found, 3, 1), np.delete(out, 3, 1))


def test_row_7_multi_head_attention(rng):
    """(out (B, Lq, H), weights (B, h, Lq, Lk)), mask (B, Lq, Lk) over all heads."""
    model = MultiHeadAttention(24, 4, rng)
    Q, K, V = (rng.normal(size=(2, n, 24)) for n in (5, 7, 7))
    for mask in (None, blocked(rng, 2, 5, 7)):
        for found, expected in zip(ask(layer_of(model.W, 4), Q, K, V, mask), model.forward(Q, K, V, mask), strict=True):
            assert_near(found, expected)


def test_row_8_simple_attention_has_one_head_and_no_output_projection(rng):
    """Scaled by sqrt(d_model); a mask (B, L, L)."""
    W, X = [rng.normal(0, 0.3, (12, 12)) for _ in range(3)], rng.normal(size=(2, 6, 12))
    layer = layer_of(W, 1, has_output=False)
    for mask in (None, blocked(rng, 2, 6, 6)):
        out, weights = scaled_dot_product_attention(X @ W[0], X @ W[1], X @ W[2], mask)
        found, ours = ask(layer, X, mask=mask)
        assert_near(found, out)
        assert_near(ours[:, 0], weights)


def article_legend(weight: float) -> str:
    return "*" if weight > 0.5 else "+" if weight > 0.2 else "." if weight > 0.05 else " "


def test_row_9_the_legend_of_visualize_attention(rng):
    """Every weight of a real answer, and the bounds themselves, which belong to the weaker mark."""
    _, weights = ask(identity_layer(4, scale=2.0), rng.normal(size=(1, 8, 4)))
    for weight in [*weights.flatten(), 0.0, 0.05, 0.2, 0.5, 1.0, np.nextafter(0.5, 1)]:
        assert heat_map.legend_mark(float(weight)) == article_legend(weight)


def test_row_9_the_picture_has_a_row_for_each_token_with_the_marks_of_its_weights(rng):
    tokens = ["[CLS]", "the", "cat", "eats", "the", "fish", "[SEP]"]
    _, weights = ask(identity_layer(4, scale=2.0), rng.normal(size=(1, 7, 4)))
    console = Console(file=io.StringIO(), width=120)
    console.print(heat_map.draw(weights[0, 0], tokens, tokens, title="head 0", use_legend=True))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    for token, row in zip(tokens, weights[0, 0], strict=True):
        best = f"{tokens[row.argmax()]} {row.max():.3f}"
        line = next(line for line in lines if line.strip().startswith(token) and line.rstrip().endswith(best))
        marks = line.strip().removeprefix(token).rstrip().removesuffix(best)
        assert "".join(marks.split()) == "".join(article_legend(weight) for weight in row).replace(" ", "")


def test_row_10_self_attention_is_attention_of_a_sequence_with_itself(rng):
    X = rng.normal(size=(2, 6, 8))
    out, weights = scaled_dot_product_attention(X, X, X)
    found, ours = ask(identity_layer(8, scale=8**-0.5), X)
    assert_near(found, out)
    assert_near(ours[:, 0], weights)


def test_row_11_cross_attention_of_a_decoder_of_5_with_an_encoder_of_10(rng):
    decoder, encoder = rng.normal(size=(2, 5, 64)), rng.normal(size=(2, 10, 64))
    out, weights = scaled_dot_product_attention(decoder, encoder, encoder)
    found, ours = ask(identity_layer(64, scale=0.125), decoder, encoder)
    assert found.shape == (2, 5, 64)
    assert_near(found, out)
    assert_near(ours[:, 0], weights)


def test_row_12_stable_attention_where_the_naive_exponential_overflows(rng):
    """Its "log-sum-exp trick" is the maximum subtracted: 41 and more of these scores are beyond float32's exp."""
    Q, K, V = (rng.normal(0, 10, size=(1, n, 64)).astype(np.float32) for n in (10, 20, 20))
    scores = Q @ K.swapaxes(1, 2) / np.sqrt(np.float32(64))
    assert (scores > 88.7).sum() > 20
    expected = softmax(scores.astype(np.float64)) @ V
    layer = identity_layer(64, scale=0.125, dtype=torch.float32)
    answer = layer.forward([Call(torch.from_numpy(Q), torch.from_numpy(K), torch.from_numpy(V))])[0]
    np.testing.assert_allclose(answer.output.numpy(), expected, rtol=1e-4, atol=1e-4)


def test_row_13_the_causal_mask_recipe_is_causal(rng):
    """triu(ones(L, L), k=1), True = blocked."""
    X, mask = rng.normal(size=(1, 7, 8)), np.triu(np.ones((7, 7)), k=1).astype(bool)
    layer = identity_layer(8, scale=8**-0.5)
    found, weights = ask(layer, X, mask=mask[None])
    assert_near(found, scaled_dot_product_attention(X, X, X, mask)[0])
    sizes = Sizes(1, 1, 7, 7)
    named = Call(torch.from_numpy(X), mask=CombinedMask(sizes, (causal(sizes, 0),)), weights=wanted)
    answer = layer.forward([named])[0]
    assert answer.output.numpy().tobytes() == found.tobytes()
    assert full_weights(answer).numpy().tobytes() == weights.tobytes()
    assert not np.triu(weights[0, 0], k=1).any()


def test_the_rows_of_weights_sum_to_one_and_lie_between_zero_and_one(rng):
    """The articles' own check, for multi-head weights."""
    _, weights = ask(layer_of(MultiHeadAttention(64, 8, rng).W, 8), rng.normal(size=(2, 10, 64)))
    np.testing.assert_allclose(weights.sum(-1), 1.0, rtol=1e-12)
    assert weights.min() >= 0
    assert weights.max() <= 1
