"""What holds on a GPU alone, on the stand-in: what a batch asks of the device, its kernels, its memory.

`test_standin.py` runs this file with the plugin; pytest does not collect it by its name.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from service.attention.call import Call, WeightsWanted
from service.attention.engine import Engine, EngineOptions
from service.attention.layer import Layer
from service.attention.masks import Added, CombinedMask, Sizes, causal
from tests.attention_fixtures import CPU, OneLayer, make_spec, make_tensors, randn, same_answers
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
        (batch(MIXED), Counts(launches=98, copies=32, waits=16)),
        (batch(EQUAL), Counts(launches=8, copies=32, waits=16)),
        (batch(MIXED, weights=WeightsWanted("heads")), Counts(launches=242, copies=56, waits=40)),
        (batch(MIXED, is_causal=True), Counts(launches=82, copies=48, waits=16)),
        (batch(EQUAL, weights=WeightsWanted("top_k", k=3)), Counts(launches=370, copies=80, waits=80)),
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
        assert engine.load(SPEC, make_tensors(SPEC)).result(60).is_sequential is (is_exact and not keeps)
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
            engine.engine.load(SPEC, make_tensors(SPEC)).result(60)
    engine.run(batch([4])).result(60)
    engine.close()
    assert module.num_emptied == before + 1


def test_operands_on_two_devices_fail_as_on_cuda():
    x = torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        x.to(DEVICE) + x


def test_attention_in_exact_mode_has_the_same_bits_alone_and_in_a_batch():
    engine = OneLayer(EngineOptions(DEVICE, torch.float32, exact=True), SPEC)
    calls = batch(MIXED)
    for call, answer in zip(calls, engine.run(calls).result(60), strict=True):
        assert same_answers(engine.run([call]).result(60)[0], answer)
    engine.close()
