"""Oracle: multi-head attention in float64 NumPy, with a layer or without one, written from the contract alone.

It shares no code with `service/attention` except LayerSpec: no torch, no packing, no combined mask. Every mask says for each pair
of query row and key what it means.
Legend: B sequences, N heads, L query rows, S key rows, E appended columns, D widths.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from service.attention.spec import LayerSpec


@dataclasses.dataclass(frozen=True)
class Attend:
    """True = this query row may attend to this key; values [B|1, N|1, L|1, S|1]."""

    values: np.ndarray


@dataclasses.dataclass(frozen=True)
class Ignore:
    """True = blocked; values [B|1, N|1, L|1, S|1]."""

    values: np.ndarray


@dataclasses.dataclass(frozen=True)
class Bias:
    """Added to the scaled scores; -inf = blocked; values [B|1, N|1, L|1, S|1]."""

    values: np.ndarray


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Only the first n keys; values [B] or [B, L]."""

    values: np.ndarray


@dataclasses.dataclass(frozen=True)
class Causal:
    """Query i sees keys up to i + offset; `offset` is one for all sequences, or one for each."""

    offset: int | tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Window:
    """Query i sees keys from i + offset - left to i + offset + right; None = open. `offset` as in Causal."""

    offset: int | tuple[int, ...]
    left: int | None
    right: int | None


Mask = Attend | Ignore | Bias | Lengths | Causal | Window


def may_attend(masks: Sequence[Mask], shape: tuple[int, int, int, int]) -> np.ndarray:
    """bool [B, N, L, S]: the pairs that every mask allows."""
    b, _, i, j = np.indices(shape, sparse=True)
    allowed = np.ones(shape, bool)
    for mask in masks:
        match mask:
            case Attend(values):
                allowed &= values
            case Ignore(values):
                allowed &= ~values
            case Bias(values):
                allowed &= ~np.isneginf(values)
            case Lengths(values):
                allowed &= j < (values[b] if values.ndim == 1 else values[b, i])
            case Causal(offset):
                allowed &= _in_window(Window(offset, None, 0), shape)
            case Window():
                allowed &= _in_window(mask, shape)
    return allowed


def _in_window(mask: Window, shape: tuple[int, int, int, int]) -> np.ndarray:
    """bool [B|1, 1, L, S], in Python's integers: an offset may be beyond int64."""
    offsets = (mask.offset,) if isinstance(mask.offset, int) else mask.offset
    i, j = np.indices(shape[2:], sparse=True)
    distance = j.astype(object) - i - np.array(offsets, object)[:, None, None, None]
    allowed = np.ones(distance.shape, bool)
    if mask.left is not None:
        allowed &= (distance >= -mask.left).astype(bool)
    if mask.right is not None:
        allowed &= (distance <= mask.right).astype(bool)
    return allowed


def added_bias(masks: Sequence[Mask], shape: tuple[int, int, int, int]) -> np.ndarray:
    """float64 [B, N, L, S]: the sum of the finite biases."""
    total = np.zeros(shape)
    for mask in masks:
        if isinstance(mask, Bias):
            total += np.where(np.isneginf(mask.values), 0.0, mask.values.astype(np.float64))
    return total


