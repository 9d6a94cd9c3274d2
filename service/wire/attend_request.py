"""Attend request: its JSON form, and the check of a decoded body against its layer, which gives a `Call` with its exact cost.

Invariants: Every error that one request can contain is found before the request is queued. The checks run in the order of the
contract: unknown field, dtype, shape, mask, cost. Sizes are Python integers, which do not overflow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field

from service.attention.call import Call, WeightsWanted
from service.attention.masks import CombinedMask, Sizes
from service.attention.spec import LayerSpec
from service.attention.work import flops, table_bytes
from service.batching.job import Cost
from service.errors import BadShape, InvalidInput
from service.wire.checked_request import (
    CheckedRequest,
    RequestLimits,
    check_axes,
    check_cost,
    combined_mask,
    read_model,
    values_of,
    values_params,
    with_masked_rows,
)
from service.wire.mask_kinds import MAX_MASKS, MaskField
from service.wire.schemas import StrictModel, Tensor
from service.wire.tensor_fields import TensorField, TensorKind
from service.wire.tensors import answer_form, check_fields, decode_tensor, rank_of
from service.wire.weights_selection import WeightsField, WeightsSelection, weights_bytes

BATCH_RANK = 3


class AttendRequest(StrictModel):
    """One sequence [L, d], or B sequences of one length [B, L, d], for a multi-head attention layer."""

    query: Tensor
    key: Tensor | None = None
    value: Tensor | None = None
    # A factory, because pydantic deep-copies a default list for every request.
    masks: Annotated[list[MaskField], Field(default_factory=list, max_length=MAX_MASKS)]
    weights: WeightsSelection | None = None
    masked_rows: Literal["zero", "error"] = "zero"
    encoding: Literal["list", "base64"] | None = None


def check_request(
    document: Mapping[str, object], name: str, spec: LayerSpec, limits: RequestLimits, mask_params: Sequence[str] = ()
) -> CheckedRequest:
    """Return the checked call for layer `name` in a decoded body; the caller runs the remaining check (`counted`).

    Raises InvalidInput or a subclass for malformed input, and CostLimit for a request above its limits.
    `mask_params` are the JSON pointers to the values of the first masks; the default is `/masks/<i>/values`.
    """
    body = read_model(AttendRequest, document, {"weights": WeightsField})
    params = values_params(body.masks, mask_params)
    check_fields(_fields(body, params))
    if rank_of(body.query) == BATCH_RANK:
        check_axes(body.masks, params)
    tensor = decode_tensor(body.query, TensorField("/query", TensorKind.FLOAT))
    is_batch = tensor.dim() == BATCH_RANK
    query = _checked_rows(tensor, "query", spec.query_width, name)
    key = value = None
    if body.key is not None:
        key = _decode_rows(body.key, "key", spec.key_width, name, is_batch)
    if body.value is not None:
        value = _decode_rows(body.value, "value", spec.value_width, name, is_batch)
    _check_together(query, key, value, spec)
    source = query if key is None else key
    sizes = Sizes(query.shape[0], spec.num_heads, query.shape[1], source.shape[1])
    wanted = None if body.weights is None else body.weights.wanted(sizes._replace(keys=sizes.keys + spec.extra_keys))
    combined = combined_mask(body.masks, sizes, params, is_batch=is_batch)
    cost = _cost(spec, sizes, [x for x in (query, key, value) if x is not None], combined, wanted)
    # Tables are float32, or float64 for a float64 query.
    itemsize = torch.promote_types(query.dtype, torch.float32).itemsize
    check_cost(cost, table_bytes(spec, sizes, combined, wanted, itemsize), limits)
    call = Call(name, query, key, value, combined, wanted)
    request = CheckedRequest(call, cost, 0, is_batch, answer_form(body.query, body.encoding))
    if spec.extra_keys:  # every row may attend to the appended columns
        return request
    return with_masked_rows(request, combined, is_error=body.masked_rows == "error")


def _fields(body: AttendRequest, mask_params: Sequence[str]) -> list[tuple[object, TensorField]]:
    """Return every tensor of a request before decoding, with its field."""
    inputs = (("/query", body.query), ("/key", body.key), ("/value", body.value))
    found: list[tuple[object, TensorField]] = [(value, TensorField(param, TensorKind.FLOAT)) for param, value in inputs]
    return found + values_of(body.masks, mask_params)


def _decode_rows(value: object, field: str, width: int, name: str, is_batch: bool) -> torch.Tensor:
    tensor = decode_tensor(value, TensorField(f"/{field}", TensorKind.FLOAT))
    if (tensor.dim() == BATCH_RANK) != is_batch and tensor.dim() in (BATCH_RANK, BATCH_RANK - 1):
        layout = "B sequences [B, S, d]" if is_batch else "one sequence [S, d]"
        raise BadShape(f"{field} must be {layout} like query, got {list(tensor.shape)}", param=f"/{field}")
    return _checked_rows(tensor, field, width, name)


def _checked_rows(tensor: torch.Tensor, field: str, width: int, name: str) -> torch.Tensor:
    """Return the rows as [B, L, d]; raises BadShape for a wrong rank, an empty axis, or a d other than `width`."""
    if tensor.dim() not in (BATCH_RANK, BATCH_RANK - 1):
        raise BadShape(f"{field} must be [L, d] or [B, L, d], got {tensor.dim()} axes", param=f"/{field}")
    if 0 in tensor.shape:
        raise BadShape(f"{field} must not be empty, got {list(tensor.shape)}", param=f"/{field}")
    if tensor.shape[-1] != width:
        raise BadShape(f'{field} has {tensor.shape[-1]} features, layer "{name}" takes {width}', param=f"/{field}")
    return tensor if tensor.dim() == BATCH_RANK else tensor.unsqueeze(0)


def _check_together(query: torch.Tensor, key: torch.Tensor | None, value: torch.Tensor | None, spec: LayerSpec) -> None:
    """Check that sequence counts agree, each key row has a value row, and no default has the wrong width."""
    if key is None and spec.needs_key:
        raise InvalidInput(
            f"key is required: it has {spec.key_width} features in this layer, query has {spec.query_width}",
            param="/key",
        )
    if value is None and spec.needs_value:
        raise InvalidInput(
            f"value is required: it has {spec.value_width} features in this layer, key has {spec.key_width}",
            param="/value",
        )
    for field, tensor in (("key", key), ("value", value)):
        if tensor is not None and tensor.shape[0] != query.shape[0]:
            raise BadShape(f"{field} has {tensor.shape[0]} sequences, query has {query.shape[0]}", param=f"/{field}")
    rows = (query if key is None else key).shape[1]
    if value is not None and value.shape[1] != rows:
        raise BadShape(f"value has {value.shape[1]} rows, key has {rows}", param="/value")


def _cost(
    spec: LayerSpec,
    sizes: Sizes,
    tensors: list[torch.Tensor],
    mask: CombinedMask | None,
    wanted: WeightsWanted | None,
) -> Cost:
    b, n, queries, keys = sizes
    columns = keys + spec.extra_keys
    is_cross = len(tensors) > 1
    masks = () if mask is None else mask.masks
    return Cost(
        sequences=b,
        tokens=b * (queries + (keys if is_cross else 0)),
        cells=b * n * queries * columns,
        weights_bytes=0 if wanted is None else b * weights_bytes(wanted, n, queries, columns),
        input_bytes=sum(x.nbytes for x in tensors) + sum(part.nbytes for one in masks for part in one.parts),
        flops=flops(spec, sizes, mask, wanted),
    )
