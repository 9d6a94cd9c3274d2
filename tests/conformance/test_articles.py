"""The articles' functions, classes and figures over POST /v1/attention.

A test's docstring is its line in docs/conformance.md: first the request, then what differs and why. Projections are matrix
products of the caller, as in the articles; the service has the attention between them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from attention_client.cli.heat_map import legend_mark
from tests.conformance.attention_route import AttentionRoute

HEADS = {"form": "heads"}


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def from_numpy(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def assert_near(found: torch.Tensor, expected: torch.Tensor | np.ndarray) -> None:
    """To 1e-11 in float64, in which weights and scores of a float64 query come too; else to 1e-6."""
    least = 1e-11 if found.dtype == torch.float64 else 1e-6
    np.testing.assert_allclose(found.double().numpy(), np.asarray(expected), rtol=least, atol=least)


def three(
    query: torch.Tensor, key: torch.Tensor | None = None, value: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    key = query if key is None else key
    return {"query": query, "key": key, "value": key if value is None else value}


def exact_weights(attention: AttentionRoute, query: torch.Tensor, key: torch.Tensor, **fields: Any) -> np.ndarray:
    """Weights for rows [L, d] and [S, d], in the dtype of the query; the output over values that are an identity is the same."""
    found = attention(three(query, key, torch.eye(len(key), dtype=query.dtype)), **fields, weights=HEADS)
    assert_near(found["output"], found["weights"])
    return np.asarray(found["weights"])


def blocked(*shape: int, seed: int = 3) -> torch.Tensor:
    """true = blocked; the first key of a row never is."""
    found = randn(*shape, seed=seed) > 0.3
    found[..., 0] = False
    return found


# --- 000: torch


def article_000(query, key, value, mask=None):
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -torch.inf)
    weights = scores.softmax(-1)
    return weights @ value, weights


def test_row_1_scaled_dot_product_attention_of_torch(attention):
    """`scaled_dot_product_attention(query, key, value, mask, dropout)`, 0 = blocked: `attend`, `bls`, of mask ≠ 0; `weights`.

    No dropout, so rows of the weights sum to 1. A row of zeros in the mask gives NaN there and zeros here.
    """
    query, key, value = randn(2, 4, 6), randn(2, 7, 6, seed=1), randn(2, 7, 5, seed=2)
    mask = (~blocked(2, 4, 7)).to(torch.int64)
    for given in (None, mask):
        masks = [] if given is None else [{"kind": "attend", "axes": "bls", "values": given != 0}]
        found = attention(three(query, key, value), masks, layout="bld", weights=HEADS)
        for name, expected in zip(("output", "weights"), article_000(query, key, value, given), strict=True):
            assert_near(found[name], expected)
    mask[1, 2] = 0
    masks = [{"kind": "attend", "axes": "bls", "values": mask != 0}]
    found = attention(three(query, key, value), masks, layout="bld", weights=HEADS)
    assert article_000(query, key, value, mask)[0][1, 2].isnan().all()
    assert not found["output"][1, 2].any()
    assert not found["weights"][1, 2].any()


@pytest.mark.parametrize("rows_of_mask", [1, 4])
def test_row_2_multi_head_attention_module(attention, rows_of_mask):
    """`MultiHeadAttention(h, d_model, dropout)`, mask `[B, 1 or L, S]`: the caller's Linears, layout `packed`, `attend`, `bls`.

    `self.attn` is `weights`. `d_model % h` is 422 `bad_shape` here.
    """
    linears, h = [nn.Linear(12, 12, dtype=torch.float64) for _ in range(4)], 3
    for seed, linear in enumerate(linears):
        nn.init.normal_(linear.weight, std=0.3, generator=torch.Generator().manual_seed(seed))
    query, key = randn(2, 4, 12), randn(2, 6, 12, seed=1)
    mask = ~blocked(2, rows_of_mask, 6)
    with torch.no_grad():
        q, k, v = (linear(x) for linear, x in zip(linears, (query, key, key), strict=False))
        split = [x.view(2, -1, h, 4).transpose(1, 2) for x in (q, k, v)]
        expected, weights = article_000(split[0], split[1], split[2], mask.unsqueeze(1))
        found = attention(
            three(q, k, v),
            [{"kind": "attend", "axes": "bls", "values": mask}],
            layout="packed",
            num_heads=h,
            weights=HEADS,
        )
        output = linears[3](found["output"])
        assert_near(output, linears[3](expected.transpose(1, 2).reshape(2, 4, 12)))
    assert_near(found["weights"], weights)


# --- 001: torch modules


def test_row_3_scaled_dot_product_attention_module(attention):
    """`ScaledDotProductAttention(d_k)` of `[B, h, L, d_k]`: layout `bhld`, the default `scale` is `d_k ** -0.5`."""
    query, key, value = randn(2, 3, 4, 8), randn(2, 3, 5, 8, seed=1), randn(2, 3, 5, 8, seed=2)
    found = attention(three(query, key, value), weights=HEADS)
    output, weights = article_000(query, key, value)
    assert_near(found["output"], output)
    assert_near(found["weights"], weights)


def test_row_4_multi_head_attention_with_its_own_d_k_and_d_v(attention):
    """`MultiHeadAttention(d_model, num_heads, d_k, d_v)`: layout `packed`; the width of value is free."""
    x, (h, d_k, d_v) = randn(2, 5, 10), (4, 6, 3)
    q, k, v = (x @ randn(10, h * width, seed=seed) * 0.3 for seed, width in enumerate((d_k, d_k, d_v)))
    split = [t.view(2, 5, h, -1).transpose(1, 2) for t in (q, k, v)]
    output, weights = article_000(*split)
    found = attention(three(q, k, v), layout="packed", num_heads=h, weights=HEADS)
    assert_near(found["output"], output.transpose(1, 2).reshape(2, 5, h * d_v))
    assert_near(found["weights"], weights)


# --- 002: NumPy


def softmax(x: np.ndarray, axis: int = -1) -> np.ndarray:
    powers: np.ndarray = np.exp(x - x.max(axis=axis, keepdims=True))
    powers /= powers.sum(axis=axis, keepdims=True)
    return powers


def article_002(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray | None = None):
    scores = np.einsum("...qd,...kd->...qk", q, k) / np.sqrt(q.shape[-1])
    if mask is not None:
        scores = np.where(mask, -1e9, scores)
    weights = softmax(scores)
    return np.einsum("...qk,...kv->...qv", weights, v), weights


def ignored(mask: torch.Tensor | None, axes: str = "bls") -> list[dict[str, object]]:
    return [] if mask is None else [{"kind": "ignore", "axes": axes, "values": mask}]


@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("spread", [1.0, 300.0])
def test_row_5_softmax(attention, axis, spread):
    """`softmax(x, axis)`: query x, key an identity, `scale` 1: `scores` are x and `weights` its softmax.

    Another axis is a transposition of the caller.
    """
    x = randn(5, 8) * spread
    rows = x.movedim(axis, -1)
    eye = torch.eye(rows.shape[-1], dtype=x.dtype)
    found = attention(three(rows, eye, eye), scale=1.0, weights=HEADS, scores={"stage": "scaled"})
    assert_near(found["scores"], rows)
    for name in ("weights", "output"):
        assert_near(found[name].movedim(-1, axis), softmax(x.numpy(), axis))


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)], ids=str)
@pytest.mark.parametrize("keys", [6, 9])
def test_row_6_scaled_dot_product_attention_of_numpy(attention, lead, keys):
    """`scaled_dot_product_attention(Q, K, V, mask)`, any leading axes, True = blocked: `ld`, `bld`, `bhld`; kind `ignore`."""
    query, key, value = (randn(*lead, n, d, seed=n + d) for n, d in ((6, 8), (keys, 8), (keys, 5)))
    layout, axes = {0: ("ld", "ls"), 1: ("bld", "bls"), 2: ("bhld", "bhls")}[len(lead)]
    for mask in (None, blocked(*lead, 6, keys)):
        expected = article_002(query.numpy(), key.numpy(), value.numpy(), None if mask is None else mask.numpy())
        found = attention(three(query, key, value), ignored(mask, axes), layout=layout, weights=HEADS)
        assert_near(found["output"], expected[0])
        assert_near(found["weights"], expected[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_row_6_a_fully_blocked_row(attention, dtype):
    """A row that may attend to nothing: zeros in every dtype.

    The article's −1e9 gives every key 0.1, so padding leaks the mean of the values; in float16 −1e9 is −inf.
    """
    x, mask = randn(1, 10, 4, dtype=dtype), torch.zeros(1, 10, 10, dtype=torch.bool)
    mask[0, 3] = True
    np.testing.assert_allclose(article_002(*(x.double().numpy(),) * 3, mask=mask.numpy())[1][0, 3], 0.1)
    found = attention(three(x), ignored(mask), layout="bld", weights=HEADS, lse=True)
    assert not found["output"][0, 3].any()
    assert not found["weights"][0, 3].any()
    assert found["lse"][0, 3] == -torch.inf
    assert found["output"].dtype == dtype


def test_row_7_multi_head_attention_of_numpy(attention):
    """`MultiHeadAttention(hidden_size, num_heads)`, no biases, mask `(B, L, S)`: layout `packed`, `ignore`, `bls`."""
    w = [randn(24, 24, seed=seed) * 24**-0.5 for seed in range(4)]
    query, key = randn(2, 5, 24, seed=5), randn(2, 7, 24, seed=6)
    q, k, v = query @ w[0], key @ w[1], key @ w[2]
    split = [x.numpy().reshape(2, -1, 4, 6).transpose(0, 2, 1, 3) for x in (q, k, v)]
    for mask in (None, blocked(2, 5, 7)):
        output, weights = article_002(split[0], split[1], split[2], None if mask is None else mask.numpy()[:, None])
        found = attention(three(q, k, v), ignored(mask), layout="packed", num_heads=4, weights=HEADS)
        assert_near(found["output"] @ w[3], output.transpose(0, 2, 1, 3).reshape(2, 5, 24) @ w[3].numpy())
        assert_near(found["weights"], weights)


def test_row_8_simple_attention(attention):
    """`SimpleAttention(d_model)`, one head, no output projection: layout `bld`; `scale` `d_model ** -0.5` is the default."""
    x, w = randn(2, 6, 12), [randn(12, 12, seed=seed) * 0.3 for seed in range(3)]
    q, k, v = (x @ one for one in w)
    for mask in (None, blocked(2, 6, 6)):
        output, weights = article_002(q.numpy(), k.numpy(), v.numpy(), None if mask is None else mask.numpy())
        found = attention(three(q, k, v), ignored(mask), layout="bld", weights=HEADS)
        assert_near(found["output"], output)
        assert_near(found["weights"], weights)


def test_row_9_visualize_attention(attention):
    """The legend of `visualize_attention` (`*` > 0.5, `+` > 0.2, `.` > 0.05) for served weights.

    The command `attention show --legend` draws it; the article draws square weights only.
    """
    weights = attention(three(randn(7, 4)), scale=2.0, weights=HEADS)["weights"]
    for weight in weights.flatten().tolist():
        assert legend_mark(weight) == ("*" if weight > 0.5 else "+" if weight > 0.2 else "." if weight > 0.05 else " ")
    assert {legend_mark(weight) for weight in weights.flatten().tolist()} == set("*+. ")


def test_row_10_self_attention(attention):
    """`self_attention(X, mask)`: query, key and value are the same tensor, sent three times."""
    x = randn(2, 6, 8)
    output, weights = article_002(*(x.numpy(),) * 3)
    found = attention(three(x), layout="bld", weights=HEADS)
    assert_near(found["output"], output)
    assert_near(found["weights"], weights)


def test_row_11_cross_attention(attention):
    """`cross_attention` of a decoder of 5 rows and an encoder of 10, 64 wide."""
    decoder, encoder = randn(2, 5, 64), randn(2, 10, 64, seed=1)
    output, weights = article_002(decoder.numpy(), encoder.numpy(), encoder.numpy())
    found = attention(three(decoder, encoder), layout="bld", weights=HEADS)
    assert found["output"].shape == (2, 5, 64)
    assert_near(found["output"], output)
    assert_near(found["weights"], weights)


def test_row_12_stable_attention(attention):
    """`stable_attention`, output only, with scores above 88.7, where float32's exp overflows.

    Its "log-sum-exp trick" is the maximum subtracted, which every softmax here has. The real log-sum-exp is `lse`.
    """
    query, key = randn(10, 64, dtype=torch.float32) * 10, randn(20, 64, seed=1, dtype=torch.float32) * 10
    scores = query.double().numpy() @ key.double().numpy().T / 8
    found = attention(three(query, key), lse=True)
    assert sorted(found) == ["lse", "output"]
    assert (scores > 88.7).sum() > 20
    np.testing.assert_allclose(found["output"], softmax(scores) @ key.double().numpy(), rtol=1e-4, atol=1e-4)
    top = scores.max(-1)
    np.testing.assert_allclose(found["lse"], np.log(np.exp(scores - top[:, None]).sum(-1)) + top, rtol=1e-5)


def test_row_13_the_causal_mask_recipe(attention):
    """`triu(ones(L, L), k=1)`, True = blocked: `ignore` of it has the bits of `{"kind": "causal"}`."""
    x, mask = randn(7, 8), torch.ones(7, 7).triu(1).bool()
    recipe = attention(three(x), ignored(mask, "ls"), weights=HEADS)
    named = attention(three(x), [{"kind": "causal"}], weights=HEADS)
    assert_near(recipe["output"], article_002(*(x.numpy(),) * 3, mask=mask.numpy())[0])
    for name in ("output", "weights"):
        assert torch.equal(recipe[name], named[name])


# --- 004: D2L


def masked_softmax(scores: torch.Tensor, valid_lens: torch.Tensor | None) -> torch.Tensor:
    """D2L's own, with its -1e6."""
    if valid_lens is None:
        return scores.softmax(-1)
    per_row = valid_lens[:, None].expand(scores.shape[:2]) if valid_lens.dim() == 1 else valid_lens
    return scores.masked_fill(torch.arange(scores.shape[-1]) >= per_row[..., None], -1e6).softmax(-1)


