"""Attention request: attention on the caller's own query, key and value; its JSON form and its checks, which give a call.

Legend: B sequences, H query heads, Hkv key/value heads, L query rows, P past rows, S key rows with the past, d and V head widths.
Invariants: The checks run in the order of `attend_request.py`. Query, key, value and past are views [B, heads, rows, features],
whatever the layout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated

import torch
from pydantic import Field

from service.attention.call import AttentionCall
from service.attention.cost import attention_flops, table_bytes
from service.attention.masks import Sizes
from service.attention.spec import MAX_HEADS
from service.batching.job import Cost
from service.errors import BadDtype, BadShape, InvalidInput
from service.wire.attend_request import (
    CheckedRequest,
    EncodingField,
    EntropyField,
    LseField,
    MaskedRowsField,
    RequestLimits,
    RequestMasks,
    ScoresSelection,
    WeightsSelection,
    extras_bytes,
    float_field,
    input_bytes,
    read_model,
    selections,
)
from service.wire.layouts import Layout, LayoutName, layout_of
from service.wire.mask_kinds import MaskList
from service.wire.positions import check_past, past_of
from service.wire.schemas import StrictModel, Tensor
from service.wire.tensor_fields import expect
from service.wire.tensors import answer_form, check_fields, decode_tensor

REQUIRED = ("query", "key", "value")
TENSORS = (*REQUIRED, "past_key", "past_value", "sinks")
"""Every tensor that a request may have, masks aside."""
Heads = Annotated[int, Field(ge=1, le=MAX_HEADS)]


class AttentionRequest(StrictModel):
    """Scaled dot-product attention without parameters: softmax(softcap(query·keyᵀ·scale) + masks)·value."""

    query: Tensor = Field(description="[L, d], or with axes H and B as layout says; each size is at least 1")
    key: Tensor = Field(description="[S, d], or with axes Hkv and B as layout says; Hkv divides H")
    value: Tensor = Field(description="[S, V], or with axes Hkv and B as layout says")
    layout: LayoutName | None = Field(default=None, description="default: ld for 2 axes, bhld for 4; 3 axes must say")
    num_heads: Heads | None = Field(default=None, description="only with layout packed, which requires it")
    num_kv_heads: Heads | None = Field(default=None, description="only with layout packed; default: num_heads")
    scale: float | None = Field(default=None, description="factor of query·key, any number but 0; default: 1/√d")
    softcap: float | None = Field(default=None, description="c > 0: a score s becomes c·tanh(s/c); default: no cap")
    past_key: Tensor | None = Field(
        default=None, description="[Hkv, P, d] or [B, Hkv, P, d], before key; default: none"
    )
    past_value: Tensor | None = Field(default=None, description="[Hkv, P, V] or [B, Hkv, P, V]; comes with past_key")
    present: bool = Field(default=False, description="return present_key and present_value, old and new; default: no")
    sinks: Tensor | None = Field(default=None, description="[H], in the softmax's denominator only; default: none")
    masks: MaskList
    weights: WeightsSelection = None
    scores: ScoresSelection = None
    lse: LseField = False
    entropy: EntropyField = False
    masked_rows: MaskedRowsField = "zero"
    encoding: EncodingField = None


def check_attention(
    document: Mapping[str, object], limits: RequestLimits, mask_params: Sequence[str] = ()
) -> CheckedRequest:
    """Return the checked call, with the errors and arguments of `check_request`; the caller runs the remaining check."""
    body = read_model(AttentionRequest, document)
    masks = RequestMasks(body.masks, mask_params)
    given = {name: found for name in TENSORS if (found := getattr(body, name)) is not None or name in REQUIRED}
    check_fields([(found, float_field(name)) for name, found in given.items()] + masks.fields())
    tensors = {"query": decode_tensor(body.query, float_field("query"))}
    layout = layout_of(body.layout, tensors["query"].dim(), body.num_heads, body.num_kv_heads)
    if layout.has_batch:
        masks.check_axes()
    tensors |= {name: decode_tensor(found, float_field(name)) for name, found in given.items() if name != "query"}
    call = _call(body, layout, tensors)
    past = 0 if call.past_key is None else call.past_key.shape[2]
    b, n, rows, _ = call.query.shape
    sizes = Sizes(b, n, rows, past + call.key.shape[2])
    weights, scores = selections(body, sizes, call.query.dtype)
    call = call._replace(weights=weights, scores=scores)
    if body.masks:
        limits.check(_cost(call, sizes, tensors), 0)  # before masks are made of these sizes
        call = call._replace(mask=masks.combined(sizes, is_batch=layout.has_batch, past=past))
    cost = _cost(call, sizes, tensors)
    limits.check(cost, table_bytes(call, sizes))
    form, is_error = answer_form(body.query, body.encoding), body.masked_rows == "error"
    return CheckedRequest(call, cost, layout, form, is_error, is_counted=call.mask is None).counted_if_fast()


def _call(body: AttentionRequest, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> AttentionCall:
    """Return the call without its masks and selections; raises BadShape, BadDtype and InvalidInput."""
    query, key, value = (layout.rows(tensors[name], name) for name in REQUIRED)
    call = AttentionCall(
        query,
        key,
        value,
        scale=_number(body.scale, "scale", query.dtype) or query.shape[3] ** -0.5,
        softcap=_number(body.softcap, "softcap", query.dtype, least=0.0),
        **past_of(tensors, layout),
        sinks=tensors.get("sinks"),
        has_lse=body.lse,
        has_entropy=body.entropy,
        has_present=body.present,
        rows_first="lh" in layout.axes,  # the heads of one row lie side by side
    )
    _check_together(call)
    return call


def _number(value: float | None, name: str, query: torch.dtype, least: float = -math.inf) -> float | None:
    """Return `value` if it is finite, nonzero and above `least` in the compute dtype; raises InvalidInput."""
    if value is None:
        return None
    dtype = torch.promote_types(query, torch.float32)
    held = torch.tensor(value, dtype=dtype).item()
    if not math.isfinite(held) or held == 0 or held < least:
        words = "above 0" if least == 0 else "other than 0"
        words += f" that {str(dtype).removeprefix('torch.')} can hold"
        raise InvalidInput(f"{name} must be a number {words}", param=f"/{name}")
    return value


def _check_together(call: AttentionCall) -> None:
    """Check that counts of sequences, heads, rows and features agree, and, with a past or a present, that dtypes do."""
    (b, n, _, width), (_, g, rows, key_width) = call.query.shape, call.key.shape
    expect("key", "sequences", call.key.shape[0], b, "query")
    expect("value", "sequences", call.value.shape[0], b, "query")
    expect("value", "heads", call.value.shape[1], g, "key")
    if n % g:
        raise BadShape(f"query has {n} heads, which the {g} heads of key cannot share evenly", param="/key")
    expect("value", "rows", call.value.shape[2], rows, "key")
    expect("key", "features a head", key_width, width, "query")
    if call.past_key is not None and call.past_value is not None:
        past = {"past_key": call.past_key, "past_value": call.past_value}
        check_past(past, b, g, (key_width, call.value.shape[3]), ("key", "value"))
    if call.sinks is not None and call.sinks.shape != (n,):
        raise BadShape(f"sinks must be [{n}], one number a query head, got {list(call.sinks.shape)}", param="/sinks")
    if call.has_present or call.past_key is not None:
        cached = (("value", call.value), ("past_key", call.past_key), ("past_value", call.past_value))
        for name, tensor in cached:
            if tensor is not None and tensor.dtype != call.key.dtype:
                raise BadDtype(f"{name} must have the dtype of key where a past or a present is kept", param=f"/{name}")


def _cost(call: AttentionCall, sizes: Sizes, tensors: Mapping[str, torch.Tensor]) -> Cost:
    b, _, queries, keys = sizes
    widths = call.key.shape[3] + call.value.shape[3]
    returned = (
        extras_bytes(call, sizes) + call.key.shape[1] * keys * widths * call.key.element_size() * call.has_present
    )
    return Cost(
        sequences=b,
        tokens=b * (queries + keys),
        cells=math.prod(sizes),
        weights_bytes=b * returned,
        input_bytes=input_bytes(tensors.values(), call.mask),
        flops=attention_flops(call, sizes),
    )
