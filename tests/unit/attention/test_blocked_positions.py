"""Blocked positions and overflow: what a row may not attend to changes no bit of it, and the parts of an answer agree.

Values reach the largest finite one of their dtype. A key or value in float64 may be infinite in the dtype that computes.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from service.attention.call import Answer, AttentionCall, Call, WeightsWanted
from service.attention.layer import Layer
from service.attention.masks import Added, CombinedMask, Run, Sizes, lowered_on
from service.attention.scaled_dot_product import ScaledDotProduct
from tests import oracle
from tests.attention_fixtures import (
    DEVICE,
    DTYPES,
    engine_mask,
    full_weights,
    make_spec,
    make_tensors,
    same_bits,
)
from tests.strategies import masks_for, seeds

WEIGHTS = WeightsWanted("heads", dtype=torch.float64)
CONTRIBUTIONS = dataclasses.replace(WEIGHTS, form="contributions")
MASKED = dataclasses.replace(WEIGHTS, stage="masked")
# Powers of a dtype's largest value: the product of two halves overflows, and so does the sum of a few of the largest.
POWERS = (0.1, 0.3, 0.45, 0.5, 0.75, 0.99, 1.0)
row_counts = st.one_of(st.integers(1, 5), st.sampled_from([17, 40, 130]))
dtypes = st.sampled_from(DTYPES)


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int, share: float) -> torch.Tensor:
    """Normal numbers, in about a `share` of the rows beside some as large as a power of the dtype's largest one."""
    rng, most = np.random.default_rng(seed), torch.finfo(dtype).max
    large = most ** rng.choice(POWERS, shape[:-1])[..., None] * rng.choice([-1.0, 0.0, 0.7, 1.0], shape)
    is_large = rng.random((*shape[:-1], 1)) < share
    found = torch.from_numpy(np.where(is_large, large, 0.0) + rng.standard_normal(shape))
    return found.clamp(-most, most).to(dtype).clamp(-most, most)


@st.composite
def masks_with_large_biases(draw: st.DrawFn, sizes: Sizes) -> tuple[oracle.Mask, ...]:
    masks = draw(masks_for(sizes))
    if masks and not draw(st.booleans()):
        return masks
    shape, seed = tuple(size if draw(st.booleans()) else 1 for size in sizes), draw(seeds)
    bias = values((*shape, 1), torch.float32, seed, draw(st.sampled_from([0.0, 0.5, 1.0])))[..., 0].numpy()
    is_blocked = np.random.default_rng(seed).random(shape) < draw(st.sampled_from([0.0, 0.3]))
    return (*masks, oracle.Bias(np.where(is_blocked, -np.inf, bias).astype(np.float32)))


