"""Reference implementation of a layer and of attention without one in float64 NumPy, written for clarity, not for speed.

Legend: B sequences, L query rows, S key rows, N heads, G key/value heads, H and V head widths. Invariant: It shares no code with
the fast path. `layers import` and `check`, `compare` and `golden` compare with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from service.attention.spec import LayerSpec

Arrays = Mapping[str, np.ndarray]
# What overflows becomes infinity or NaN, which callers compare; NumPy would print warnings with paths.
_quiet = np.errstate(all="ignore")


@_quiet
def attend(
    spec: LayerSpec, tensors: Arrays, query: np.ndarray, key: np.ndarray, value: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Attend to one unmasked sequence (Vaswani et al. 2017, section 3.2): output [L, D] and weights [N, L, S] in float64.

    `query` is [L, Dq], `key` [S, Dk], `value` [S, Dv]; `tensors` have the names of `spec.tensor_shapes()`.
    """
    q = _projected(tensors, "query", query, spec.num_heads)
    k = _projected(tensors, "key", key, spec.num_kv_heads)
    v = _projected(tensors, "value", value, spec.num_kv_heads)
    if spec.has_bias_kv:
        k, v = _appended(k, tensors["bias_k"]), _appended(v, tensors["bias_v"])
    if spec.add_zero_attn:
        k, v = _appended(k, np.zeros(k.shape[0] * k.shape[2])), _appended(v, np.zeros(v.shape[0] * v.shape[2]))
    k, v = (np.repeat(x, spec.num_heads // spec.num_kv_heads, axis=0) for x in (k, v))
    scores = q @ k.transpose(0, 2, 1) * spec.scale
    weights, _ = _softmax(scores, np.array(-np.inf))
    context = (weights @ v).transpose(1, 0, 2).reshape(len(query), -1)
    return (_linear(tensors, "output", context) if spec.has_output else context), weights


@_quiet
def scaled_dot_product(
    inputs: Sequence[np.ndarray],
    added: np.ndarray,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
    is_capped_last: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Attend from query [B, N, L, H] to key [B, G, S, H] and value [B, G, S, V]: output [B, N, L, V] and log-sum-exp [B, N, L].

    `added` broadcasts to [B, N, L, S] and joins the scores, -inf = may not attend. The softcap comes before it, or after it with
    `is_capped_last`. `sinks` [N] count only in the denominator. A row that may attend to nothing gives zeros.
    """
    q, k, v = (x.astype(np.float64) for x in inputs)
    k, v = (np.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    scores = q @ k.swapaxes(2, 3) * scale
    scores = _capped(scores + added, softcap) if is_capped_last else _capped(scores, softcap) + added
    sink = np.full((len(q[0]), 1, 1), -np.inf) if sinks is None else sinks.astype(np.float64).reshape(-1, 1, 1)
    weights, lse = _softmax(scores, sink)
    return weights @ v, lse


def added_by(mask: Mapping[str, Any], rows: int, keys: int) -> np.ndarray:
    """Return what a mask adds to the scores, -inf = may not attend; it broadcasts to [B, N, L, S].

    `mask` has the fields of a mask of a request, with its values as an array, `align` and `axes` given, and no offset.
    """
    if mask["kind"] in ("causal", "window"):
        # For each query row and key: how many keys the key lies before the row's own key.
        before = np.arange(rows)[:, None] + (keys - rows) * (mask["align"] == "bottom_right") - np.arange(keys)
        blocked = before < 0 if mask["kind"] == "causal" else (before > mask["left"]) | (before < -mask["right"])
    elif mask["kind"] == "lengths":
        blocked = np.arange(keys) >= mask["values"][:, None, None, None]
    else:
        sizes = dict(zip(mask["axes"], mask["values"].shape, strict=True))
        table: np.ndarray = mask["values"].reshape([sizes.get(axis, 1) for axis in "bhls"])
        if mask["kind"] == "bias":
            return table.astype(np.float64)
        blocked = table == (mask["kind"] == "ignore")
    return np.where(blocked, -np.inf, 0.0)


def _softmax(scores: np.ndarray, sink: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the weights over the last axis, and the log-sum-exp; `sink` counts only in the denominator."""
    top = np.maximum(scores.max(axis=-1, keepdims=True), sink)
    top = np.where(np.isneginf(top), 0.0, top)
    exponentials = np.exp(scores - top)
    total = exponentials.sum(axis=-1, keepdims=True) + np.exp(sink - top)
    return exponentials / np.where(total > 0, total, 1.0), (np.log(total) + top)[..., 0]


def _capped(scores: np.ndarray, softcap: float | None) -> np.ndarray:
    return scores if softcap is None else softcap * np.tanh(scores / softcap)


def _linear(tensors: Arrays, name: str, x: np.ndarray) -> np.ndarray:
    y: np.ndarray = x.astype(np.float64) @ tensors[f"{name}.weight"].astype(np.float64).T
    bias = tensors.get(f"{name}.bias")
    return y if bias is None else y + bias.astype(np.float64)


def _projected(tensors: Arrays, name: str, x: np.ndarray, heads: int) -> np.ndarray:
    """Return the projection [rows, heads · width] as [heads, rows, width]."""
    return _linear(tensors, name, x).reshape(len(x), heads, -1).transpose(1, 0, 2)


def _appended(x: np.ndarray, column: np.ndarray) -> np.ndarray:
    """Append one row to every head."""
    return np.concatenate([x, column.astype(np.float64).reshape(x.shape[0], 1, x.shape[2])], axis=1)
