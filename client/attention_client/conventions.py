"""Conventions: the call arguments of other systems as the keyword arguments of `Client.attention`.

Each function takes the arguments of one system: `client.attention(**conventions.torch_sdpa(q, k, v, is_causal=True))`.
Invariants: pure; only masks are computed, from lengths and slopes. What the system refuses raises InvalidInput or a subclass; the
service checks everything else. Arrays are NumPy arrays or torch tensors. A query row that may attend to nothing gives zeros here;
each docstring says where its system gives something else. `docs/conventions.md` compares the systems.
Legend: B sequences, H heads, L query rows, S key rows, d head width, E = H·d.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Literal, Required, TypedDict, cast

import numpy as np
import numpy.typing as npt

from attention_client import masks
from attention_client.arrays import Array, raw
from attention_client.errors import BadDtype, BadMask, BadShape, InvalidInput
from attention_client.masks import Align, Axes, Mask, given, shape_of
from attention_client.request import Layout, Stage

_STAGES: Mapping[int | None, Stage] = {0: "scaled", 1: "capped", 2: "masked"}


class AttentionArguments(TypedDict, Generic[Array], total=False):
    """The keyword arguments of `Client.attention` that a convention sets; an absent one has its default."""

    query: Required[Array]
    key: Required[Array]
    value: Required[Array]
    layout: Required[Layout]
    masks: Required[list[Mask]]
    num_heads: int
    num_kv_heads: int
    scale: float
    softcap: float
    past_key: Array
    past_value: Array
    present: bool
    weights: Literal["heads", "mean"]
    scores: Stage


def torch_sdpa(
    query: Array, key: Array, value: Array, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> AttentionArguments[Array]:  # fmt: skip
    """Convert arguments of torch's `scaled_dot_product_attention`: `[L, d]`, `[H, L, d]` or `[B, H, L, d]`.

    `attn_mask` broadcasts from the right: true = may attend, floats are added. Causal is top_left. Masked rows are zeros (≥ 2.5).
    """
    layout = _layout({2: "ld", 3: "hld", 4: "bhld"}, query, key, value)
    _refuse_dropout(dropout_p)
    if attn_mask is not None and is_causal:
        raise InvalidInput("attn_mask and is_causal exclude each other, as in torch")
    if layout != "ld" and not enable_gqa and not {key.shape[-3], value.shape[-3]} <= {1, query.shape[-3]}:
        raise BadShape("key, value and query have different numbers of heads; torch needs enable_gqa=True for that")
    found = _flags_or_bias(attn_mask, _from_right(layout.replace("d", "s")))
    return _arguments(query, key, value, layout, found + _top_left(is_causal), scale=scale)


def torch_mha(
    query: Array, key: Array, value: Array, num_heads: int, *, batch_first: bool = False, key_padding_mask: Any = None,
    need_weights: bool = True, attn_mask: Any = None, average_attn_weights: bool = True, is_causal: bool = False,
) -> AttentionArguments[Array]:  # fmt: skip
    """Convert arguments of torch's `nn.MultiheadAttention`; arrays are projected: `[L, B, E]`, `[B, L, E]` or `[L, E]`.

    In masks true = blocked, and floats are added. `is_causal` is a hint that needs `attn_mask`. The output is `[B, L, E]` for
    either `batch_first`. Masked rows are NaN in torch if `need_weights` is true, and zeros otherwise.
    """
    _layout({2: "packed", 3: "packed"}, query, key, value)
    if is_causal and attn_mask is None:
        raise InvalidInput("is_causal is a hint about attn_mask, which is missing; torch raises here too")
    is_batch = len(query.shape) == 3  # noqa: PLR2004
    if is_batch and not batch_first:
        query, key, value = query.swapaxes(0, 1), key.swapaxes(0, 1), value.swapaxes(0, 1)
    found = []
    if attn_mask is not None:
        found.append(masks.attn_mask(attn_mask, num_heads))
        tables = (query.shape[0] if is_batch else 1) * num_heads
        if len(attn_mask.shape) == 3 and attn_mask.shape[0] != tables:  # noqa: PLR2004
            raise BadShape(f"attn_mask must be [L, S] or [{tables}, L, S], got {list(attn_mask.shape)}")
    if key_padding_mask is not None:
        if len(shape := shape_of(key_padding_mask, "key_padding_mask")) != 1 + is_batch:
            raise BadShape(f"key_padding_mask must be {'[B, S]' if is_batch else '[S]'}, got {list(shape)}")
        found.append(masks.key_padding_mask(key_padding_mask))
    weights = ("mean" if average_attn_weights else "heads") if need_weights else None
    return _arguments(query, key, value, "packed", found, num_heads=num_heads, weights=weights)


def onnx(
    Q: Array, K: Array, V: Array, attn_mask: Any = None, past_key: Array | None = None, past_value: Array | None = None,
    nonpad_kv_seqlen: Any = None, *, is_causal: int = 0, q_num_heads: int | None = None,
    kv_num_heads: int | None = None, qk_matmul_output_mode: int | None = None, scale: float | None = None,
    softcap: float = 0.0, left_window_size: int = -1, right_window_size: int = -1,
) -> AttentionArguments[Array]:  # fmt: skip
    """Convert inputs of ONNX `Attention`, opsets 23 to 25: `[B, H, L, d]`, or `[B, L, E]` with both numbers of heads.

    In masks true = may attend; a mask with fewer than S keys blocks the others. Causal masks and windows start after the past,
    or at n − L with `nonpad_kv_seqlen` n. With a past the answer has the present. `qk_matmul_output_mode` requests the scores,
    or in mode 3 the weights; None requests neither. `softmax_precision` has no argument: the softmax is float32, or float64 for
    float64. Masked rows are zeros in ONNX too.
    """
    layout = _layout({3: "packed", 4: "bhld"}, Q, K, V)
    if layout == "packed" and (q_num_heads is None or kv_num_heads is None):
        raise InvalidInput("q_num_heads and kv_num_heads are required for inputs of 3 axes")
    if past_key is not None and nonpad_kv_seqlen is not None:
        raise InvalidInput("nonpad_kv_seqlen and past_key exclude each other, as in ONNX")
    if qk_matmul_output_mode not in (None, 0, 1, 2, 3):
        raise InvalidInput(f"qk_matmul_output_mode must be 0, 1, 2 or 3, got {qk_matmul_output_mode}")
    rows, keys = (array.shape[-2] for array in (Q, K))
    past = 0 if past_key is None else (0, 0, *shape_of(past_key, "past_key"))[-2]  # the service refuses other ranks
    found = _flags_or_bias(_all_keys(attn_mask, past + keys), _from_right("bhls"))
    offset: int | list[int] = past
    if nonpad_kv_seqlen is not None:
        ends = _whole_numbers(nonpad_kv_seqlen, "nonpad_kv_seqlen")
        if ends.ndim != 1:
            raise BadShape(f"nonpad_kv_seqlen must be [B], got {list(ends.shape)}")
        found.append(masks.lengths(ends))
        offset = (ends - rows).tolist()
    if is_causal:
        found.append(masks.causal(offset=offset))
    found += _window(left_window_size, right_window_size, offset=offset)
    heads = dict(num_heads=q_num_heads, num_kv_heads=kv_num_heads) if layout == "packed" else {}
    weights = "heads" if qk_matmul_output_mode == 3 else None  # noqa: PLR2004
    wanted = dict(weights=weights, scores=_STAGES.get(qk_matmul_output_mode))
    held = dict(past_key=past_key, past_value=past_value, present=None if past_key is None else True)
    return _arguments(Q, K, V, layout, found, scale=scale, softcap=softcap or None, **heads, **held, **wanted)


def keras(
    *, query: Array, value: Array, key: Array | None = None, attention_mask: Any = None, query_mask: Any = None,
    value_mask: Any = None, key_mask: Any = None, is_causal: bool = False, bias: Any = None, scale: float | None = None,
) -> AttentionArguments[Array]:  # fmt: skip
    """Convert arguments of Keras `MultiHeadAttention` (projected arrays) or `keras.ops.dot_product_attention`: `[B, L, H, d]`.

    Arrays are keyword-only: the layer takes query, value, key, the function query, key, value. In masks true = may attend.
    `attention_mask` is `[B, L, S]` or `[B, H, L, S]` (`mask` of the function); `is_causal` (`use_causal_mask` of the layer) is
    top_left. Masked rows are the mean of all values in Keras, but zeros where its layer returns the scores.
    """
    key = value if key is None else key
    found = _table(masks.attend, attention_mask, ("bls", "bhls"), "attention_mask")
    if query_mask is not None:
        _table(masks.attend, query_mask, ("bs",), "query_mask")
        found.append(masks.attend(query_mask[:, :, None], axes="bls"))
    for name, mask in (("value_mask", value_mask), ("key_mask", key_mask)):
        found += _table(masks.attend, mask, ("bs",), name)
    found += _table(masks.bias, bias, _from_right("bhls"), "bias") + _top_left(is_causal)
    return _arguments(query, key, value, _layout({4: "blhd"}, query, key, value), found, scale=scale)


def flax(
    query: Array, key: Array, value: Array, bias: Any = None, mask: Any = None, *, scale: float | None = None,
    is_causal: bool = False, query_seq_lengths: Any = None, key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
) -> AttentionArguments[Array]:  # fmt: skip
    """Convert arguments of `dot_product_attention` of Flax or `jax.nn` (keyword-only there): `[B, L, H, d]` or `[L, H, d]`.

    True = may attend. `bias` and `mask` broadcast from the right to `[B, H, L, S]`; `is_causal` and the window are top_left.
    Masked rows are the mean of all values in JAX, but zeros from `query_seq_lengths` on.
    """
    layout = _layout({3: "lhd", 4: "blhd"}, query, key, value)
    axes = _from_right("bhls" if layout == "blhd" else "hls")
    found = _table(masks.attend, mask, axes, "mask") + _table(masks.bias, bias, axes, "bias") + _top_left(is_causal)
    if query_seq_lengths is not None:
        ends = _whole_numbers(query_seq_lengths, "query_seq_lengths")
        if layout != "blhd" or ends.ndim != 1:
            raise BadShape("query_seq_lengths must be [B], of a query [B, L, H, d]")
        rows = np.arange(query.shape[1])[None, :, None]
        found.append(masks.attend(rows < ends[:, None, None], axes="bls"))
    if key_value_seq_lengths is not None:
        found.append(masks.lengths(key_value_seq_lengths))
    if local_window_size is not None:
        left, right = np.broadcast_to(local_window_size, 2).tolist()
        found.append(masks.window(left, right, align="top_left"))
    return _arguments(query, key, value, layout, found, scale=scale)


def flash(
    q: Array, k: Array, v: Array, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
) -> AttentionArguments[Array]:  # fmt: skip
    """Convert arguments of `flash_attn_func` (FlashAttention ≥ 2.1): `[B, L, H, d]`; causal, window, ALiBi are bottom_right.

    A window side of -1 is unbounded, a softcap of 0 is none; slopes are float32 `[H]` or `[B, H]`. Masked rows are zeros too.
    """
    layout = _layout({4: "blhd"}, q, k, v)
    _refuse_dropout(dropout_p)
    found = [masks.causal("bottom_right")] if causal else []
    found += _window(*window_size, align="bottom_right")
    if alibi_slopes is not None:
        slopes = raw(alibi_slopes, "/alibi_slopes", frozenset({"float32"})).bits[..., None, None]
        rows, keys = (np.arange(array.shape[1], dtype=np.float32) for array in (q, k))
        distances = np.abs(rows[:, None] + (k.shape[1] - q.shape[1]) - keys)
        found += _table(masks.bias, -slopes * distances, ("hls", "bhls"), "the bias of alibi_slopes")
    return _arguments(q, k, v, layout, found, scale=softmax_scale, softcap=softcap or None)


def d2l(queries: Array, keys: Array, values: Array, valid_lens: Any = None) -> AttentionArguments[Array]:
    """Convert arguments of `DotProductAttention` of Dive into Deep Learning; arrays are `[B, L, d]`.

    `valid_lens` `[B]` or `[B, L]` counts the keys to keep, at most S. There a row without keys is the mean of all values (-1e6).
    """
    found = [] if valid_lens is None else [masks.lengths(valid_lens)]
    return _arguments(queries, keys, values, _layout({3: "bld"}, queries, keys, values), found)


def numpy_article(Q: Array, K: Array, V: Array, mask: Any = None) -> AttentionArguments[Array]:
    """Convert arguments of NumPy tutorials with `np.where(mask, -1e9, scores)`: `[L, d]`, `[B, L, d]` or `[B, H, L, d]`.

    `mask` broadcasts from the right; true = blocked. Masked rows are the mean of all values there, because of the -1e9.
    """
    layout = _layout({2: "ld", 3: "bld", 4: "bhld"}, Q, K, V)
    return _arguments(Q, K, V, layout, _table(masks.ignore, mask, _from_right(layout.replace("d", "s")), "mask"))


def _arguments(
    query: Array, key: Array, value: Array, layout: Layout, found: list[Mask], **options: object
) -> AttentionArguments[Array]:
    made = given(query=query, key=key, value=value, layout=layout, masks=found, **options)
    return cast("AttentionArguments[Array]", made)


def _layout(layouts: Mapping[int, Layout], query: Any, key: Any, value: Any) -> Layout:
    """Return the layout of arrays that all have one of these numbers of axes."""
    ranks = [len(shape_of(array, name)) for array, name in ((query, "query"), (key, "key"), (value, "value"))]
    if len(set(ranks)) > 1 or ranks[0] not in layouts:
        wanted = " or ".join(map(str, layouts))
        raise BadShape(f"query, key and value must each have {wanted} axes, all the same, got {ranks}")
    return layouts[ranks[0]]


def _from_right(axes: str) -> list[Axes]:
    """Return the axes of masks that broadcast to `axes`, fewest first."""
    return [cast("Axes", axes[first:]) for first in reversed(range(len(axes)))]


def _table(make: Callable[..., Mask], values: Any, axes: Sequence[Axes], name: str) -> list[Mask]:
    """Return the mask, named by the entry of `axes` that has the rank of the values; no mask for None."""
    if values is None:
        return []
    rank = len(shape_of(values, name))
    fitting = [found for found in axes if len(found) == rank]
    if not fitting:
        raise BadMask(f"{name} must have {' or '.join(str(len(known)) for known in axes)} axes, got {rank}")
    return [make(values, axes=fitting[0])]


def _flags_or_bias(values: Any, axes: Sequence[Axes]) -> list[Mask]:
    """Return the mask for an attn_mask of booleans (true = may attend) or of floats (added)."""
    dtype = str(getattr(values, "dtype", "float"))
    if "bool" not in dtype and "float" not in dtype:
        raise BadDtype(f"attn_mask must have booleans or floats, got {dtype}")
    return _table(masks.attend if "bool" in dtype else masks.bias, values, axes, "attn_mask")


def _whole_numbers(values: Any, name: str) -> npt.NDArray[Any]:
    """Return lengths as an array on the CPU. Raises BadDtype or InvalidInput."""
    return raw(masks.lengths(values).values, f"/{name}", frozenset({"int32", "int64"})).bits


def _all_keys(mask: Any, keys: int) -> Any:
    """Extend a mask of fewer than `keys` keys; the added keys are blocked."""
    if mask is None or not shape_of(mask, "attn_mask") or (short := keys - mask.shape[-1]) <= 0:
        return mask
    if not isinstance(mask, np.ndarray):
        raise InvalidInput(f"an attn_mask with fewer keys than {keys} must be a NumPy array")
    blocked = -np.inf if "float" in mask.dtype.name else False  # integers are refused later
    return np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, short)], constant_values=blocked)


def _top_left(is_causal: object) -> list[Mask]:
    return [masks.causal("top_left")] if is_causal else []


def _window(left: int, right: int, *, align: Align | None = None, offset: int | list[int] | None = None) -> list[Mask]:
    """Return the window; a negative size is unbounded. Without any bound there is no mask."""
    sides = [None if size < 0 else size for size in (left, right)]
    return [] if sides == [None, None] else [masks.window(*sides, align=align, offset=offset)]


def _refuse_dropout(dropout_p: float) -> None:
    if dropout_p:
        raise InvalidInput("dropout_p must be 0: the service computes without dropout")
