"""Layers with parts: rotary positions, norms, relative bias, window, softcap and sinks, against the reference and bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from service.attention import reference
from service.attention.call import Answer, Call, WeightsWanted
from service.attention.masks import Sizes
from service.attention.spec import LayerSpec
from tests.attention_fixtures import (
    DTYPES,
    as_arrays,
    full_weights,
    make_layer,
    make_tensors,
    may_run_apart,
    same_answers,
    settled,
)
from tests.strategies import calls, extras_wanted, placed, seeds, short_lengths, specs_with_parts

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-1, torch.float16: 2e-2}
narrow_widths = st.integers(1, 40)


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
def test_any_parts_match_the_reference(dtype):
    @settings(max_examples=60)
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
def test_parts_keep_the_bits_of_a_sequence_in_any_batch_and_beside_any_request(dtype):
    """P1 and P2."""

    @settings(max_examples=25)
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
