"""The same attention once more in float64 NumPy, from the layer's file: that references are right and not only the same.

Laws: written from the formula and the file's spec alone, nothing of the service; a layer whose file is not there, has another
digest or a dtype that NumPy does not know is not checked and is told so.
Legend: L rows of query and key, N heads, G key/value heads, E columns that the layer appends, H head width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from safetensors import SafetensorError, safe_open

from attention_load.layer import LayerFacts
from attention_load.question import Question
from attention_load.references import Reference

TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""Largest error, of the largest value of the tensor, for the dtype that the layer computes in."""

_DEFAULT = max(TOLERANCE.values())


@dataclasses.dataclass(slots=True)
class Float64Check:
    """`worst`: largest error as a share of the tolerance."""

    checked: int = 0
    worst: float = 0.0
    not_checked: list[str] = dataclasses.field(default_factory=list)
    wrong: list[str] = dataclasses.field(default_factory=list)

    def to_message(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def check_references(layers: Iterable[LayerFacts], references: Iterable[Reference], directory: Path) -> Float64Check:
    """All references of every layer whose file lies in the directory."""
    references, check = list(references), Float64Check()
    for layer in layers:
        stored = _stored(layer, directory, check)
        if stored is None:
            continue
        for reference in references:
            if reference.question.layer == layer.name:
                share = _share_of_tolerance(reference, *stored) / TOLERANCE.get(layer.numerics["dtype"], _DEFAULT)
                check.checked += 1
                check.worst = max(check.worst, share)
                if not share <= 1:
                    check.wrong.append(
                        f"{reference.question.kind} of {layer.name} is {share:.3g} times the tolerance off"
                    )
    return check


def _stored(
    layer: LayerFacts, directory: Path, check: Float64Check
) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
    try:
        with safe_open(directory / f"{layer.name}.safetensors", "np") as file:
            spec = orjson.loads((file.metadata() or {})["spec"])
            if spec["digest"] != layer.digest:
                check.not_checked.append(f"{layer.name}: the file has another digest")
                return None
            return spec, {name: file.get_tensor(name).astype(np.float64) for name in file.keys()}  # noqa: SIM118
    except (OSError, KeyError, ValueError, TypeError, SafetensorError) as error:
        check.not_checked.append(f"{layer.name}: {type(error).__name__}")
        return None


def _share_of_tolerance(reference: Reference, spec: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> float:
    """The largest error of any tensor, of that tensor's largest value."""
    output, weights = attention(spec, tensors, reference.question)
    wanted, found = {"output": output}, dict(reference.arrays)
    match reference.question.weights:
        case {"form": "heads"}:
            wanted["weights"] = weights
        case {"form": "mean"}:
            wanted["weights"] = weights.mean(0)
        case {"form": "top_k", "k": k}:
            order = -np.sort(-weights, -1)
            wanted["weights.values"], wanted["weights.rest"] = order[..., :k], order[..., k:].sum(-1)
            # Which of two almost equal keys comes first is rounding's business; what it points at is not.
            wanted["weights.at_indices"] = found["weights.values"]
            found["weights.at_indices"] = np.take_along_axis(weights, found.pop("weights.indices").astype(np.intp), -1)
    if wanted.keys() != found.keys():
        return float("inf")
    return max(_error(wanted[name], found[name]) for name in wanted)


def _error(wanted: np.ndarray, found: np.ndarray) -> float:
    if wanted.shape != found.shape:
        return float("inf")
    return float(np.abs(wanted - found).max() / max(np.abs(wanted).max(), 1e-3))


def attention(
    spec: Mapping[str, Any], tensors: Mapping[str, np.ndarray], question: Question
) -> tuple[np.ndarray, np.ndarray]:
    """Output [L, D] and weights [N, L, L + E]."""
    query = question.tensors["query"].astype(np.float64)
    key = question.tensors.get("key", query).astype(np.float64)
    value = question.tensors.get("value", key).astype(np.float64)

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return np.asarray(x @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", 0.0))

    keys, values = linear(key, "key"), linear(value, "value")
    if spec["has_bias_kv"]:
        keys, values = np.vstack([keys, tensors["bias_k"]]), np.vstack([values, tensors["bias_v"]])
    if spec["add_zero_attn"]:
        keys, values = (np.vstack([x, np.zeros(x.shape[1])]) for x in (keys, values))
    shared = spec["num_heads"] // spec["num_kv_heads"]
    q_NLH = _heads(linear(query, "query"), spec["num_heads"])
    k_NSH, v_NSH = (_heads(x, spec["num_kv_heads"]).repeat(shared, 0) for x in (keys, values))
    scores = spec["scale"] * q_NLH @ k_NSH.swapaxes(1, 2)
    if question.is_causal:
        scores[:, ~np.tri(len(query), scores.shape[2], dtype=bool) & (np.arange(scores.shape[2]) < len(key))] = -np.inf
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    weights = powers / powers.sum(-1, keepdims=True)
    context = (weights @ v_NSH).transpose(1, 0, 2).reshape(len(query), -1)
    return (linear(context, "output") if spec["has_output"] else context), weights


def _heads(x: np.ndarray, count: int) -> np.ndarray:
    return np.asarray(x.reshape(len(x), count, -1).swapaxes(0, 1))