@dataclasses.dataclass(frozen=True)
class Drawn:
    call: AttentionCall
    allowed: np.ndarray
    """bool [B, N, L, S]."""
    seed: int

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self.call.query.dtype, torch.float32)

    def scores_before_bias(self) -> np.ndarray:
        """Magnitudes of the scaled scores, [B, N, L, S], as far as float64 holds them."""
        call = self.call
        key = torch.cat([x for x in (call.past_key, call.key) if x is not None], 2).double()
        key = key.repeat_interleave(call.query.shape[1] // key.shape[1], 1)
        return (call.query.double().abs() @ key.abs().mT * abs(call.scale)).numpy()

    def answer(self, weights: WeightsWanted = WEIGHTS) -> Answer:
        call = self.call._replace(weights=weights, scores=MASKED, has_lse=True, has_entropy=True)
        return ScaledDotProduct(dtype=self.dtype, device=DEVICE).forward([call])[0]

    def with_other_keys(self, sequence: int, head: int, keys: np.ndarray) -> Drawn:
        """Other values at some keys of one sequence and one query head."""
        group = head // (self.call.query.shape[1] // self.call.key.shape[1])
        changed = {}
        for i, name in enumerate(("key", "value")):
            tensor = getattr(self.call, name)
            other = values(tuple(tensor.shape[2:]), tensor.dtype, self.seed + 7 + i, 0.7)
            changed[name] = tensor.clone()
            changed[name][sequence, group] = torch.where(
                torch.from_numpy(keys)[:, None], other, tensor[sequence, group]
            )
        return dataclasses.replace(self, call=self.call._replace(**changed))


@st.composite
def drawn_calls(draw: st.DrawFn) -> Drawn:
    b, (n, g) = draw(st.integers(1, 2)), draw(st.sampled_from([(1, 1), (2, 2), (4, 2)]))
    rows, keys, past, seed = draw(row_counts), draw(row_counts), draw(st.sampled_from([0, 0, 3])), draw(seeds)
    width, value_width = draw(st.sampled_from([(1, 1), (8, 8), (8, 8), (4, 3)]))
    share = st.sampled_from([0.0, 0.1, 0.5])
    query_dtype, key_dtype = draw(dtypes), draw(dtypes)
    sizes = Sizes(b, n, rows, past + keys)
    masks = draw(masks_with_large_biases(sizes))
    call = AttentionCall(
        values((b, n, rows, width), query_dtype, seed, draw(share)),
        values((b, g, keys, width), key_dtype, seed + 1, draw(share)),
        values((b, g, keys, value_width), draw(dtypes) if not past else key_dtype, seed + 2, draw(share)),
        scale=draw(st.sampled_from([1.0, width**-0.5, -1e-30, 1e30])),
        softcap=draw(st.sampled_from([None, None, None, 2.5])),
        past_key=values((b, g, past, width), key_dtype, seed + 3, draw(share)) if past else None,
        past_value=values((b, g, past, value_width), key_dtype, seed + 4, draw(share)) if past else None,
        sinks=torch.randn(n) if draw(st.sampled_from([False, False, False, True])) else None,
        mask=engine_mask(masks, sizes),
    )
    return Drawn(call, oracle.may_attend(masks, sizes), seed)


@settings(max_examples=150)
@given(st.data(), drawn_calls())
def test_what_a_blocked_key_holds_changes_no_bit_of_a_row(data, drawn):
    b, n, rows, keys = drawn.allowed.shape
    past = keys - drawn.call.key.shape[2]
    at = data.draw(st.tuples(*(st.integers(0, size - 1) for size in (b, n, rows))))
    other = drawn.with_other_keys(at[0], at[1], ~drawn.allowed[at][past:])
    for wanted, field in ((WEIGHTS, "output weights scores lse entropy"), (CONTRIBUTIONS, "weights")):
        for name in field.split():
            one, two = (getattr(found, name)[at] for found in (drawn.answer(wanted), other.answer(wanted)))
            assert same_bits(one, two), (wanted.form, name, one, two)
    # In a batch, and without weights, scores and lse (P1, P2).
    layer = ScaledDotProduct(dtype=drawn.dtype, device=DEVICE)
    for found, alone in zip(layer.forward([other.call, drawn.call]), (other, drawn), strict=True):
        assert same_bits(found.output, alone.answer().output)


@settings(max_examples=150)
@given(drawn_calls())
def test_output_weights_scores_and_lse_of_a_row_agree(drawn):
    """Where a mask changes something: without one, a sum that overflows in one order of its terms may not in another."""
    found, call, has_sink = drawn.answer(), drawn.call, drawn.call.sinks is not None
    weights, scores, lse = full_weights(found), found.scores, found.lse
    assert scores is not None
    assert lse is not None
    allowed = torch.from_numpy(drawn.allowed)
    is_dead, top = ~allowed.any(-1), scores.amax(-1)
    assert bool((scores[~allowed] == -math.inf).all())
    assert not weights[is_dead].any()
    assert not found.output[is_dead].any()
    for b in range(len(weights)):
        if lowered_on(call.mask, b, torch.empty(0, dtype=drawn.dtype)) is None:
            continue
        has_weights = is_dead[b] | (top[b] < math.inf if has_sink else top[b].isfinite())
        assert torch.equal(weights[b].isfinite().all(-1), has_weights)
        assert torch.equal(weights[b].isnan().all(-1), ~has_weights)
        assert found.entropy is not None
        assert torch.equal(found.entropy[b].isnan(), ~has_weights)
        contributions = full_weights(drawn.answer(CONTRIBUTIONS))[b]
        assert torch.equal(contributions.isnan().any(-1), ~has_weights)
        assert not contributions[weights[b] == 0].any()
        assert torch.equal(lse[b].isfinite(), has_weights if has_sink else has_weights & ~is_dead[b])
        assert not found.output[b][~has_weights].isfinite().any()
        _weights_give_the_output(drawn, b, weights[b], found.output[b].double(), has_weights)


def _weights_give_the_output(
    drawn: Drawn, sequence: int, weights: torch.Tensor, output: torch.Tensor, has_weights: torch.Tensor
) -> None:
    """Compare the output with weights times values; beyond rounding of the scores, it lies between the values at least."""
    call, dtype = drawn.call, drawn.call.query.dtype
    value = torch.cat([x[sequence] for x in (call.past_value, call.value) if x is not None], 1).to(drawn.dtype)
    value = value.repeat_interleave(len(weights) // len(value), 0).double().unsqueeze(1)
    is_used = weights.unsqueeze(-1) > 0
    products = torch.where(is_used, weights.unsqueeze(-1) * value, 0.0)
    size = torch.where(is_used, value.abs(), 0.0).amax(-2)
    error = 8 * max(torch.finfo(dtype).eps, torch.finfo(drawn.dtype).eps * 16) * size + torch.finfo(dtype).tiny
    is_within = has_weights.unsqueeze(-1) & (size <= torch.finfo(dtype).max)
    is_large = torch.from_numpy(drawn.scores_before_bias()[sequence] > 1e4).any(-1, keepdim=True)
    may_attend = torch.from_numpy(drawn.allowed[sequence])
    off = (output - products.sum(-2)).abs() > error
    assert not off[is_within & ~is_large].any()
    bound = torch.where(may_attend.unsqueeze(-1), value.abs(), 0.0).amax(-2)
    assert not (output.abs() > bound + error)[is_within].any()
    assert not output[has_weights.unsqueeze(-1) & ~size.isfinite()].isfinite().any()


ONE_KEY = Run(torch.zeros(1, 1, 1, 1, dtype=torch.int64), torch.ones(1, 1, 1, 1, dtype=torch.int64))
EVERY_KEY = Added(torch.full((1, 1, 1, 1), torch.finfo(torch.float32).min))


@pytest.mark.parametrize(
    ("query", "keys", "kept", "mask", "row", "log_sum"),
    [
        ([1e20], [0.0, 1e20], [1.0, 5.0], ONE_KEY, 1.0, 0.0),
        ([1.0], [0.0, 1e300], [1.0, 5.0], ONE_KEY, 1.0, 0.0),
        ([1.0], [0.0, 1.0], [1.0, 1e300], ONE_KEY, 1.0, 0.0),
        ([1.0], [1e300, 1.0], [1.0, 5.0], ONE_KEY, math.nan, math.nan),
        ([1.0], [0.0, 0.0], [1e300, 5.0], ONE_KEY, math.inf, 0.0),
        # The sum of score and bias is beyond float32, and no other key is left.
        ([3e15], [-1e16, -1e16], [3.0, 3.0], EVERY_KEY, math.nan, math.nan),
        ([1.0], [-1e33, -1e33], [3.0, 3.0], EVERY_KEY, math.nan, math.nan),
        # The bias absorbs these scores.
        ([1.0], [-1e30, -1e30], [3.0, 3.0], EVERY_KEY, 3.0, torch.finfo(torch.float32).min),
        ([1.0], [0.0, 0.0], [3e38, 3e38], EVERY_KEY, 3e38, torch.finfo(torch.float32).min),
    ],
)
def test_the_numbers_of_an_answer_with_values_beyond_float32(query, keys, kept, mask, row, log_sum):
    if mask is EVERY_KEY and DEVICE.type != "cpu":
        pytest.skip("a GPU halves the largest bias, so that these sums stay finite")
    key, value = (torch.tensor(x, dtype=torch.float64).view(1, 1, 2, 1) for x in (keys, kept))
    masks = CombinedMask(Sizes(1, 1, 1, 2), (mask,))
    call = AttentionCall(
        torch.tensor(query).view(1, 1, 1, 1), key, value, 1.0, mask=masks, weights=WEIGHTS, has_lse=True
    )
    (found,) = ScaledDotProduct(dtype=torch.float32, device=DEVICE).forward([call])
    assert found.lse is not None
    weights = full_weights(found)
    assert torch.allclose(found.output, torch.tensor(row), equal_nan=True)
    assert torch.allclose(found.lse, torch.tensor(log_sum), equal_nan=True)
    assert torch.equal(weights.isnan(), torch.full((1, 1, 1, 2), math.isnan(row)))


def test_a_large_sequence_without_a_mask_has_no_output_where_no_score_is_left():
    """torch's fused kernel gives zeros where all scores are -inf."""
    query = torch.full((1, 8, 300, 4), 1e30)
    query[0, 0, 0] = 0.0
    call = AttentionCall(
        query, -torch.full_like(query, 1e30), torch.ones_like(query), 1.0, weights=WEIGHTS, has_lse=True
    )
    (found,) = ScaledDotProduct(dtype=torch.float32, device=DEVICE).forward([call])
    assert found.lse is not None
    for part in (found.output, full_weights(found), found.lse):
        assert part[0, 0, 0].isfinite().all()
        assert part[0, 0, 1:].isnan().all()


@pytest.mark.parametrize(("dtype", "rows"), [(torch.bfloat16, 4), (torch.bfloat16, 40), (torch.float32, 520)], ids=str)
@pytest.mark.parametrize("is_self", [True, False])
@pytest.mark.skipif(DEVICE.type != "cpu", reason="a GPU reads nothing without a mask: its kernel may give zeros there")
def test_a_layers_output_and_weights_agree_where_no_score_is_left(dtype, rows, is_self):
    """Where torch's fused kernel computes without a mask: in 16 bits, and for large sequences; also in a batch (P1)."""
    spec = make_spec(8, 2, biases=False, has_output=False)
    one = torch.eye(8)
    layer = Layer(spec, {"query.weight": one, "key.weight": -one, "value.weight": one}, dtype=dtype, device=DEVICE)
    inputs = torch.full((1, rows, 8), 1e30), torch.randn(1, rows, 8)
    calls = [Call(x, None if is_self else x.clone(), weights=WEIGHTS) for x in inputs]
    bare = [call._replace(weights=None) for call in calls]
    found, plain = layer.forward(calls)[0], layer.forward(bare)
    assert full_weights(found).isnan().all()
    assert found.output.isnan().all()
    assert same_bits(plain[0].output, found.output)
    assert same_bits(plain[1].output, layer.forward(bare[1:])[0].output)


SPECS = [make_spec(8, 2), make_spec(8, 4, num_kv_heads=2), make_spec(6, 2, has_bias_kv=True, add_zero_attn=True)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_a_blocked_position_holds_changes_no_bit_of_a_layers_answer(dtype):
    @settings(max_examples=50)
    @given(st.data(), st.sampled_from(SPECS), dtypes, dtypes, seeds)
    def check(data, spec, input_dtype, query_dtype, seed):
        # A float64 query is computed in float64 alone.
        if (query_dtype == torch.float64) != (dtype == torch.float64):
            query_dtype = dtype
        rows, is_self = data.draw(row_counts), data.draw(st.booleans())
        keys = rows if is_self else data.draw(row_counts)
        sizes = Sizes(1, spec.num_heads, rows, keys)
        masks = data.draw(masks_with_large_biases(sizes))
        mask, share = engine_mask(masks, sizes), data.draw(st.sampled_from([0.0, 0.3]))
        row = data.draw(st.integers(0, rows - 1))
        is_blocked = torch.from_numpy(~oracle.may_attend(masks, sizes)[0, :, row].any(0))
        layer = Layer(spec, make_tensors(spec), dtype=dtype, device=DEVICE)

        def tensor(length: int, which: torch.dtype, more: int) -> tuple[torch.Tensor, torch.Tensor]:
            x, other = (values((1, length, spec.query_width), which, seed + more + i, (share, 0.7)[i]) for i in (0, 1))
            return x, torch.where(is_blocked[:, None], other, x) if length == keys else x

        if is_self:
            is_blocked[row] = False
            calls = [Call(x, mask=mask) for x in tensor(rows, query_dtype, 0)]
        else:
            query = values((1, rows, spec.query_width), query_dtype, seed, share)
            pairs = zip(tensor(keys, input_dtype, 2), tensor(keys, input_dtype, 4), strict=True)
            calls = [Call(query, key, value, mask) for key, value in pairs]
        wanted = data.draw(st.sampled_from([WEIGHTS, CONTRIBUTIONS]))
        one, two = (layer.forward([call._replace(weights=wanted)])[0] for call in calls)
        assert same_bits(one.output[0, row], two.output[0, row])
        assert same_bits(full_weights(one)[0, :, row], full_weights(two)[0, :, row])
        assert same_bits(layer.forward([calls[1]])[0].output, two.output)
        batch = layer.forward([calls[0], calls[1], calls[1]._replace(mask=None)])
        assert all(same_bits(found.output, alone.output) for found, alone in zip(batch, (one, two), strict=False))

    check()