def valid(given: torch.Tensor | None) -> list[dict[str, object]]:
    return [] if given is None else [{"kind": "lengths", "values": given}]


VALID_LENS = [None, [2, 6], [[1, 3, 5, 6], [6, 2, 4, 1]]]


@pytest.mark.parametrize("valid_lens", VALID_LENS, ids=str)
def test_row_14_dot_product_attention_of_d2l(attention, valid_lens):
    """`DotProductAttention(queries, keys, values, valid_lens)`, lengths `(B,)` or `(B, L)`: mask kind `lengths`.

    `self.attention_weights` is `weights`. A length of 0 gives zeros here and the mean of the values there.
    """
    queries, keys, values = randn(2, 4, 6), randn(2, 6, 6, seed=1), randn(2, 6, 5, seed=2)
    given = None if valid_lens is None else torch.tensor(valid_lens)
    weights = masked_softmax(queries @ keys.transpose(1, 2) / math.sqrt(6), given)
    found = attention(three(queries, keys, values), valid(given), layout="bld", weights=HEADS)
    assert_near(found["output"], weights @ values)
    assert_near(found["weights"], weights)


@pytest.mark.parametrize("valid_lens", VALID_LENS, ids=str)
def test_row_15_masked_softmax(attention, valid_lens):
    """`masked_softmax(scores, valid_lens)`: query the scores, key an identity, `scale` 1, `lengths`: `weights`.

    `scores` at stage `masked` are −inf where the article has −1e6, so a length of 0 gives zeros and not 1/S.
    """
    scores = randn(2, 4, 6)
    given = None if valid_lens is None else torch.tensor(valid_lens)
    eye = torch.eye(6, dtype=torch.float64).expand(2, 6, 6)
    fields = {"layout": "bld", "scale": 1.0, "weights": HEADS, "scores": {"stage": "masked"}}
    found = attention(three(scores, eye), valid(given), **fields)
    expected = masked_softmax(scores, given)
    for name in ("weights", "output"):
        assert_near(found[name], expected)
    may_attend = expected > 0
    assert torch.equal(found["scores"].isneginf(), ~may_attend)
    assert_near(found["scores"][may_attend], scores[may_attend])


