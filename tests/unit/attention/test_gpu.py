"""P1 on a GPU: the same bits in exact mode, a tolerance otherwise. P2 and the meaning of masks hold there too."""

from __future__ import annotations

import pytest
import torch

from service.attention.call import Call, WeightsWanted
from service.attention.engine import EngineOptions
from service.attention.masks import Added, Allowed, CombinedMask, Sizes, causal
from tests.attention_fixtures import (
    CPU,
    DEVICE,
    OneLayer,
    full_weights,
    make_layer,
    make_spec,
    make_tensors,
    randn,
    same_answers,
    same_bits,
)

GPU = torch.device("cuda") if DEVICE == CPU else DEVICE
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        GPU.type == "cuda" and not torch.cuda.is_available(), reason="no CUDA device: run it on a machine that has one"
    ),
]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
SPEC = make_spec(128, 4)
LENGTHS = (1, 7, 64, 3, 130, 12)
every_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


@pytest.fixture
def engine(dtype, request):
    is_exact = getattr(request, "param", False)
    found = OneLayer(EngineOptions(GPU, dtype, exact=is_exact), SPEC)
    yield found
    found.close()


def calls_of_several_lengths() -> list[Call]:
    found = []
    for i, length in enumerate(LENGTHS):
        sizes = Sizes(1, 4, length, length)
        mask = CombinedMask(sizes, (causal(sizes, 0),)) if i % 2 else None
        found.append(Call(randn(1, length, 128, seed=i), mask=mask))
    return found


@every_dtype
@pytest.mark.parametrize("engine", [True], indirect=True)
def test_exact_mode_gives_the_same_bits_alone_and_in_a_batch(engine):
    calls = calls_of_several_lengths()
    together = engine.run(calls).result()
    for call, answer in zip(calls, together, strict=True):
        assert same_answers(engine.run([call]).result()[0], answer)


@every_dtype
def test_by_default_a_shared_batch_changes_an_answer_within_the_tolerance(engine, dtype):
    calls = calls_of_several_lengths()
    together = engine.run(calls).result()
    for call, answer in zip(calls, together, strict=True):
        alone = engine.run([call]).result()[0]
        torch.testing.assert_close(alone.output, answer.output, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@every_dtype
def test_the_gpu_matches_the_cpu(engine, dtype):
    scores = WeightsWanted("heads", stage="scaled")
    calls = [
        call._replace(weights=WeightsWanted(form), scores=scores, has_lse=True, has_entropy=True)
        for call in calls_of_several_lengths()
        for form in ("heads", "contributions")
    ]
    expected = make_layer(SPEC, torch.float64).forward(calls)
    for one, other in zip(engine.run(calls).result(), expected, strict=True):
        for name in ("output", "weights", "scores", "lse", "entropy"):
            pair = getattr(one, name), getattr(other, name).float()
            torch.testing.assert_close(*pair, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@every_dtype
def test_no_request_changes_a_bit_on_a_gpu(engine):
    for call in calls_of_several_lengths():
        asked = call._replace(weights=WeightsWanted("top_k", k=1), has_lse=True, has_entropy=True)
        assert same_bits(engine.run([call]).result()[0].output, engine.run([asked]).result()[0].output)


@every_dtype
def test_masked_rows_are_zero_and_finite_biases_stay_finite_on_a_gpu(engine, dtype):
    """A row without a key becomes the output bias; -1e38 is a bias, not a mask."""
    sizes, query = Sizes(1, 4, 5, 5), randn(1, 5, 128)
    allowed = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    allowed[:, :, 2] = False
    expected = make_tensors(SPEC)["output.bias"].to(dtype).float()
    for mask in (Allowed(allowed), Added(torch.where(allowed, 0.0, -torch.inf))):
        call = Call(query, mask=CombinedMask(sizes, (mask,)), weights=WeightsWanted("heads"))
        answer = engine.run([call]).result()[0]
        assert torch.isfinite(answer.output).all()
        torch.testing.assert_close(answer.output[0, 2], expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        assert not full_weights(answer)[0, :, 2].any()
    low = CombinedMask(sizes, (Added(torch.full((1, 1, 1, 1), -1e38)),))
    answer = engine.run([Call(query, mask=low, weights=WeightsWanted("heads"))]).result()[0]
    torch.testing.assert_close(full_weights(answer).sum(-1), torch.ones(1, 4, 5))
    assert torch.isfinite(answer.output).all()
