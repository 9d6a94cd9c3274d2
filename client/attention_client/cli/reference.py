"""Reference implementation of attention without a layer in float64 NumPy, written for clarity, not for speed.

Legend: B sequences, L query rows, S key rows, N heads, G key/value heads, H and V head widths. Invariant: It shares no code with
the service; `compare` and `golden` compare the service with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


@np.errstate(all="ignore")  # what overflows becomes infinity or NaN, which callers compare
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
    sink = np.full((1, 1, 1), -np.inf) if sinks is None else sinks.astype(np.float64).reshape(-1, 1, 1)
    top = np.maximum(scores.max(axis=-1, keepdims=True), sink)
    top = np.where(np.isneginf(top), 0.0, top)
    exponentials = np.exp(scores - top)
    total = exponentials.sum(axis=-1, keepdims=True) + np.exp(sink - top)
    return exponentials / np.where(total > 0, total, 1.0) @ v, (np.log(total) + top)[..., 0]


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


def _capped(scores: np.ndarray, softcap: float | None) -> np.ndarray:
    return scores if softcap is None else softcap * np.tanh(scores / softcap)