def test_row_15_a_valid_length_of_zero(attention):
    """`valid_lens` 0: zeros. D2L's −1e6 gives the mean of the values."""
    keys = randn(2, 5, 4)
    found = attention(three(keys[:, :1], keys), valid(torch.tensor([0, 5])), layout="bld", weights=HEADS)
    np.testing.assert_allclose(masked_softmax(randn(1, 1, 5), torch.tensor([0])), 0.2)
    assert not found["output"][0].any()
    assert not found["weights"][0].any()
    assert_near(found["output"][1], article_000(keys[1:, :1], keys[1:], keys[1:])[0][0])


# --- 003: formulas


def test_row_16_the_formula(attention):
    """softmax(QKᵀ/√d_k)·V with Q = XW_Q and so on; QKᵀ itself is `scores` with `scale` 1."""
    x, w = randn(5, 6), randn(3, 6, 4, seed=2)
    q, k, v = x @ w[0], x @ w[1], x @ w[2]
    assert_near(attention(three(q, k, v))["output"], (q @ k.T / 2).softmax(-1) @ v)
    assert_near(attention(three(q, k, v), scale=1.0, scores={"stage": "scaled"})["scores"], q @ k.T)


def test_row_16_the_jacobian_of_softmax(attention):
    """∂s_i/∂x_j = s_i(δ_ij − s_j), as central differences of served weights."""
    x, step = np.array([0.3, -1.0, 0.8, 0.1]), 1e-6
    rows = np.stack([x, *(x + sign * step * e for sign in (1, -1) for e in np.eye(4))])
    served = exact_weights(attention, from_numpy(rows), torch.eye(4, dtype=torch.float64), scale=1.0)
    found, s = (served[1:5] - served[5:]).T / (2 * step), served[0]
    np.testing.assert_allclose(found, np.diag(s) - np.outer(s, s), atol=1e-9)


