"""Parity: what a stored layer is compared with, and how its module is found in a model of transformers."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from service.attention import reference
from service.attention.spec import MAX_POSITION, LayerSpec, Rotary, Window
from service.commands import parity
from service.layers.store import StoredLayer
from tests.unit.layers.checkpoints import random

WIDTH, HEADS, WORDS = 16, 4, 11


def stored(change: float = 0.0, **options: object) -> StoredLayer:
    fields: dict = dict(num_heads=HEADS, num_kv_heads=HEADS, head_width=4, value_head_width=4, scale=0.5) | options
    fields |= dict.fromkeys(("query_width", "key_width", "value_width", "out_width"), WIDTH)
    spec = LayerSpec(**fields)
    shapes = enumerate(spec.tensor_shapes().items())
    tensors = {name: random(*shape, seed=seed) / WIDTH**0.5 for seed, (name, shape) in shapes}
    tensors["value.weight"][3, 3] += change
    return StoredLayer("mine", spec, tensors, "source", "llama")


class Attention(nn.Module):
    """As an attention module of transformers: one tensor for query, key and value, and the output's transposed."""

    def __init__(self, layer: StoredLayer) -> None:
        super().__init__()
        weights = {name.partition(".")[0]: tensor for name, tensor in layer.tensors.items()}
        self.together, self.last = nn.Linear(WIDTH, 3 * WIDTH, bias=False), Transposed(weights["output"])
        self.together.weight = nn.Parameter(torch.cat([weights[name] for name in ("query", "key", "value")]))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value = self.together(x).view(1, -1, 3, HEADS, 4).permute(2, 0, 3, 1, 4)
        scores = query @ key.mT / 2
        weights = scores.softmax(-1)
        return x + self.last((weights @ value).transpose(1, 2).reshape(x.shape)), scores, weights


class Transposed(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.T.contiguous())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Model(nn.Module):
    """Its module follows another of the same kind."""

    def __init__(self, layer: StoredLayer) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(vocab_size=WORDS, max_position_embeddings=26)
        self.config.get_text_config = lambda: self.config
        self.config.to_dict = lambda: {"pad_token_id": 0, "eos_token_id": [1]}
        self.embedding, self.first, self.second = (
            nn.Embedding(WORDS, WIDTH),
            Attention(stored(num_heads=4)),
            Attention(layer),
        )
        nn.init.normal_(self.first.last.weight)
        nn.init.normal_(self.first.together.weight)

    def forward(self, input_ids: torch.Tensor) -> Any:
        assert input_ids.shape == (1, 24)
        assert input_ids.min() > 0
        return self.second(self.first(self.embedding(input_ids))[0])[0]


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "config.json").touch()
    return tmp_path


@pytest.fixture
def transformers(monkeypatch):
    """Take the place of the library: what it loads, or raises, is set by a test."""
    library, hub = types.ModuleType("transformers"), types.ModuleType("huggingface_hub")
    library.__spec__ = importlib.machinery.ModuleSpec("transformers", None)
    asked: dict = {}

    def load(source: Path, **options: object) -> Any:
        asked.update(options, source=source)
        if isinstance(asked["gives"], Exception):
            raise asked["gives"]
        return asked["gives"]

    quiet = types.SimpleNamespace(set_verbosity_error=lambda: None, disable_progress_bar=lambda: None)
    vars(library).update(
        __version__="5.x",
        AutoModel=types.SimpleNamespace(from_pretrained=load),
        utils=types.SimpleNamespace(logging=quiet),
    )
    hub.__dict__["constants"] = asked["constants"] = types.SimpleNamespace(HF_HUB_OFFLINE=False)
    monkeypatch.setitem(sys.modules, "transformers", library)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    return asked


@pytest.mark.parametrize(("change", "expected"), [(0.0, True), (1e-3, False)])
def test_a_layer_is_compared_with_the_module_that_has_its_tensors(transformers, directory, change, expected):
    transformers["gives"] = Model(stored())
    is_close, errors, used = parity.with_source(stored(change), stored(), directory)
    assert (is_close, used) == (expected, "transformers 5.x")
    assert (float(errors.split("output ")[1].split(" ")[0]) < 1e-5) is expected
    assert float(errors.split("weights ")[1]) < 1e-5


def test_transformers_neither_asks_the_network_nor_runs_code_of_the_checkpoint(transformers, directory):
    transformers["gives"] = Model(stored())
    parity.with_source(stored(), stored(), directory)
    assert transformers["constants"].HF_HUB_OFFLINE
    assert (transformers["local_files_only"], transformers["trust_remote_code"]) == (True, False)
    assert (transformers["attn_implementation"], transformers["dtype"]) == ("eager", torch.float32)


@pytest.mark.parametrize(
    ("gives", "why"),
    [
        (OSError("no weights\nhere"), "no weights\\nhere"),
        (nn.Linear(WIDTH, WIDTH), "no modules of Linear have the layer's tensors"),
        (nn.ModuleList([Attention(stored()), Attention(stored())]), "2 modules of ModuleList have the layer's tensors"),
    ],
    ids=str,
)
def test_what_transformers_cannot_do_is_compared_with_float64_and_says_why(transformers, directory, gives, why):
    transformers["gives"] = gives
    is_close, _, used = parity.with_source(stored(), stored(), directory)
    assert (is_close, used) == (True, f"float64 (not with transformers: {why})")


def test_a_check_says_why_it_needs_no_transformers(directory, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert parity.with_source(stored(), stored(), directory)[2] == "float64 (transformers is not installed)"
    expected = "float64 (the source is no directory with a config.json)"
    assert parity.with_source(stored(), stored(), tmp_path / "x.safetensors")[2] == expected


PARTS = [
    {"rotary": Rotary("half", (1.0, 0.01))},
    {"window": Window(3, 0)},
    {"window": Window(100, None), "rotary": Rotary("interleaved", (1.0,))},
]


@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_float64_covers_the_parts_of_a_layer(parts, monkeypatch):
    """Rows lie at the edge of the window and just behind it, and at the largest positions."""
    seen: list = []
    attend = reference.attend

    def watched(*given: Any, **places: Any) -> Any:
        seen.append(places["positions"])
        return attend(*given, **places)

    monkeypatch.setattr(reference, "attend", watched)
    assert parity.with_float64(stored(**parts), stored(**parts))[0]
    assert not parity.with_float64(stored(0.05, **parts), stored(**parts))[0]
    distances = set((seen[0][:, None] - seen[0]).flatten().tolist())
    left = parts["window"].left if "window" in parts else 1
    assert distances >= {left, left + 1}
    assert seen[0].max() == MAX_POSITION - 1


@pytest.mark.parametrize(("scale", "expected"), [(0.5, False), (50.0, True)])
def test_weights_of_large_scores_may_differ_by_what_float32_rounds(monkeypatch, scale, expected):
    """Trained layers have scores a hundred apart on random rows, and weights that differ by 1.6e-4."""
    attend = reference.attend

    def rounded(*given: Any, **places: Any) -> Any:
        output, weights = attend(*given, **places)
        return output, weights * (1 - 1.6e-4 / weights.max())

    monkeypatch.setattr(reference, "attend", rounded)
    assert parity.with_float64(stored(scale=scale), stored(scale=scale))[0] is expected
