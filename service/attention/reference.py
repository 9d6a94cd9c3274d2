"""Reference implementation of a layer in float64 NumPy, written for clarity, not for speed.

Legend: L query rows, S key rows, P of them past, N heads, G key/value heads, H head width, V value head width. Invariant: It
shares no code with the fast path. `layers import` and `layers check` compare with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from service.attention.spec import LayerSpec, Norm, RelativeBias, Rotary, Window

Arrays = Mapping[str, np.ndarray]


@np.errstate(all="ignore")  # what overflows becomes infinity or NaN, which callers compare
def attend(
    spec: LayerSpec,
    tensors: Arrays,
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    positions: np.ndarray | None = None,
    key_positions: np.ndarray | None = None,
    past: tuple[np.ndarray, np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Attend to one sequence (Vaswani et al. 2017, section 3.2) through the layer's window: output [L, D], weights [N, L, S].

    `query` is [L, Dq], `key` [S - P, Dk], `value` [S - P, Dv]; `tensors` have the names of `spec.tensor_shapes()`. `positions`
    [L] and `key_positions` [S] are 0, 1, … by default; `past` has the keys [G, P, H] and values [G, P, V] before these.
    """
    num_past = 0 if past is None else past[0].shape[1]
    positions = np.arange(len(query)) if positions is None else positions
    key_positions = np.arange(num_past + len(key)) if key_positions is None else key_positions
    q = _placed(spec, tensors, "query", query, positions)
    k = _placed(spec, tensors, "key", key, key_positions[num_past:])
    v = _projected(tensors, "value", value, spec.num_kv_heads)
    if past is not None:
        k, v = (np.concatenate([old.astype(np.float64), new], axis=1) for old, new in zip(past, (k, v), strict=True))
    if spec.has_bias_kv:
        k, v = _appended(k, tensors["bias_k"]), _appended(v, tensors["bias_v"])
    if spec.add_zero_attn:
        k, v = _appended(k, np.zeros(k.shape[0] * k.shape[2])), _appended(v, np.zeros(v.shape[0] * v.shape[2]))
    k, v = (np.repeat(x, spec.num_heads // spec.num_kv_heads, axis=0) for x in (k, v))
    scores = q @ k.transpose(0, 2, 1) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * np.tanh(scores / spec.softcap)
    distances = key_positions - positions[:, None]
    places = slice(0, len(key_positions))  # neither bias nor window applies to the appended columns
    if spec.relative_bias is not None:
        scores[..., places] += tensors["relative_bias"].T.astype(np.float64)[:, _buckets(spec.relative_bias, distances)]
    if spec.window is not None:
        scores[..., places][:, ~_is_visible(spec.window, distances)] = -np.inf
    weights = _softmax(scores, tensors["sinks"].astype(np.float64) if spec.has_sinks else None)
    context = (weights @ v).transpose(1, 0, 2).reshape(len(query), -1)
    return (_linear(tensors, "output", context) if spec.has_output else context), weights


def _linear(tensors: Arrays, name: str, x: np.ndarray) -> np.ndarray:
    y: np.ndarray = x.astype(np.float64) @ tensors[f"{name}.weight"].astype(np.float64).T
    bias = tensors.get(f"{name}.bias")
    return y if bias is None else y + bias.astype(np.float64)


def _projected(tensors: Arrays, name: str, x: np.ndarray, heads: int) -> np.ndarray:
    """Return the projection [rows, heads · width] as [heads, rows, width]."""
    return _linear(tensors, name, x).reshape(len(x), heads, -1).transpose(1, 0, 2)


def _placed(spec: LayerSpec, tensors: Arrays, name: str, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return query or key, projected, normalised and rotated, as [heads, rows, width]."""
    found = _projected(tensors, name, x, spec.num_heads if name == "query" else spec.num_kv_heads)
    if spec.norm is not None:
        found = _normalised(spec.norm, tensors, f"{name}_norm", found)
    return found if spec.rotary is None else _rotated(spec.rotary, found, positions)


def _normalised(norm: Norm, tensors: Arrays, name: str, x: np.ndarray) -> np.ndarray:
    heads, rows, width = x.shape
    x = x.transpose(1, 0, 2)
    x = x.reshape(rows, 1, heads * width) if norm.over == "width" else x
    if norm.kind == "layer":
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + norm.eps)
    x = x * (norm.plus_one + tensors[f"{name}.weight"].astype(np.float64))
    if norm.has_bias:
        x = x + tensors[f"{name}.bias"].astype(np.float64)
    return x.reshape(rows, heads, width).transpose(1, 0, 2)


def _rotated(rotary: Rotary, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Turn each pair (a, b) to (a·cos - b·sin, b·cos + a·sin); models round the angles to float32 in every dtype."""
    frequencies = np.array(rotary.inverse_frequencies, np.float32)
    angles = (positions.astype(np.float32)[:, None] * frequencies).astype(np.float64)
    cos, sin = rotary.attention_factor * np.cos(angles), rotary.attention_factor * np.sin(angles)
    features = np.arange(rotary.width)
    first, second = features.reshape(2, -1) if rotary.layout == "half" else features.reshape(-1, 2).T
    found = x.copy()
    found[..., first] = x[..., first] * cos - x[..., second] * sin
    found[..., second] = x[..., second] * cos + x[..., first] * sin
    return found


def _buckets(part: RelativeBias, distances: np.ndarray) -> np.ndarray:
    """Return the bucket of each key position minus query position (T5); its logarithms are float32 in every dtype."""
    buckets = part.buckets // 2 if part.is_bidirectional else part.buckets
    far = np.abs(distances) if part.is_bidirectional else -np.minimum(distances, 0)
    exact = buckets // 2
    logs = np.log(np.maximum(far, 1).astype(np.float32) / np.float32(exact))
    share = logs / np.float32(math.log(part.max_distance / exact))
    wide = exact + (share * np.float32(buckets - exact)).astype(np.int64)
    found = np.where(far < exact, far, np.minimum(wide, buckets - 1))
    return np.asarray(found + buckets * (part.is_bidirectional & (distances > 0)))


def _is_visible(window: Window, distances: np.ndarray) -> np.ndarray:
    left, right = (math.inf if side is None else side for side in (window.left, window.right))
    visible: np.ndarray = (distances >= -left) & (distances <= right)
    return visible


def _softmax(scores: np.ndarray, sinks: np.ndarray | None) -> np.ndarray:
    """Return the softmax over the last axis, where a sink [N] is one more key; a row without a visible key is zero."""
    if sinks is not None:
        return _softmax(_appended(scores, np.repeat(sinks, scores.shape[1]), axis=2), None)[..., :-1]
    top = scores.max(axis=-1, keepdims=True)
    exponentials = np.exp(scores - np.where(np.isneginf(top), 0.0, top))
    total = exponentials.sum(axis=-1, keepdims=True)
    weights: np.ndarray = exponentials / np.where(total == 0, 1.0, total)
    return weights


def _appended(x: np.ndarray, column: np.ndarray, axis: int = 1) -> np.ndarray:
    """Append one row to every head, or with `axis` 2 one column."""
    shape = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
    return np.concatenate([x, column.astype(np.float64).reshape(shape)], axis=axis)