# --- what all of them claim


def test_claim_the_rows_of_the_weights_sum_to_one(attention):
    """Rows sum to 1 over the keys, the last axis of `[B, H, L, S]`; every weight is from 0 to 1."""
    weights = attention(three(randn(2, 8, 10, 8), randn(2, 8, 6, 8, seed=1)), weights=HEADS)["weights"]
    assert weights.shape == (2, 8, 10, 6)
    np.testing.assert_allclose(weights.sum(-1), 1.0, rtol=1e-6)
    assert weights.min() >= 0
    assert weights.max() <= 1


def test_claim_dot_products_need_equal_widths(attention):
    """Query and key of different widths: 422 `bad_shape`. Additive attention, which takes them, is left out."""
    body = {"query": [[1.0, 2.0]], "key": [[1.0]], "value": [[1.0]]}
    reply = attention.runner.run(attention.service.client.post("/v1/attention", json=body))
    assert (reply.status_code, reply.json()["code"]) == (422, "bad_shape")


def test_claim_a_mask_must_name_its_convention(attention):
    """A bare array as mask, which three conventions read in three ways: 422 `mask_kind_required`."""
    body = {"query": [[1.0]], "key": [[1.0]], "value": [[1.0]], "masks": [[True]]}
    reply = attention.runner.run(attention.service.client.post("/v1/attention", json=body))
    assert (reply.status_code, reply.json()["code"]) == (422, "mask_kind_required")


