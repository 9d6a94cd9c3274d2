"""Question: one request of the load, with its bodies in three forms made before the load begins.

Laws: seeded, so that every process of a run, and the next run, asks the same; key and value have as many rows as the query;
a question is never longer than its layer takes.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import zlib
from typing import Any

import numpy as np
import orjson
import safetensors.numpy

from attention_load.layer import LayerFacts

KINDS = {"short": 4, "mixed": 4, "long": 1, "weights": 2}
"""How often each kind is asked, relative to the others."""

JSON = "application/json"
SAFETENSORS = "application/vnd.safetensors"
FORMS = {"lists": JSON, "base64": JSON, "safetensors": SAFETENSORS}

SHORT_ROWS = 16
MIXED_ROWS = (8, 256)
MIXED_QUESTIONS = 4
CAUSAL = ({"kind": "causal"},)
WEIGHTS: tuple[tuple[int, dict[str, Any]], ...] = (
    (48, {"form": "heads"}),
    (128, {"form": "mean"}),
    (128, {"form": "top_k", "k": 4}),
)


@dataclasses.dataclass(frozen=True)
class Question:
    """`tensors` are float32 [rows, width]."""

    kind: str
    layer: str
    tensors: dict[str, np.ndarray]
    is_causal: bool = False
    weights: dict[str, Any] | None = None

    @property
    def path(self) -> str:
        return f"/v1/layers/{self.layer}/attend"

    @property
    def rows(self) -> int:
        return len(self.tensors["query"])

    @functools.cached_property
    def bodies(self) -> dict[str, bytes]:
        return {form: self._body(form) for form in FORMS}

    def _body(self, form: str) -> bytes:
        fields: dict[str, Any] = {}
        if self.is_causal:
            fields["masks"] = CAUSAL
        if self.weights is not None:
            fields["weights"] = self.weights
        match form:
            case "lists":
                return orjson.dumps({**self.tensors, **fields}, option=orjson.OPT_SERIALIZE_NUMPY)
            case "base64":
                return orjson.dumps({**{name: _packed(array) for name, array in self.tensors.items()}, **fields})
            case _:
                return safetensors.numpy.save(self.tensors, {"request": orjson.dumps(fields).decode()})


def _packed(array: np.ndarray) -> dict[str, Any]:
    data = base64.b64encode(array.tobytes()).decode()
    return {"dtype": array.dtype.name, "shape": array.shape, "data": data}


def layer_questions(layer: LayerFacts, *, seed: int, long_tokens: int) -> list[Question]:
    """All that one layer is asked, of every kind."""
    rng = np.random.default_rng([seed, zlib.crc32(layer.name.encode())])

    def question(kind: str, rows: int, **more: Any) -> Question:
        rows = min(rows, layer.max_rows)
        tensors = {name: rng.standard_normal((rows, width), np.float32) for name, width in layer.widths().items()}
        return Question(kind, layer.name, tensors, **more)

    mixed = rng.integers(*MIXED_ROWS, size=MIXED_QUESTIONS, endpoint=True)
    return [
        question("short", SHORT_ROWS),
        question("short", SHORT_ROWS, is_causal=True),
        *(question("mixed", int(rows), is_causal=number % 2 == 1) for number, rows in enumerate(mixed)),
        question("long", long_tokens),
        *(
            question("weights", rows, weights={**asked, "k": min(rows, layer.max_rows, asked["k"])})
            if "k" in asked
            else question("weights", rows, weights=asked)
            for rows, asked in WEIGHTS
        ),
    ]
