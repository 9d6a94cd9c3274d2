"""What holds on a GPU alone, on the stand-in: what a batch asks of the device, its kernels, its memory.

`test_standin.py` runs this file with the plugin; pytest does not collect it by its name.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from service.attention import kernels
from service.attention.call import Call, WeightsWanted
from service.attention.engine import Engine, EngineOptions
from service.attention.layer import Layer
from service.attention.masks import Added, CombinedMask, Sizes, causal
from tests.attention_fixtures import CPU, OneLayer, make_spec, make_tensors, randn, same_answers
from tests.standin import device
from tests.standin.device import Counts, counted, register

DEVICE = register()
SPEC = make_spec(64, 4)
MIXED = range(8, 256, 16)
EQUAL = [16] * 16


def batch(lengths: Any, *, is_causal: bool = False, weights: WeightsWanted | None = None) -> list[Call]:
    calls = []
    for i, length in enumerate(lengths):
        sizes = Sizes(1, SPEC.num_heads, length, length)
        mask = CombinedMask(sizes, (causal(sizes, 0),)) if is_causal else None
        calls.append(Call(randn(1, length, 64, seed=i), mask=mask, weights=weights))
    return calls


@pytest.mark.parametrize(
    ("calls", "most"),
    [
        (batch(MIXED), Counts(launches=4, copies=3, waits=1)),
        (batch(EQUAL), Counts(launches=4, copies=3, waits=1)),
        (batch(MIXED, weights=WeightsWanted("heads")), Counts(launches=36, copies=19, waits=1)),
        (batch(MIXED, is_causal=True), Counts(launches=34, copies=18, waits=1)),
        (batch(EQUAL, weights=WeightsWanted("top_k", k=3)), Counts(launches=180, copies=51, waits=1)),
    ],
    ids=["mixed lengths", "one length", "all weights", "causal", "top_k"],
)
def test_a_batch_of_16_asks_little_of_the_device(calls, most):
    """Upper bounds: each launch costs the host some 5 µs, each wait stops it until the device is idle."""
    layer = Layer(SPEC, make_tensors(SPEC), dtype=torch.float32, device=DEVICE)
    with counted() as counts, torch.inference_mode():
        layer.forward(calls)
    assert counts.launches <= most.launches
    assert counts.copies <= most.copies
    assert counts.waits <= most.waits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("num_heads", [4, 32], ids=["heads of 16", "heads of 2"])
@pytest.mark.parametrize("has_kernel", [True, False], ids=["", "another torch"])
def test_outputs_and_weights_are_those_of_the_cpu_with_and_without_the_kernel_for_any_lengths(
    monkeypatch, dtype, num_heads, has_kernel
):
    """It knows no float64 and no heads whose rows are not aligned, and another torch may not have it."""
    if not has_kernel:
        monkeypatch.setattr(kernels, "_any_lengths", None)
    spec = make_spec(64, num_heads)
    calls = [Call(randn(2, n, 64, seed=n).to(dtype)) for n in (1, 7, 7, 33)]
    calls += [call._replace(weights=WeightsWanted("mean")) for call in calls[::2]]
    calls += [Call(randn(1, 5, 64), randn(1, 9, 64))]
    found, expected = (Layer(spec, make_tensors(spec), dtype=dtype, device=one).forward(calls) for one in (DEVICE, CPU))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.output, other.output, rtol=0.02, atol=0.02)
        torch.testing.assert_close(
            one.weights, other.weights, rtol=0.02, atol=0.02
        ) if one.weights is not None else None


@pytest.mark.parametrize("is_cross", [False, True])
def test_a_mask_that_hides_nothing_takes_the_kernel_of_no_mask(is_cross):
    query, key = randn(1, 5, 64), randn(1, 9, 64, seed=1) if is_cross else None
    sizes = Sizes(1, 4, 5, 9 if is_cross else 5)
    mask = CombinedMask(sizes, (Added(torch.zeros(1, 1, 1, 1)),))
    layer = Layer(SPEC, make_tensors(SPEC), dtype=torch.float32, device=DEVICE)
    ((without,), (hidden,)) = (layer.forward([Call(query, key, mask=one)]) for one in (None, mask))
    assert same_answers(without, hidden)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_largest_biases_stay_finite_inside_the_kernel(dtype, sign):
    """It multiplies scores by log2(e) in float32: as -inf the bias would mask every key, as inf make the row NaN."""
    sizes, query = Sizes(1, 4, 5, 5), randn(1, 5, 64)
    bias = Added(torch.full((1, 1, 1, 1), sign * torch.finfo(torch.float32).max))
    call = Call(query, mask=CombinedMask(sizes, (bias,)))
    (found,) = Layer(SPEC, make_tensors(SPEC), dtype=dtype, device=DEVICE).forward([call])
    (expected,) = Layer(SPEC, make_tensors(SPEC), dtype=dtype, device=CPU).forward([call])
    torch.testing.assert_close(found.output, expected.output, rtol=0.05, atol=0.05)


def test_no_shape_is_planned_by_cudnn():
    engine = OneLayer(EngineOptions(DEVICE, torch.bfloat16), SPEC)
    with counted() as counts:
        engine.run(batch(MIXED, is_causal=True)).result(60)
    engine.close()
    assert counts.launches
    assert not counts.plans


@pytest.mark.parametrize("is_exact", [False, True])
def test_exact_mode_keeps_the_verdict_of_the_self_check(monkeypatch, is_exact):
    """Calls share a pass where the self-check finds that bits do not depend on it; by default they always do."""
    engine = Engine(EngineOptions(DEVICE, torch.float32, exact=is_exact))
    for keeps in (True, False):
        monkeypatch.setattr("service.attention.self_check.checks", lambda _layer, keeps=keeps: iter([True, keeps]))
        assert engine.load(partial(Layer, SPEC, make_tensors(SPEC))).result(60).is_sequential is (
            is_exact and not keeps
        )
    engine.close()


def test_a_load_that_fails_gives_its_memory_back_to_the_device(monkeypatch):
    def fail(self, calls):
        raise torch.OutOfMemoryError("CUDA out of memory")

    engine = OneLayer(EngineOptions(DEVICE, torch.float32), SPEC)
    module = torch.get_device_module(DEVICE)
    before = module.num_emptied
    with monkeypatch.context() as patch:
        patch.setattr(Layer, "forward", fail)
        with pytest.raises(torch.OutOfMemoryError):
            engine.engine.load(partial(Layer, SPEC, make_tensors(SPEC))).result(60)
    engine.run(batch([4])).result(60)
    engine.close()
    assert module.num_emptied == before + 1


def test_operands_on_two_devices_fail_as_on_cuda():
    x = torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        x.to(DEVICE) + x


def test_calls_in_exact_mode_share_products_and_have_the_same_bits_alone_and_in_a_batch(monkeypatch):
    monkeypatch.setattr(device, "rounds_by_rows", True)
    engine = OneLayer(EngineOptions(DEVICE, torch.float32, exact=True), SPEC)
    assert not engine.loaded.is_sequential
    calls = batch(MIXED)
    for call, answer in zip(calls, engine.run(calls).result(60), strict=True):
        assert same_answers(engine.run([call]).result(60)[0], answer)
    engine.close()
