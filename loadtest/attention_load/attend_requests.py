"""The attend requests of the load, seeded: every process and every run sends the same bodies.

A request is never larger than the service allows for its layer, and key and value have as many rows as the query.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson
import safetensors.numpy

KINDS = {"short": 4, "mixed": 4, "long": 1, "weights": 2, "attention": 2}
"""How often each kind is sent, relative to the others."""

JSON = "application/json"
SAFETENSORS = "application/vnd.safetensors"
FORMS = {"lists": JSON, "base64": JSON, "safetensors": SAFETENSORS}

# The name of attention without a layer in answers, metrics and this load.
SDPA = "sdpa"
SHORT_ROWS, MIXED_ROWS, MIXED_REQUESTS = 16, (8, 256), 4
WEIGHTS: tuple[tuple[int, dict[str, Any]], ...] = (
    (48, {"form": "heads"}),
    (128, {"form": "mean"}),
    (128, {"form": "top_k", "k": 4}),
)
# One number of a nested list as text: sign, about eight digits, sometimes an exponent, a comma.
BYTES_OF_A_NUMBER = 13


@dataclasses.dataclass(frozen=True)
class AttendRequest:
    """`tensors` are float32 [rows, width]; `id` is the same in every process of a run."""

    id: str
    kind: str
    layer: str
    tensors: dict[str, np.ndarray]
    is_causal: bool = False
    weights: dict[str, Any] | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def path(self) -> str:
        return "/v1/attention" if self.layer == SDPA else f"/v1/layers/{self.layer}/attend"

    @functools.cached_property
    def bodies(self) -> dict[str, bytes]:
        """The same request in each form."""
        fields: dict[str, Any] = {**self.options, **({"masks": [{"kind": "causal"}]} if self.is_causal else {})}
        if self.weights is not None:
            fields["weights"] = self.weights
        return {
            "lists": orjson.dumps(self.tensors | fields, option=orjson.OPT_SERIALIZE_NUMPY),
            "base64": orjson.dumps({name: as_base64(array) for name, array in self.tensors.items()} | fields),
            "safetensors": safetensors.numpy.save(self.tensors, {"request": orjson.dumps(fields).decode()}),
        }


def as_base64(array: np.ndarray) -> dict[str, Any]:
    return {"dtype": "float32", "shape": array.shape, "data": base64.b64encode(array.tobytes()).decode()}


def layer_requests(layer: Mapping[str, Any], *, seed: int, long_tokens: int) -> list[AttendRequest]:
    """All requests to one layer, described as `GET /v1/layers` does."""
    name = layer["name"]
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    longest, found = max_rows(layer), list[AttendRequest]()

    def add(kind: str, rows: int, *, is_causal: bool = False, weights: dict[str, Any] | None = None) -> None:
        rows = min(rows, longest)
        if weights and "k" in weights:
            weights = {**weights, "k": min(rows, weights["k"])}
        tensors = {part: rng.standard_normal((rows, width), np.float32) for part, width in widths(layer).items()}
        found.append(AttendRequest(f"{name} {len(found)}", kind, name, tensors, is_causal, weights))

    for is_causal in (False, True):
        add("short", SHORT_ROWS, is_causal=is_causal)
    for number, rows in enumerate(rng.integers(*MIXED_ROWS, size=MIXED_REQUESTS, endpoint=True)):
        add("mixed", int(rows), is_causal=number % 2 == 1)
    add("long", long_tokens)
    for rows, weights in WEIGHTS:
        add("weights", rows, weights=weights)
    return found


def attention_requests(seed: int) -> list[AttendRequest]:
    """Requests without a layer: eight query heads of 64 that share two key and value heads, side by side."""
    rng = np.random.default_rng([seed, zlib.crc32(SDPA.encode())])
    options = {"layout": "packed", "num_heads": 8, "num_kv_heads": 2}
    sizes = {"query": 512, "key": 128, "value": 128}
    tensors = [
        {x: rng.standard_normal((SHORT_ROWS, width), np.float32) for x, width in sizes.items()} for _ in range(2)
    ]
    return [AttendRequest(f"{SDPA} {i}", "attention", SDPA, x, bool(i), options=options) for i, x in enumerate(tensors)]


def widths(layer: Mapping[str, Any]) -> dict[str, int]:
    """The tensors that a request must have: key defaults to query and value to key, where they are as wide."""
    query, key, value = (layer[f"{part}_width"] for part in ("query", "key", "value"))
    return {"query": query} | ({"key": key} if key != query else {}) | ({"value": value} if value != key else {})


def max_rows(layer: Mapping[str, Any]) -> int:
    """Rows of the longest request that the service accepts as nested lists, the largest form."""
    limits: Mapping[str, int] = layer["limits"]
    by_body = limits["body_bytes"] * 9 // 10 // (BYTES_OF_A_NUMBER * sum(widths(layer).values()))
    return max(1, min(by_body, limits["tokens"] // 2, math.isqrt(limits["cells"] // layer["num_heads"])))
