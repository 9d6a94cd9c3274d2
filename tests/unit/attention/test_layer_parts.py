"""Layers with parts: rotary positions, norms, relative bias, window, softcap and sinks, against the reference and bit for bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from service.attention import reference
from service.attention.call import Answer, Call, WeightsWanted
from service.attention.masks import Sizes
from service.attention.spec import LayerSpec, Norm, RelativeBias, Rotary, Window
from tests.attention_fixtures import (
    DTYPES,
    as_arrays,
    full_weights,
    keeps_bits,
    make_layer,
    make_spec,
    make_tensors,
    may_run_apart,
    randn,
    same_answers,
    same_bits,
    settled,
    windowed,
)
from tests.strategies import calls, extras_wanted, placed, seeds, short_lengths, specs_with_parts

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-1, torch.float16: 2e-2}
narrow_widths = st.integers(1, 40)
# Factors of a test's few draws: 1 in `make test`, more in `make test-long`.
TIMES = pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.long)])


def query_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def reference_answers(spec: LayerSpec, tensors: dict[str, torch.Tensor], call: Call) -> tuple[np.ndarray, np.ndarray]:
    """Output and weights of the reference, sequence by sequence."""
    found = []
    for one in call.sequences():
        old = [x[0].double().numpy() for x in (one.past_key, one.past_value) if x is not None]
        rows, keys = (x[0].numpy() for x in one.places)
        value = one.source if one.value is None else one.value
        q, k, v = (x[0].double().numpy() for x in (one.query, one.source, value))
        past = (old[0], old[1]) if old else None
        found.append(reference.attend(spec, as_arrays(tensors), q, k, v, rows, keys, past))
    output, weights = (np.stack(parts) for parts in zip(*found, strict=True))
    return output, weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@TIMES
def test_any_parts_match_the_reference(dtype, times):
    @settings(max_examples=15 * times)
    @given(st.data(), specs_with_parts(width=narrow_widths), seeds)
    def check(data, spec, seed):
        call = data.draw(calls(spec, dtype=query_dtype(dtype), rows=short_lengths, max_masks=0)).call
        call = data.draw(placed(spec, call))._replace(weights=WeightsWanted("heads", dtype=dtype))
        tensors = {name: tensor.to(dtype) for name, tensor in make_tensors(spec, seed).items()}
        answer = make_layer(spec, dtype, seed).forward([call])[0]
        output, weights = reference_answers(spec, tensors, call)
        most = TOLERANCE[dtype]
        np.testing.assert_allclose(
            answer.output.double().numpy(), output, rtol=0, atol=most * max(1, np.abs(output).max())
        )
        np.testing.assert_allclose(full_weights(answer).double().numpy(), weights, rtol=0, atol=most)

    check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@TIMES
def test_parts_keep_the_bits_of_a_sequence_in_any_batch_and_beside_any_request(dtype, times):
    """P1 and P2."""

    @settings(max_examples=6 * times)
    @given(st.data(), specs_with_parts(), seeds)
    def check(data, spec, seed):
        batch = [
            data.draw(placed(spec, data.draw(calls(spec, dtype=query_dtype(dtype), max_masks=1)).call))
            for _ in range(data.draw(st.integers(2, 4)))
        ]
        layer = make_layer(spec, dtype, seed)
        if may_run_apart(layer):
            settled(layer)
        together = layer.forward(batch)
        for call, answer in zip(batch, together, strict=True):
            assert same_answers(answer, layer.forward([call])[0])
        call = batch[0]._replace(weights=None, scores=None, has_lse=False, has_entropy=False, has_present=False)
        sizes = Sizes(len(call.query), spec.num_heads, call.query.shape[1], call.places[1].shape[1])
        asked = call._replace(**data.draw(extras_wanted(sizes)), has_present=True)
        bare = layer.forward([call])[0]
        assert same_answers(bare, Answer(layer.forward([asked, *batch])[0].output))
        layer.is_sequential = True
        assert same_answers(layer.forward(batch[:1])[0], together[0])

    check()


ROPE = Rotary("half", (1.0, 0.1, 0.01, 0.001))
DECODER = make_spec(
    32, 4, num_kv_heads=2, rotary=ROPE, norm=Norm("rms", "head", 1e-6), window=Window(None, 0), softcap=None
)


def test_a_step_behind_a_past_has_the_keys_of_the_whole_sequence_bit_for_bit():
    """Its output is that of the same row within rounding: a kernel over one row sums in another order."""
    layer, x = make_layer(DECODER), randn(1, 21, 32)
    whole = layer.forward([windowed(Window(None, 0), 4, Call(x, has_present=True))])[0]
    places = torch.arange(21)[None]
    past_key = past_value = None
    for row in range(21):
        step = Call(
            x[:, row : row + 1],
            positions=places[:, row : row + 1],
            key_positions=places[:, : row + 1],
            past_key=past_key,
            past_value=past_value,
            has_present=True,
        )
        answer = layer.forward([windowed(Window(None, 0), 4, step)])[0]
        past_key, past_value = answer.present_key, answer.present_value
        torch.testing.assert_close(answer.output[0, 0], whole.output[0, row], rtol=0, atol=1e-6)
    assert past_key is not None
    assert past_value is not None
    assert whole.present_key is not None
    assert whole.present_value is not None
    assert same_bits(past_key, whole.present_key)
    assert same_bits(past_value, whole.present_value)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, *(pytest.param(one, marks=pytest.mark.long) for one in DTYPES if one != torch.float32)],
    ids=str,
)
def test_a_layer_with_every_part_passes_its_self_check(dtype):
    spec = dataclasses.replace(DECODER, relative_bias=RelativeBias(32, 128, False), softcap=20.0, has_sinks=True)
    assert all(keeps_bits(settled(make_layer(one, dtype))) for one in (DECODER, spec))


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, 3e38, 1e30])
@pytest.mark.parametrize("part", ["norm", "rotary", "softcap", "relative_bias"])
def test_rows_that_may_not_attend_to_an_extreme_row_keep_their_bits(part, poison):
    """The extreme row is the last one, behind a causal window."""
    parts: dict[str, Any] = {
        "norm": DECODER.norm,
        "rotary": ROPE,
        "softcap": 20.0,
        "relative_bias": RelativeBias(32, 128, False),
    }
    layer = make_layer(make_spec(32, 4, **{part: parts[part]}))
    query = randn(1, 9, 32)
    clean = windowed(Window(None, 0), 4, Call(query.clone()))
    query[0, 8, 3] = poison
    found, expected = (layer.forward([call])[0].output for call in (clean._replace(query=query), clean))
    assert same_bits(found[:, :8], expected[:, :8])


def test_a_norm_of_the_largest_numbers_is_finite():
    """Their squares are beyond float32."""
    spec = make_spec(32, 4, norm=Norm("rms", "head", 1e-6), biases=False)
    query = randn(1, 9, 32)
    layer = make_layer(spec)
    weights = [full_weights(layer.forward([Call(x, weights=WeightsWanted("heads"))])[0]) for x in (query, query * 1e30)]
    torch.testing.assert_close(*weights, rtol=0, atol=1e-4)