def softmax(scores: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """Over the last axis and the allowed places alone; a row without any is zero."""
    top = np.max(scores, axis=-1, keepdims=True, where=allowed, initial=-np.inf)
    powers = np.where(allowed, np.exp(np.where(allowed, scores - np.where(np.isfinite(top), top, 0.0), 0.0)), 0.0)
    total = powers.sum(-1, keepdims=True)
    return powers / np.where(total > 0, total, 1.0)


def multi_head_attention(
    spec: LayerSpec,
    tensors: Mapping[str, np.ndarray],
    inputs: tuple[np.ndarray, np.ndarray, np.ndarray],
    masks: Sequence[Mask] = (),
) -> tuple[np.ndarray, np.ndarray]:
    """Output [B, L, D] and weights [B, N, L, S + E] of (query, key, value), each [B, rows, width]."""
    found = multi_head(spec, tensors, inputs, masks)
    return found.output, found.weights


@dataclasses.dataclass(frozen=True)
class Attention:
    """Output; weights, the scores of each stage and contributions [B, N, L, S + E]; lse and entropy [B, N, L]."""

    output: np.ndarray
    weights: np.ndarray
    scaled: np.ndarray
    capped: np.ndarray
    masked: np.ndarray
    lse: np.ndarray
    entropy: np.ndarray
    contributions: np.ndarray


def multi_head(
    spec: LayerSpec,
    tensors: Mapping[str, np.ndarray],
    inputs: tuple[np.ndarray, np.ndarray, np.ndarray],
    masks: Sequence[Mask] = (),
) -> Attention:
    """Attention with a layer, of (query, key, value), each [B, rows, width]; output [B, L, D]."""
    t = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x.astype(np.float64) @ t[f"{name}.weight"].T + t.get(f"{name}.bias", 0.0)

    def heads(x: np.ndarray, count: int) -> np.ndarray:
        return x.reshape(*x.shape[:2], count, -1).transpose(0, 2, 1, 3)

    query, key, value = inputs
    q = heads(linear(query, "query"), spec.num_heads)
    k, v = (heads(linear(x, name), spec.num_kv_heads) for x, name in ((key, "key"), (value, "value")))
    k, v = _appended(spec, t, k, "bias_k"), _appended(spec, t, v, "bias_v")
    # Query head n reads key/value head n // (N / G).
    k, v = (np.stack([x[:, n * spec.num_kv_heads // spec.num_heads] for n in range(spec.num_heads)], 1) for x in (k, v))
    shape = (len(query), spec.num_heads, query.shape[1], key.shape[1])
    extra = [(0, 0)] * 3 + [(0, k.shape[2] - key.shape[1])]
    allowed = np.pad(may_attend(masks, shape), extra, constant_values=True)
    scaled = spec.scale * q @ k.swapaxes(2, 3)
    scores = scaled + np.pad(added_bias(masks, shape), extra)
    weights = softmax(scores, allowed)
    context = (weights @ v).transpose(0, 2, 1, 3).reshape(*query.shape[:2], -1)
    output = linear(context, "output") if spec.has_output else context
    masked = np.where(allowed, scores, -np.inf)
    with np.errstate(divide="ignore"):
        top = np.max(masked, axis=-1, keepdims=True)
        top = np.where(np.isfinite(top), top, 0.0)
        lse = (np.log(np.exp(masked - top).sum(-1, keepdims=True)) + top)[..., 0]
    lengths = contributions(weights, v, t.get("output.weight"))
    return Attention(output, weights, scaled, scaled, masked, lse, entropy(weights), lengths)


def scaled_dot_product(
    inputs: tuple[np.ndarray, np.ndarray, np.ndarray],
    masks: Sequence[Mask] = (),
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
) -> Attention:
    """Attention of query [B, N, L, H], key [B, G, S, H] and value [B, G, S, V], past rows included; output [B, N, L, V]."""
    q, k, v = (x.astype(np.float64) for x in inputs)
    shared = q.shape[1] // k.shape[1]
    k, v = (np.stack([x[:, n // shared] for n in range(q.shape[1])], 1) for x in (k, v))
    scaled = q @ k.swapaxes(2, 3) * (1 / np.sqrt(q.shape[3]) if scale is None else scale)
    capped = scaled if softcap is None else softcap * np.tanh(scaled / softcap)
    allowed = may_attend(masks, scaled.shape)
    masked = np.where(allowed, capped + added_bias(masks, scaled.shape), -np.inf)
    sink = np.full(q.shape[1], -np.inf) if sinks is None else sinks.astype(np.float64)
    logits = np.concatenate([masked, np.broadcast_to(sink[:, None, None], (*masked.shape[:3], 1))], -1)
    top = logits.max(-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0.0)
    total = np.exp(logits - top).sum(-1, keepdims=True)
    weights = np.exp(masked - top) / np.where(total > 0, total, 1.0)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + top)[..., 0]
    lengths = contributions(weights, v, None)
    return Attention(weights @ v, weights, scaled, capped, masked, lse, entropy(weights), lengths)


def _appended(spec: LayerSpec, tensors: Mapping[str, np.ndarray], x: np.ndarray, name: str) -> np.ndarray:
    """x [B, G, S, H] with bias_k or bias_v as one more row, and then a row of zeros, where the layer has them."""
    parts = [x]
    if spec.has_bias_kv:
        row = tensors[name].reshape(1, spec.num_kv_heads, 1, x.shape[3])
        parts.append(np.repeat(row, len(x), axis=0))
    if spec.add_zero_attn:
        parts.append(np.zeros((*x.shape[:2], 1, x.shape[3])))
    return np.concatenate(parts, axis=2)


def entropy(weights: np.ndarray) -> np.ndarray:
    """-Σ p·ln p over the last axis, in nats; 0·ln 0 is 0."""
    found: np.ndarray = -(weights * np.log(np.where(weights > 0, weights, 1.0))).sum(-1)
    return found


def contributions(weights: np.ndarray, values: np.ndarray, matrix: np.ndarray | None) -> np.ndarray:
    """‖α·v·W‖ [B, N, L, S] of weights and of values [B, N, S, V], W the head's columns of an output matrix [D, N·V], if any."""
    parts = [None] * values.shape[1] if matrix is None else np.split(matrix, values.shape[1], axis=1)
    added = [values[:, n] if part is None else values[:, n] @ part.T for n, part in enumerate(parts)]
    vectors = weights[..., None] * np.stack(added, 1)[:, :, None]
    found: np.ndarray = np.sqrt((vectors**2).sum(-1))
    return found


def selected(weights: np.ndarray, heads: Sequence[int] | None, queries: Sequence[int] | None) -> np.ndarray:
    """Some heads and query rows of weights [B, N, L, S], in the requested order."""
    if heads is not None:
        weights = weights[:, list(heads)]
    return weights if queries is None else weights[:, :, list(queries)]


def top_k(weights: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values and indices [..., k], largest first and ties by the lower index, and the rest [...]."""
    order = np.argsort(-weights, axis=-1, kind="stable")
    ordered = np.take_along_axis(weights, order, axis=-1)
    return ordered[..., :k], order[..., :k], ordered[..., k:].sum(-1)
