"""Layer: agreement with the float64 oracle, dtypes, defaults, masked rows, and independence of the calls of a batch."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from service.attention.call import Call, TopK, WeightsWanted
from service.attention.layer import Layer
from service.attention.masks import Allowed, CombinedMask, Sizes, lengths
from service.errors import LayerNotLoaded
from tests import oracle
from tests.attention_fixtures import (
    DEVICE,
    DTYPES,
    as_arrays,
    engine_mask,
    every_thread_count,
    full_weights,
    make_layer,
    make_spec,
    make_tensors,
    oracle_inputs,
    randn,
    same_answers,
    same_bits,
    torch_threads,
)
from tests.strategies import calls, seeds, short_lengths, specs

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 6e-2, torch.float16: 1e-2}
narrow_widths = st.integers(1, 40)


@pytest.mark.parametrize(("value", "dtype"), [(1e5, torch.float16), (-1e39, torch.float32)], ids=["half", "single"])
def test_a_layer_with_values_beyond_its_dtype_is_not_loaded(value, dtype):
    """Every answer would be NaN."""
    spec = make_spec(24, 3)
    tensors = {name: tensor.double() for name, tensor in make_tensors(spec).items()}
    tensors["key.bias"][3] = value
    with pytest.raises(LayerNotLoaded, match=rf"^values of key\.bias exceed {str(dtype).removeprefix('torch.')}$"):
        Layer(spec, tensors, dtype=dtype, device=DEVICE)
    assert Layer(spec, tensors, dtype=torch.float64, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_layer_matches_the_reference(dtype):
    """Any layer and any masks: each part of an answer, within a tolerance of each dtype relative to its magnitude."""

    @settings(max_examples=150)
    @given(st.data(), specs(width=narrow_widths), seeds)
    def check(data, spec, seed):
        spec = dataclasses.replace(spec, scale=spec.head_width**-0.5)
        query_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        drawn = data.draw(calls(spec, dtype=query_dtype, rows=short_lengths, max_masks=3))
        stage = data.draw(st.sampled_from(["scaled", "capped", "masked"]))
        wanted = WeightsWanted("heads", dtype=query_dtype)
        scores = dataclasses.replace(wanted, stage=stage)
        call = drawn.call._replace(weights=wanted, scores=scores, has_lse=True, has_entropy=True)
        tensors = {name: tensor.to(dtype) for name, tensor in make_tensors(spec, seed).items()}
        expected = oracle.multi_head(spec, as_arrays(tensors), oracle_inputs(call), drawn.masks)
        answer = make_layer(spec, dtype, seed).forward([call])[0]
        assert_near(answer.output, expected.output, TOLERANCE[dtype])
        assert_near(full_weights(answer), expected.weights, TOLERANCE[dtype])
        for found, name in ((answer.scores, stage), (answer.lse, "lse"), (answer.entropy, "entropy")):
            assert found is not None
            assert found.dtype == query_dtype
            assert_near(found, getattr(expected, name), TOLERANCE[dtype])
        asked = call._replace(weights=dataclasses.replace(wanted, form="contributions"))
        lengths = full_weights(make_layer(spec, dtype, seed).forward([asked])[0])
        assert_near(lengths, expected.contributions, TOLERANCE[dtype])

    check()


@settings(max_examples=60)
@given(st.data(), specs(width=narrow_widths), seeds)
def test_every_form_of_weights_matches_the_reference(data, spec, seed):
    drawn = data.draw(calls(spec, dtype=torch.float64, rows=short_lengths).filter(lambda drawn: drawn.call.weights))
    wanted = dataclasses.replace(drawn.call.weights, dtype=torch.float64)
    answer = make_layer(spec, torch.float64, seed).forward([drawn.call._replace(weights=wanted)])[0]
    tensors = as_arrays(make_tensors(spec, seed))
    expected = oracle.multi_head(spec, tensors, oracle_inputs(drawn.call), drawn.masks)
    full = expected.contributions if wanted.form == "contributions" else expected.weights
    part = oracle.selected(full, wanted.heads, wanted.queries)
    if wanted.form == "top_k":
        assert isinstance(answer.weights, TopK)
        values, _, rest = oracle.top_k(part, wanted.k)
        assert_near(answer.weights.values, values, 1e-12)
        assert_near(answer.weights.rest, rest, 1e-12)
        # Weights that differ only by rounding may come in another order; each index still points at its value.
        at = np.take_along_axis(part, answer.weights.indices.numpy().astype(np.int64), axis=-1)
        assert_near(answer.weights.values, at, 1e-12)
    else:
        assert_near(full_weights(answer), part.mean(1) if wanted.form == "mean" else part, 1e-12)


def assert_near(found: torch.Tensor, expected: np.ndarray, tolerance: float) -> None:
    assert tuple(found.shape) == expected.shape
    finite = expected[np.isfinite(expected)]
    most = tolerance * max(1.0, np.abs(finite).max(initial=0.0))
    np.testing.assert_allclose(found.double().numpy(), expected, rtol=0, atol=most)


@every_thread_count
def test_a_sequential_layer_gives_the_same_answers(threads):
    @settings(max_examples=40)
    @given(st.data(), specs(width=narrow_widths), st.sampled_from(DTYPES), seeds)
    def check(data, spec, dtype, seed):
        query_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        batch = [data.draw(calls(spec, dtype=query_dtype, rows=short_lengths)).call for _ in range(3)]
        layer = make_layer(spec, dtype, seed)
        together = layer.forward(batch)
        layer.is_sequential = True
        apart = layer.forward(batch)
        for one, other in zip(together, apart, strict=True):
            torch.testing.assert_close(one.output, other.output, rtol=0, atol=TOLERANCE[dtype] * 10)
            assert type(one.weights) is type(other.weights)
            if isinstance(one.weights, torch.Tensor):
                torch.testing.assert_close(one.weights, other.weights, rtol=0, atol=max(1e-3, TOLERANCE[dtype]))

    with torch_threads(threads):
        check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("biases", [True, False])
def test_a_masked_row_is_zero_before_the_output_projection(dtype, biases):
    """The projection makes it the output bias, exactly. Its weights are zero."""
    spec = make_spec(24, 3, biases=biases)
    call = Call(randn(2, 5, 24), weights=WeightsWanted("heads"))
    allowed = torch.ones(2, 1, 5, 1, dtype=torch.bool)
    allowed[0, 0, 1], allowed[1, 0, 4] = False, False
    masked = call._replace(mask=CombinedMask(Sizes(2, 3, 5, 5), (Allowed(allowed),)))
    plain, answer = make_layer(spec, dtype).forward([call, masked])
    expected = make_tensors(spec)["output.bias"].to(dtype).float() if biases else torch.zeros(24)
    for b in range(2):
        for row in range(5):
            is_dead = not allowed[b, 0, row, 0]
            if is_dead:
                assert same_bits(answer.output[b, row], expected)
            else:
                torch.testing.assert_close(answer.output[b, row], plain.output[b, row], rtol=0, atol=TOLERANCE[dtype])
            assert full_weights(answer)[b, :, row].any() != is_dead


def test_a_row_masked_in_one_head_is_zero_in_that_head_alone():
    spec = make_spec(24, 3, has_output=False)
    query = randn(1, 4, 24)
    allowed = torch.ones(1, 3, 4, 4, dtype=torch.bool)
    allowed[0, 1, 2] = False
    mask = CombinedMask(Sizes(1, 3, 4, 4), (Allowed(allowed),))
    plain, answer = make_layer(spec).forward([Call(query), Call(query, mask=mask)])
    heads, whole = answer.output[0].unflatten(-1, (3, 8)), plain.output[0].unflatten(-1, (3, 8))
    assert not heads[2, 1].any()
    heads[2, 1] = whole[2, 1]
    torch.testing.assert_close(heads, whole, rtol=0, atol=TOLERANCE[torch.float32])


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf, 3e38])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_non_finite_values_of_one_sequence_change_no_other(dtype, poison):
    """Neither of another call nor of the same call."""
    spec = make_spec(22, 2)
    query_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    others = [Call(randn(1, rows, 22, seed=rows, dtype=query_dtype)) for rows in (1, 3, 14)]
    query = randn(2, 4, 22, seed=9, dtype=query_dtype)
    clean = Call(query.clone())
    query[1, 2] = poison
    poisoned = Call(query, weights=WeightsWanted("heads"))
    layer = make_layer(spec, dtype)
    batch = [others[0], poisoned, others[1], Call(query, key=query), others[2]]
    answers = layer.forward(batch)
    for i, call in ((0, others[0]), (2, others[1]), (4, others[2])):
        assert same_answers(answers[i], layer.forward([call])[0])
        assert torch.isfinite(answers[i].output).all()
    assert same_bits(answers[1].output[0], layer.forward([clean])[0].output[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("query_dtype", DTYPES, ids=str)
def test_an_answer_comes_in_the_dtype_of_its_query(dtype, query_dtype):
    """Calls of several dtypes share a batch; key and value may have yet other dtypes."""
    calls = [
        Call(randn(1, 3, 12, dtype=query_dtype)),
        Call(randn(1, 3, 12), randn(1, 2, 12, dtype=query_dtype), randn(1, 2, 12, dtype=torch.bfloat16)),
    ]
    layer = make_layer(make_spec(12, 3), dtype)
    assert [answer.output.dtype for answer in layer.forward(calls)] == [query_dtype, torch.float32]


def test_key_defaults_to_the_query_and_value_to_the_key():
    layer, query, key, value = make_layer(make_spec(12, 3), torch.float64), *(randn(1, 4, 12, seed=i) for i in range(3))
    for short, long in (
        (Call(query), Call(query, query, query)),
        (Call(query, key), Call(query, key, key)),
        (Call(query, value=value), Call(query, query, value)),
    ):
        torch.testing.assert_close(layer.forward([short])[0].output, layer.forward([long])[0].output)


def test_non_contiguous_inputs_give_the_results_of_their_copies():
    layer = make_layer(make_spec(12, 3))
    wide = randn(4, 12, 24)
    for view in (wide[::2, ::3, ::2], wide.transpose(0, 1)[:2, :, 12:], wide[:1, :1, :12].expand(3, 5, 12)):
        assert same_answers(*layer.forward([Call(view), Call(view.contiguous())]))


def test_a_combined_mask_of_no_masks_is_no_mask():
    layer, query = make_layer(make_spec(12, 3)), randn(1, 4, 12)
    empty = Call(query, mask=CombinedMask(Sizes(1, 3, 4, 4), ()))
    assert same_answers(*layer.forward([Call(query), empty]))


def test_a_layer_keeps_no_reference_to_its_source_tensors():
    tensors = make_tensors(spec := make_spec(12, 3, has_bias_kv=True))
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    layer = type(make_layer(spec))(spec, tensors, dtype=torch.float32, device=DEVICE)
    call = Call(randn(1, 4, 12))
    before = layer.forward([call])[0]
    for tensor in tensors.values():
        tensor.fill_(torch.nan)
    assert same_answers(before, layer.forward([call])[0])


def test_a_repeated_call_in_a_batch_gets_two_answers():
    layer, call = make_layer(make_spec(12, 3)), Call(randn(1, 4, 12))
    answers = layer.forward([call, Call(randn(1, 3, 12, seed=1)), call])
    assert same_answers(answers[0], answers[2])
    assert answers[1].output.shape == (1, 3, 12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 2, 3, 5])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 7), (7, 1), (2, 3)])
def test_the_smallest_shapes_work(dtype, width, queries, keys):
    """One row, one key, one head, one feature."""
    spec = make_spec(width, 1)
    wide = torch.promote_types(dtype, torch.float32)
    query, key = randn(1, queries, width, dtype=wide), randn(1, keys, width, seed=1, dtype=wide)
    mask = CombinedMask(Sizes(1, 1, queries, keys), (lengths(torch.tensor([[keys]])),))
    call = Call(query, key, mask=mask, weights=WeightsWanted("top_k", k=1))
    tensors = {name: tensor.to(dtype) for name, tensor in make_tensors(spec).items()}
    expected, _ = oracle.multi_head_attention(spec, as_arrays(tensors), oracle_inputs(call))
    assert_near(make_layer(spec, dtype).forward([call])[0].output, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_mask_of_every_kind_fits_a_layer_with_appended_columns(dtype):
    """The layer's own columns may always be attended to; a mask that blocks every key does not block them."""
    spec = make_spec(12, 3, has_bias_kv=True, add_zero_attn=True)
    wide = torch.promote_types(dtype, torch.float32)
    query, key, sizes = randn(2, 3, 12, dtype=wide), randn(2, 4, 12, seed=1, dtype=wide), Sizes(2, 3, 3, 4)
    blocked = np.zeros((1, 1, 1, 1), bool)
    kinds: list[oracle.Mask] = [
        oracle.Attend(blocked),
        oracle.Ignore(~blocked),
        oracle.Bias(np.full((2, 3, 3, 1), -np.inf, np.float32)),
        oracle.Bias(np.full((1, 1, 3, 4), 0.5, np.float32)),
        oracle.Lengths(np.array([0, 2])),
        oracle.Causal(-2),
        oracle.Window(0, 0, 0),
    ]
    tensors = {name: tensor.to(dtype) for name, tensor in make_tensors(spec).items()}
    for kind in kinds:
        call = Call(query, key, mask=engine_mask([kind], sizes), weights=WeightsWanted("heads", dtype=wide))
        expected, weights = oracle.multi_head_attention(spec, as_arrays(tensors), oracle_inputs(call), [kind])
        answer = make_layer(spec, dtype).forward([call])[0]
        assert_near(answer.output, expected, TOLERANCE[dtype])
        assert_near(full_weights(answer), weights, TOLERANCE[dtype])
        assert torch.allclose(full_weights(answer).sum(-1), torch.ones(1, dtype=wide))
