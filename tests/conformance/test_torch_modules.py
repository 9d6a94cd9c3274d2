"""The articles' torch code (rows 1 to 4 of `docs/conformance.md`), re-implemented in short, compared with a layer.

Their masks say 0 = blocked, non-zero = keep: our `attend`. Dropout is off, as it is wherever a model is served.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from service.attention.call import Call, WeightsWanted
from service.attention.layer import Layer
from service.attention.masks import Allowed, CombinedMask, Sizes
from tests.attention_fixtures import CPU, full_weights, identity_layer, make_spec, randn

wanted = WeightsWanted("heads", dtype=torch.float64)


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def scaled_dot_product_attention(query, key, value, mask=None):
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.size(-1))
    if mask is not None:
        scores = scores.masked_fill(mask == 0, float("-inf"))
    attn = scores.softmax(-1)
    return attn @ value, attn


def doubles(*shape: int, seed: int = 0) -> torch.Tensor:
    return randn(*shape, seed=seed, dtype=torch.float64)


def kept(*shape: int, seed: int = 7) -> torch.Tensor:
    """A mask in the articles' convention: whole numbers, 0 = blocked, some row always left a key."""
    found = torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(seed))
    found[..., 0] = 1
    return found


def combined(mask: torch.Tensor, sizes: Sizes) -> CombinedMask:
    """[B, Lq or 1, Lk], broadcast over the heads."""
    return CombinedMask(sizes, (Allowed((mask != 0).unsqueeze(1)),))


@pytest.mark.parametrize("rows", [1, 5])
def test_row_1_scaled_dot_product_attention(rows):
    """q [B, Lq, dk], k [B, Lk, dk], v [B, Lk, dv]; a single head whose projections change nothing."""
    query, key, value = doubles(2, 5, 6), doubles(2, 9, 6, seed=1), doubles(2, 9, 4, seed=2)
    layer, mask = identity_layer(6, 4, scale=6**-0.5), kept(2, rows, 9)
    for given in (None, mask):
        output, attn = scaled_dot_product_attention(query, key, value, given)
        lowered = None if given is None else combined(given, Sizes(2, 1, 5, 9))
        answer = layer.forward([Call(query, key, value, lowered, wanted)])[0]
        assert_near(answer.output, output)
        assert_near(full_weights(answer)[:, 0], attn)


def test_row_1_a_fully_blocked_row_is_zero_where_the_article_gives_nan():
    query, mask = doubles(1, 3, 4), torch.ones(1, 3, 3)
    mask[0, 1] = 0
    output, _ = scaled_dot_product_attention(query, query, query, mask)
    assert output[0, 1].isnan().all()
    answer = identity_layer(4, scale=0.5).forward([Call(query, mask=combined(mask, Sizes(1, 1, 3, 3)))])[0]
    assert not answer.output[0, 1].any()
    assert_near(answer.output[0, ::2], output[0, ::2])


class MultiHeadAttention(nn.Module):
    """Rows 2 and 4: four linear maps with bias; the widths of keys and values are the caller's choice."""

    def __init__(self, d_model: int, num_heads: int, d_k: int, d_v: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.W_Q, self.W_K = (nn.Linear(d_model, num_heads * d_k) for _ in range(2))
        self.W_V, self.fc = nn.Linear(d_model, num_heads * d_v), nn.Linear(num_heads * d_v, d_model)

    def forward(self, query, key, value, mask=None):
        q, k, v = (
            linear(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for linear, x in ((self.W_Q, query), (self.W_K, key), (self.W_V, value))
        )
        x, attn = scaled_dot_product_attention(q, k, v, None if mask is None else mask.unsqueeze(1))
        return self.fc(x.transpose(1, 2).flatten(-2)), attn

    def layer(self) -> Layer:
        d_k, d_v = self.W_Q.out_features // self.num_heads, self.W_V.out_features // self.num_heads
        spec = make_spec(
            self.W_Q.in_features, self.num_heads, head_width=d_k, value_head_width=d_v, scale=float(d_k**-0.5)
        )
        state, names = self.state_dict(), {"W_Q": "query", "W_K": "key", "W_V": "value", "fc": "output"}
        tensors = {f"{names[key.split('.')[0]]}.{key.split('.')[1]}": value for key, value in state.items()}
        return Layer(spec, tensors, dtype=torch.float64, device=CPU)


@pytest.mark.parametrize("rows", [1, 4])
def test_row_2_multi_head_attention_with_a_mask_over_all_heads(rows):
    """MultiHeadAttention(h, d_model): d_k = d_model / h, mask [B, Lq or 1, Lk]; cross-attention 4 over 7."""
    module = MultiHeadAttention(24, 3, 8, 8).double()
    query, memory, mask = doubles(2, 4, 24), doubles(2, 7, 24, seed=1), kept(2, rows, 7)
    with torch.inference_mode():
        output, attn = module(query, memory, memory, mask)
    call = Call(query, memory, mask=combined(mask, Sizes(2, 3, 4, 7)), weights=wanted)
    answer = module.layer().forward([call])[0]
    assert_near(answer.output, output)
    assert_near(full_weights(answer), attn)


def test_row_2_the_model_width_has_to_be_shared_evenly():
    """The article asserts d_model % h == 0; here head widths are free, so 25 wide in 3 heads of 8 is a layer as well."""
    answer = MultiHeadAttention(25, 3, 8, 8).double().layer().forward([Call(doubles(1, 4, 25))])[0]
    assert answer.output.shape == (1, 4, 25)


def test_row_3_scaled_dot_product_attention_in_every_head_with_its_own_scale_factor():
    """[B, h, L, dk] and scale_factor = d_k ** -0.5: heads that are given apart are B x h sequences of one head."""
    q, k, v = doubles(2, 3, 5, 8), doubles(2, 3, 6, 8, seed=1), doubles(2, 3, 6, 8, seed=2)
    output, attn = scaled_dot_product_attention(q, k, v)
    layer = identity_layer(8, scale=8**-0.5)
    answer = layer.forward([Call(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), weights=wanted)])[0]
    assert_near(answer.output.unflatten(0, (2, 3)), output)
    assert_near(full_weights(answer)[:, 0].unflatten(0, (2, 3)), attn)


@pytest.mark.parametrize(("d_k", "d_v"), [(8, 8), (5, 11), (64, 1)])
def test_row_4_key_and_value_widths_independent_of_the_model_width(d_k, d_v):
    module = MultiHeadAttention(20, 2, d_k, d_v).double()
    query, key, value = doubles(2, 4, 20), doubles(2, 7, 20, seed=1), doubles(2, 7, 20, seed=2)
    with torch.inference_mode():
        output, attn = module(query, key, value)
    answer = module.layer().forward([Call(query, key, value, weights=wanted)])[0]
    assert_near(answer.output, output)
    assert_near(full_weights(answer), attn)
