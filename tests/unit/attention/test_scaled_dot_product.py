"""Attention without a layer: compared with the float64 oracle, alone and in a batch, with and without extra results."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from service.attention.call import Answer, AttentionCall, WeightsWanted
from service.attention.masks import Allowed, CombinedMask, Sizes, causal
from service.attention.scaled_dot_product import ScaledDotProduct
from tests import oracle
from tests.attention_fixtures import (
    DEVICE,
    DTYPES,
    THREADS,
    Allocations,
    engine_mask,
    full_weights,
    same_bits,
    same_weights,
    torch_threads,
)
from tests.strategies import masks_for, seeds, weights_wanted

ALL = WeightsWanted("heads", dtype=torch.float64)
heads_counts = st.sampled_from([(1, 1), (2, 2), (3, 1), (4, 2), (6, 2)])
head_widths = st.one_of(st.integers(1, 9), st.sampled_from([16, 31, 64]))
row_counts = st.one_of(st.integers(1, 6), st.sampled_from([17, 64, 130]))


@dataclasses.dataclass(frozen=True)
class Drawn:
    call: AttentionCall
    masks: tuple[oracle.Mask, ...]

    def expected(self) -> oracle.Attention:
        call = self.call
        key, value = (_joined(past, new) for past, new in ((call.past_key, call.key), (call.past_value, call.value)))
        sinks = None if call.sinks is None else call.sinks.double().numpy()
        inputs = (call.query.double().numpy(), key, value)
        return oracle.scaled_dot_product(inputs, self.masks, scale=call.scale, softcap=call.softcap, sinks=sinks)


def _joined(past: torch.Tensor | None, new: torch.Tensor) -> np.ndarray:
    joined = new if past is None else torch.cat([past, new], 2)
    return joined.double().numpy()


@st.composite
def drawn_calls(draw: st.DrawFn, dtype: torch.dtype = torch.float32) -> Drawn:
    b, (n, g), rows, new, past = (
        draw(st.integers(1, 3)),
        draw(heads_counts),
        draw(row_counts),
        draw(row_counts),
        draw(st.sampled_from([0, 0, 1, 5])),
    )
    width = draw(head_widths)
    value_width = draw(st.sampled_from([width, width, 1, 7]))
    generator = torch.Generator().manual_seed(draw(seeds))

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    sizes = Sizes(b, n, rows, past + new)
    masks = draw(masks_for(sizes))
    call = AttentionCall(
        randn(b, n, rows, width),
        randn(b, g, new, width),
        randn(b, g, new, value_width),
        scale=draw(st.sampled_from([width**-0.5, 1.0, -0.3])),
        softcap=draw(st.sampled_from([None, None, 2.5])),
        past_key=randn(b, g, past, width) if past else None,
        past_value=randn(b, g, past, value_width) if past else None,
        sinks=randn(n) if draw(st.sampled_from([False, False, True])) else None,
        mask=engine_mask(masks, sizes),
        rows_first=draw(st.booleans()),
    )
    return Drawn(call, masks)


def layer_for(dtype: torch.dtype) -> ScaledDotProduct:
    return ScaledDotProduct(dtype=torch.float64 if dtype == torch.float64 else torch.float32, device=DEVICE)


def answer(call: AttentionCall) -> Answer:
    (found,) = layer_for(call.query.dtype).forward([call])
    return found


def with_everything(call: AttentionCall) -> AttentionCall:
    masked = dataclasses.replace(ALL, stage="masked")
    return call._replace(weights=ALL, scores=masked, has_lse=True, has_entropy=True, has_present=True)


def same(one: Answer, other: Answer) -> bool:
    fields = [field.name for field in dataclasses.fields(Answer) if field.name != "weights"]
    pairs = [(getattr(one, name), getattr(other, name)) for name in fields]
    have_same_bits = all(a is b if a is None or b is None else same_bits(a, b) for a, b in pairs)
    return have_same_bits and same_weights(one.weights, other.weights)


def close(found: torch.Tensor, expected: np.ndarray, dtype: torch.dtype) -> bool:
    least = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 1e-5 + torch.finfo(dtype).eps)
    finite = expected[np.isfinite(expected)]
    within = least * max(1.0, float(np.abs(finite).max(initial=0.0)))
    return np.allclose(found.double().numpy(), expected, rtol=0, atol=within)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_part_of_an_answer_agrees_with_float64(dtype):
    @settings(max_examples=40)
    @given(drawn_calls(dtype))
    def check(drawn: Drawn) -> None:
        expected, found = drawn.expected(), answer(with_everything(drawn.call))
        assert found.output.dtype == dtype
        assert close(found.output, expected.output, dtype)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert isinstance(found.weights, torch.Tensor)
        assert found.scores is not None
        assert found.lse is not None
        assert close(found.weights, expected.weights, wide)
        assert close(found.scores, expected.masked, wide)
        assert close(found.lse, expected.lse, wide)
        assert found.entropy is not None
        assert close(found.entropy, expected.entropy, wide)
        contributions = answer(drawn.call._replace(weights=dataclasses.replace(ALL, form="contributions"))).weights
        assert isinstance(contributions, torch.Tensor)
        assert close(contributions, expected.contributions, wide)
        scaled = answer(drawn.call._replace(scores=dataclasses.replace(ALL, stage="scaled"))).scores
        capped = answer(drawn.call._replace(scores=dataclasses.replace(ALL, stage="capped"))).scores
        assert scaled is not None
        assert capped is not None
        assert close(scaled, expected.scaled, wide)
        assert close(capped, expected.capped, wide)

    check()


@pytest.mark.parametrize("threads", [THREADS[0], *(pytest.param(n, marks=pytest.mark.long) for n in THREADS[1:])])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_part_of_an_answer_has_the_same_bits_alone_and_in_a_batch(dtype, threads):
    @settings(max_examples=20)
    @given(st.lists(drawn_calls(dtype), min_size=2, max_size=4))
    def check(drawn: list[Drawn]) -> None:
        calls = [with_everything(one.call) for one in drawn]
        together = layer_for(dtype).forward(calls)
        assert all(same(answer(call), found) for call, found in zip(calls, together, strict=True))

    with torch_threads(threads):
        check()


@settings(max_examples=30)
@given(drawn_calls())
def test_a_sequence_has_the_same_bits_alone_and_along_the_batch_axis(drawn):
    whole = answer(with_everything(drawn.call))
    for i in range(drawn.call.query.shape[0]):
        part = slice(i, i + 1)
        names = ("query", "key", "value", "past_key", "past_value")
        tensors = {name: x[part] for name in names if (x := getattr(drawn.call, name)) is not None}
        mask = None if drawn.call.mask is None else drawn.call.mask.of_sequence(i)
        alone = answer(with_everything(drawn.call._replace(**tensors, mask=mask)))
        for field in dataclasses.fields(Answer):
            assert same_bits(getattr(whole, field.name)[part], getattr(alone, field.name))


@settings(max_examples=40)
@given(st.data(), drawn_calls())
def test_no_extra_result_changes_the_output(data, drawn):
    plain = answer(drawn.call)
    sizes = Sizes(*drawn.expected().masked.shape)
    extras = {
        "weights": data.draw(weights_wanted(sizes)),
        "scores": dataclasses.replace(ALL, stage="capped"),
        "has_lse": True,
        "has_entropy": True,
        "has_present": True,
    }
    asked = data.draw(st.lists(st.sampled_from(sorted(extras)), min_size=1, unique=True))
    found = answer(drawn.call._replace(**{name: extras[name] for name in asked}))
    assert same_bits(found.output, plain.output)


@settings(max_examples=30)
@given(st.data(), drawn_calls())
def test_a_selection_of_scores_and_weights_has_the_bits_of_the_full_answer(data, drawn):
    heads, rows = drawn.call.query.shape[1:3]
    some = tuple(data.draw(st.lists(st.integers(0, heads - 1), min_size=1, unique=True)))
    queries = tuple(data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=9, unique=True)))
    form = data.draw(st.sampled_from(["heads", "contributions"]))
    wanted = WeightsWanted(form, heads=some, queries=queries, dtype=torch.float64)
    full = answer(with_everything(drawn.call)._replace(weights=dataclasses.replace(ALL, form=form)))
    part = answer(drawn.call._replace(weights=wanted, scores=dataclasses.replace(wanted, stage="masked")))
    for whole, selected in ((full.weights, part.weights), (full.scores, part.scores)):
        assert isinstance(whole, torch.Tensor)
        assert isinstance(selected, torch.Tensor)
        expected = whole[:, list(some)][:, :, list(queries)]
        # A GPU computes the requested heads in one product.
        assert (
            same_bits(selected, expected) if DEVICE.type == "cpu" else close(selected, expected.numpy(), torch.float32)
        )


@settings(max_examples=40)
@given(drawn_calls())
def test_the_layout_in_memory_changes_no_bit(drawn):
    call = drawn.call
    strided = {
        name: getattr(call, name).transpose(1, 2).contiguous().transpose(1, 2) for name in ("query", "key", "value")
    }
    assert same_bits(answer(call).output, answer(call._replace(**strided, rows_first=not call.rows_first)).output)


def test_the_output_lies_in_memory_as_the_call_requests():
    x = torch.ones(2, 3, 4, 5)
    assert answer(AttentionCall(x, x, x, 1.0)).output.is_contiguous()
    assert answer(AttentionCall(x, x, x, 1.0, rows_first=True)).output.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0])])
def test_a_masked_row_is_zero_and_its_lse_is_the_sink(softcap, sinks):
    query = torch.randn(1, 2, 3, 8, generator=torch.Generator().manual_seed(1))
    allowed = torch.ones(1, 1, 3, 3, dtype=torch.bool)
    allowed[..., 1, :] = False
    mask = CombinedMask(Sizes(1, 2, 3, 3), (Allowed(allowed),))
    found = answer(with_everything(AttentionCall(query, query, query, 1.0, softcap, None, None, sinks, mask)))
    assert isinstance(found.weights, torch.Tensor)
    assert found.lse is not None
    assert not found.output[:, :, 1].any()
    assert not found.weights[:, :, 1].any()
    assert found.entropy is not None
    assert not found.entropy[:, :, 1].any()
    assert found.lse[0, :, 1].tolist() == ([-math.inf] * 2 if sinks is None else sinks.tolist())


@pytest.mark.parametrize(("sink", "row"), [(1e39, [0.0, 0.0]), (-1e39, [0.5, 0.5])])
def test_a_finite_sink_beyond_float32_stays_finite(sink, row):
    x = torch.ones(1, 1, 2, 4)
    call = AttentionCall(x, x, x, 1.0, sinks=torch.tensor([sink], dtype=torch.float64), weights=ALL, has_lse=True)
    found = answer(call)
    assert full_weights(found)[0, 0].tolist() == [row, row]
    assert found.lse is not None
    assert torch.isfinite(found.lse).all()


def test_weights_sum_to_one_and_to_less_with_a_sink():
    query = torch.randn(1, 2, 3, 8, generator=torch.Generator().manual_seed(1))
    call = AttentionCall(query, query, query, 1.0, weights=ALL)
    plain, sunk = answer(call).weights, answer(call._replace(sinks=torch.zeros(2))).weights
    assert isinstance(plain, torch.Tensor)
    assert isinstance(sunk, torch.Tensor)
    assert torch.allclose(plain.sum(-1), torch.ones(1, 2, 3, dtype=torch.float64))
    assert bool((sunk.sum(-1) < 1 - 1e-6).all())


def test_present_is_the_past_and_the_new_rows_in_the_dtype_of_the_key():
    past, new = torch.full((1, 2, 3, 4), 1.0).half(), torch.full((1, 2, 1, 4), 2.0).half()
    query = torch.ones(1, 4, 1, 4)
    found = answer(AttentionCall(query, new, new, 1.0, past_key=past, past_value=past, has_present=True))
    for present in (found.present_key, found.present_value):
        assert present is not None
        assert same_bits(present, torch.cat([past, new], 2))


@pytest.mark.parametrize("value_width", [8, 5])
@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("is_masked", [False, True])
def test_a_shared_key_is_never_copied_for_its_query_heads(rows, value_width, is_masked):
    heads, keys = 4096, 2**22 // (4096 * rows)
    query = torch.zeros(1, heads, rows, 8)
    mask = CombinedMask(Sizes(1, heads, rows, keys), (causal(Sizes(1, heads, rows, keys), 3),)) if is_masked else None
    call = AttentionCall(query, torch.zeros(1, 1, keys, 8), torch.zeros(1, 1, keys, value_width), 1.0, mask=mask)
    with Allocations() as made:
        answer(call)
    assert max(made.sizes) <= max(heads * rows * 8, 2**20, heads * rows * keys // 2)
