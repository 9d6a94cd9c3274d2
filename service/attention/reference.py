"""Reference implementation of a layer in float64 NumPy, written for clarity, not for speed.

Legend: L query rows, S key rows, N heads. Invariant: It shares no code with the fast path. `layers import` and `layers check`
compare with it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from service.attention.spec import LayerSpec

Arrays = Mapping[str, np.ndarray]


@np.errstate(all="ignore")  # what overflows becomes infinity or NaN, which callers compare
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
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = exponentials / exponentials.sum(axis=-1, keepdims=True)
    context = (weights @ v).transpose(1, 0, 2).reshape(len(query), -1)
    return (_linear(tensors, "output", context) if spec.has_output else context), weights


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