@pytest.mark.parametrize("scale", [None, 1.0, 1 / 16, -0.25])
def test_claim_other_scales_than_the_root_of_d(attention, scale):
    """`scale` 1 (T5), 1/d (muP), or any other factor. The article says that only 1/√d_k works."""
    query, key = randn(4, 16), randn(6, 16, seed=1)
    expected = softmax((query @ key.T).numpy() * (0.25 if scale is None else scale))
    fields = {} if scale is None else {"scale": scale}
    assert_near(from_numpy(exact_weights(attention, query, key, **fields)), expected)


# --- A: two tokens of article 003

X = torch.tensor([[1.0, 0, 1], [0, 1, 1]], dtype=torch.float64)
W_QUERY = torch.tensor([[1.0, 0], [0, 1], [1, 0]], dtype=torch.float64)
W_KEY = torch.tensor([[0.0, 1], [1, 0], [0, 1]], dtype=torch.float64)
W_VALUE = torch.tensor([[1.0, 1], [0, 1], [1, 0]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("scale", "first_row", "first_output"),
    [(None, [0.195570, 0.804430], 1.195570), (3**-0.5, [0.239632, 0.760368], 1.239632)],
    ids=["root-2", "root-3"],
)
def test_example_a_two_tokens(attention, scale, first_row, first_output):
    """X `[[1, 0, 1], [0, 1, 1]]` through W 3×2, so d_k is 2: weights `[[0.195570, 0.804430], [0.5, 0.5]]`.

    Token 1 attends mostly to token 2. With √3, which is of the model width, its weights are 0.239632 and 0.760368.
    """
    q, k, v = X @ W_QUERY, X @ W_KEY, X @ W_VALUE
    assert (q.tolist(), k.tolist(), v.tolist()) == ([[2, 0], [1, 1]], [[0, 2], [1, 1]], [[2, 1], [1, 1]])
    products = attention(three(q, k, v), scale=1.0, scores={"stage": "scaled"})["scores"]
    assert products.tolist() == [[0, 2], [2, 2]]
    found = attention(three(q, k, v), weights=HEADS, **({} if scale is None else {"scale": scale}))
    np.testing.assert_allclose(found["weights"], [first_row, [0.5, 0.5]], atol=5e-7)
    np.testing.assert_allclose(found["output"], [[first_output, 1.0], [1.5, 1.0]], atol=5e-7)


def test_example_a_what_the_printed_softmax_is(attention):
    """The printed .88 and .12 are softmax([4, 2]) without a division; divided by √3 they are 0.760368 and 0.239632."""
    scores, eye = torch.tensor([[4.0, 2]], dtype=torch.float64), torch.eye(2, dtype=torch.float64)
    np.testing.assert_allclose(exact_weights(attention, scores, eye, scale=1.0)[0], [0.880797, 0.119203], atol=5e-7)
    found = exact_weights(attention, scores, eye, scale=3**-0.5)[0]
    np.testing.assert_allclose(found, [0.760368, 0.239632], atol=5e-7)


# --- B: x = 1 ... 12 in three rows of article 003

TWELVE = torch.arange(1.0, 13.0, dtype=torch.float64).view(3, 4)


@pytest.mark.parametrize(
    ("scale", "rows"),
    [
        (1.0, [[1.80e-35, 4.25e-18, 1.0], [4.6e-91, 6.8e-46, 1.0]]),
        (0.5, [[4.25e-18, 2.06e-9, 0.99999999794], [6.8e-46, 2.6e-23, 1.0], [1.1e-73, 3.3e-37, 1.0]]),
    ],
    ids=["unscaled", "scaled"],
)
def test_example_b_is_one_hot_scaled_or_not(attention, scale, rows):
    """x = 1 … 12: both softmaxes are one-hot; `scale` ½ does not smooth them."""
    products = attention(three(TWELVE), scale=1.0, scores={"stage": "scaled"})["scores"]
    assert products.tolist() == [[30, 70, 110], [70, 174, 278], [110, 278, 446]]
    found = exact_weights(attention, TWELVE, TWELVE, scale=scale)
    np.testing.assert_allclose(found[: len(rows)], rows, rtol=2e-2)
    assert exact_weights(attention, TWELVE, TWELVE, scale=0.5)[0, 2] == pytest.approx(0.99999999794, abs=1e-11)


@pytest.mark.parametrize(("scale", "largest"), [(1.0, 4e-18), (0.5, 2e-9)], ids=["unscaled", "scaled"])
def test_example_b_the_largest_entry_of_the_jacobian(attention, scale, largest):
    """Row 1's largest entry s_i(δ_ij − s_j): 4e-18 unscaled and 2e-9 scaled, so almost no gradient in either."""
    s = exact_weights(attention, TWELVE, TWELVE, scale=scale)[0]
    off_diagonal = np.outer(s, s)[~np.eye(3, dtype=bool)]  # the diagonal of a row has the same largest size
    assert off_diagonal.max() == pytest.approx(largest, rel=0.1)


@pytest.mark.parametrize(
    ("scale", "rows"),
    [
        (1.0, [[0.212, 0.316, 0.472], [0.085, 0.239, 0.676], [0.028, 0.153, 0.819]]),
        (0.5, [[0.269, 0.329, 0.402], [0.181, 0.305, 0.513], [0.115, 0.267, 0.618]]),
    ],
    ids=["unscaled", "scaled"],
)
def test_example_b_divided_by_ten(attention, scale, rows):
    """x / 10 shows what the article means: the scaled rows are smoother."""
    found = attention(three(TWELVE / 10), scale=scale, weights=HEADS)["weights"]
    np.testing.assert_allclose(found, rows, atol=6e-4)


@pytest.mark.parametrize(
    ("width", "largest", "entropy", "slope"),
    [
        (16, (0.664, 0.227), (0.976, 2.413), (0.177, 0.167)),
        (64, (0.846, 0.250), (0.401, 2.344), (0.098, 0.179)),
        (512, (0.945, 0.245), (0.135, 2.362), (0.038, 0.177)),
    ],
)
def test_example_b_measured(attention, width, largest, entropy, slope):
    """Unit normals, 16 keys, d = 16, 64, 512: mean largest weight, entropy and largest p(1 − p), unscaled and scaled.

    The draws differ from those of the figures, so these hold to 0.04, 0.12 and 0.03.
    """
    query, key = randn(24, 50, width, dtype=torch.float32), randn(24, 16, width, seed=1, dtype=torch.float32)
    for scale, top, nats, largest_slope in zip((1.0, width**-0.5), largest, entropy, slope, strict=True):
        found = attention(three(query, key, key[..., :1]), layout="bld", scale=scale, weights=HEADS)["weights"].double()
        assert float(found.amax(-1).mean()) == pytest.approx(top, abs=0.04)
        assert float(-torch.xlogy(found, found).sum(-1).mean()) == pytest.approx(nats, abs=0.12)
        assert float((found * (1 - found)).amax(-1).mean()) == pytest.approx(largest_slope, abs=0.03)


# --- C: the variance of q·k


@pytest.mark.parametrize(
    ("width", "variance"), [(4, 3.996), (16, 15.90), (64, 63.95), (256, 258.1), (512, 513.6)], ids=str
)
def test_example_c_the_variance_of_scores(attention, width, variance):
    """Var(q·k) of unit normals is d, and 1 after 1/√d: `scores` with `scale` 1 and by default.

    The draws differ from those of the figures, so these hold to a tenth.
    """
    query, key = randn(400, width, dtype=torch.float32), randn(400, width, seed=1, dtype=torch.float32)
    for scale, expected in ((1.0, variance), (width**-0.5, 1.0)):
        found = attention(three(query, key, key[:, :1]), scale=scale, scores={"stage": "scaled"})["scores"]
        assert float(found.var()) == pytest.approx(expected, rel=0.1)
        if (width, scale) == (64, 1.0):  # "tens or hundreds", the article says: tens
            assert 30 < float(found.abs().max()) < 50


def test_example_c_scores_of_64_become_8(attention):
    """[−64, 64] divided by √64 is [−8, 8]."""
    x = torch.tensor([[64.0], [-64.0]])
    one = torch.ones(1, 1)
    assert attention(three(x, one), scale=0.125, scores={"stage": "scaled"})["scores"].tolist() == [[8.0], [-8.0]]


# --- D: article 002 run as it is written, np.random.seed(42)


def test_example_d_the_first_demo(attention):
    """Q, K, V of 5×64 in float32: weights[0] `[.484 .017 .110 .302 .087]`, out[0, :4] `[−.576 .798 .025 −.759]`.

    The answer is float32; the article's "float32" code returns float64 under NumPy 2. Sent as float64, the printed digits hold.
    """
    rng = np.random.RandomState(42)
    q, k, v = (from_numpy(rng.randn(5, 64).astype(np.float32)) for _ in range(3))
    weights = exact_weights(attention, q.double(), k.double())
    np.testing.assert_allclose(weights[0], [0.48400854, 0.01720043, 0.10994758, 0.30193370, 0.08690975], atol=2e-8)
    assert weights.min() == pytest.approx(0.017200, abs=5e-7)
    assert weights.max() == pytest.approx(0.630798, abs=5e-7)
    figures = [-0.57593899, 0.79844549, 0.02453211, -0.75947502]
    for tensors, least in ((three(q.double(), k.double(), v.double()), 1e-7), (three(q, k, v), 1e-6)):
        found = attention(tensors, weights=HEADS)
        assert found["output"].dtype == tensors["query"].dtype
        assert_near(found["weights"], weights)
        np.testing.assert_allclose(found["output"][0, :4], figures, atol=least)


def test_example_d_the_second_demo(attention):
    """768 wide in 12 heads: weights (2, 12, 10, 10) from .034150 to .254741, standard deviation of the output .108416."""
    rng = np.random.RandomState(42)
    w = [rng.randn(768, 768) * 0.02 for _ in range(4)]
    x = rng.randn(2, 10, 768)
    q, k, v = (from_numpy(x @ one) for one in w[:3])
    found = attention(three(q, k, v), layout="packed", num_heads=12, weights=HEADS)
    output = found["output"].numpy() @ w[3]
    assert found["weights"].shape == (2, 12, 10, 10)
    assert output.shape == (2, 10, 768)
    assert float(found["weights"].min()) == pytest.approx(0.034150, abs=5e-7)
    assert float(found["weights"].max()) == pytest.approx(0.254741, abs=5e-7)
    assert output.std() == pytest.approx(0.108416, abs=5e-7)


def test_example_d_the_demo_of_the_legend_shows_nothing(attention):
    """Projections of 0.02 × unit normals, 64 wide, 7 tokens: head 0's weights are from .134 to .150, all drawn as `.`."""
    rng = np.random.RandomState(42)
    w = [rng.randn(64, 64) * 0.02 for _ in range(4)]
    x = rng.randn(1, 7, 64)
    q, k, v = (from_numpy(x @ one) for one in w[:3])
    weights = attention(three(q, k, v), layout="packed", num_heads=8, weights=HEADS)["weights"][0, 0]
    assert (round(float(weights.min()), 3), round(float(weights.max()), 3)) == (0.134, 0.150)
    assert {legend_mark(weight) for weight in weights.flatten().tolist()} == {"."}


# --- E: D2L


@pytest.mark.parametrize(
    ("valid_lens", "expected"),
    [
        ([2, 6], [[2, 3, 4, 5], [10, 11, 12, 13]]),
        ([0, 10], [[0, 0, 0, 0], [18, 19, 20, 21]]),
    ],
    ids=str,
)
def test_example_e_keys_of_ones(attention, valid_lens, expected):
    """Keys of ones, values 0 … 39, `valid_lens` [2, 6]: `[2, 3, 4, 5]` and `[10, 11, 12, 13]`; a length of 0: zeros."""
    values = torch.arange(40.0).view(1, 10, 4).repeat(2, 1, 1)
    found = attention(
        three(randn(2, 1, 2, dtype=torch.float32), torch.ones(2, 10, 2), values),
        valid(torch.tensor(valid_lens)),
        layout="bld",
    )
    np.testing.assert_allclose(found["output"][:, 0], expected, rtol=1e-5)
