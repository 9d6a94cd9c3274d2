"""Attend request: its JSON form, and the check of a decoded body against its layer, which gives a `Call` with its exact cost.

Invariants: Every error that one request can contain is found before the request is queued. The checks run in the order of the
contract: unknown field, dtype, shape, mask, cost. Sizes are Python integers, which do not overflow.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import BaseModel, Field, ValidationError

from service.attention.call import Call, WeightsWanted
from service.attention.masks import CombinedMask, Sizes, masked_rows
from service.attention.spec import LayerSpec
from service.attention.work import flops, table_bytes
from service.batching.job import Cost
from service.errors import BadShape, CostLimit, InvalidInput, MaskedRow
from service.wire.mask_kinds import MAX_MASKS, MaskField, MaskPlace, TableMask, ValuedMask, kind_of
from service.wire.number_list import NumberList
from service.wire.schemas import StrictModel, Tensor, translated, unknown_field
from service.wire.tensor_values import TensorField, TensorKind
from service.wire.tensors import TensorForm, check_fields, decode_tensor, rank_of
from service.wire.weights_selection import WeightsField, weights_bytes

BATCH_RANK = 3
# Counting the masked rows of this many attention scores takes about a millisecond.
MAX_COUNTED_CELLS = 2**21


class AttendRequest(StrictModel):
    """One sequence [L, d], or B sequences of one length [B, L, d], for a multi-head attention layer."""

    query: Tensor
    key: Tensor | None = None
    value: Tensor | None = None
    # A factory, because pydantic deep-copies a default list for every request.
    masks: Annotated[list[MaskField], Field(default_factory=list, max_length=MAX_MASKS)]
    weights: WeightsField | None = None
    masked_rows: Literal["zero", "error"] = "zero"
    encoding: Literal["list", "base64"] | None = None

    @classmethod
    def of(cls, document: Mapping[str, object]) -> AttendRequest:
        """Return the request in a document; raises its first error as a ServiceError, with unknown fields before all others."""
        _check_names(document, cls, "")
        masks, weights = document.get("masks"), document.get("weights")
        if isinstance(masks, NumberList) or (isinstance(masks, dict) and "data" in masks):  # a bare array
            kind_of(None, "/masks/0")
        if isinstance(weights, dict):
            _check_names(weights, WeightsField, "/weights")
        for i, mask in enumerate(masks[:MAX_MASKS] if isinstance(masks, list) else []):
            _check_names(mask, kind_of(mask, f"/masks/{i}"), f"/masks/{i}")
        try:
            return cls.model_validate(document)
        except ValidationError as error:
            raise translated(error) from None


def _check_names(value: Mapping[str, object], model: type[BaseModel], where: str) -> None:
    """Raise UnknownField for a name that the model lacks; pydantic would describe each of a hundred thousand wrong fields."""
    if not value.keys() <= (known := _names(model)).keys():
        raise unknown_field(value, known, where)


@functools.cache
def _names(model: type[BaseModel]) -> dict[str, None]:
    """Return the names of the model's fields; pydantic builds them at each access, and every request needs them."""
    return dict.fromkeys(model.model_fields)


@dataclasses.dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of one request; `max_cells` counts attention scores: sequences x heads x L x S.

    `max_table_bytes` limits the tables of one sequence, because sequences are computed one at a time.
    """

    max_sequences: int
    max_tokens: int
    max_cells: int
    max_weights_bytes: int
    max_table_bytes: int


class CheckedRequest(NamedTuple):
    """A call that can run, its cost, and the form of its answer."""

    call: Call
    cost: Cost
    masked_rows: int
    is_batch: bool
    form: TensorForm
    count_masked_rows: Callable[[], int] | None = None
    """The last check, left to the caller where it is slow: it returns `masked_rows` or raises MaskedRow."""

    def counted(self) -> CheckedRequest:
        """Return the request with its masked rows counted; raises MaskedRow."""
        if self.count_masked_rows is None:
            return self
        return self._replace(masked_rows=self.count_masked_rows(), count_masked_rows=None)


def check_request(
    document: Mapping[str, object], name: str, spec: LayerSpec, limits: RequestLimits, mask_params: Sequence[str] = ()
) -> CheckedRequest:
    """Return the checked call for layer `name` in a decoded body; the caller runs the remaining check (`counted`).

    Raises InvalidInput or a subclass for malformed input, and CostLimit for a request above its limits.
    `mask_params` are the JSON pointers to the values of the first masks; the default is `/masks/<i>/values`.
    """
    body = AttendRequest.of(document)
    params = [mask_params[i] if i < len(mask_params) else f"/masks/{i}/values" for i in range(len(body.masks))]
    check_fields(_fields(body, params))
    _check_axes(body, params)
    decoded = decode_tensor(body.query, param="/query", kind=TensorKind.FLOAT)
    is_batch = decoded.tensor.dim() == BATCH_RANK
    query = _checked_rows(decoded.tensor, "query", spec.query_width, name)
    key = value = None
    if body.key is not None:
        key = _decode_rows(body.key, "key", spec.key_width, name, is_batch)
    if body.value is not None:
        value = _decode_rows(body.value, "value", spec.value_width, name, is_batch)
    _check_together(query, key, value, spec)
    source = query if key is None else key
    sizes = Sizes(query.shape[0], spec.num_heads, query.shape[1], source.shape[1])
    wanted = None if body.weights is None else body.weights.wanted(sizes, spec)
    masks = [field.mask(MaskPlace(sizes, is_batch, f"/masks/{i}", params[i])) for i, field in enumerate(body.masks)]
    combined = CombinedMask(sizes, tuple(masks)) if masks else None
    cost = _cost(spec, sizes, [x for x in (query, key, value) if x is not None], combined, wanted)
    # Tables are float32, or float64 for a float64 query.
    itemsize = torch.promote_types(query.dtype, torch.float32).itemsize
    _check_cost(cost, table_bytes(spec, sizes, combined, wanted, itemsize), limits)
    call = Call(name, query, key, value, combined, wanted)
    request = CheckedRequest(call, cost, 0, is_batch, _form(body.encoding, decoded.form))
    if combined is None or spec.extra_keys:  # every row may attend to the appended columns
        return request
    request = request._replace(
        count_masked_rows=functools.partial(_count_masked_rows, combined, is_error=body.masked_rows == "error")
    )
    return request if cost.cells > MAX_COUNTED_CELLS else request.counted()


def _fields(body: AttendRequest, mask_params: Sequence[str]) -> list[tuple[object, TensorField]]:
    """Return every tensor of a request before decoding, with its field."""
    inputs = (("/query", body.query), ("/key", body.key), ("/value", body.value))
    found: list[tuple[object, TensorField]] = [(value, TensorField(param, TensorKind.FLOAT)) for param, value in inputs]
    for mask, param in zip(body.masks, mask_params, strict=True):
        if isinstance(mask, ValuedMask):
            found.append((mask.values, TensorField(param, mask.VALUES)))
    return found


def _check_axes(body: AttendRequest, mask_params: Sequence[str]) -> None:
    """Raise MaskAxesRequired for a mask of two readings before any shape is checked: no size may choose one."""
    if body.masks and rank_of(body.query) == BATCH_RANK:
        for i, (mask, param) in enumerate(zip(body.masks, mask_params, strict=True)):
            if isinstance(mask, TableMask):
                mask.check_axes_of_batch(f"/masks/{i}", param)


def _decode_rows(value: object, field: str, width: int, name: str, is_batch: bool) -> torch.Tensor:
    tensor = decode_tensor(value, param=f"/{field}", kind=TensorKind.FLOAT).tensor
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


def _check_cost(cost: Cost, tables: int, limits: RequestLimits) -> None:
    if (
        cost.sequences <= limits.max_sequences
        and cost.tokens <= limits.max_tokens
        and cost.cells <= limits.max_cells
        and cost.weights_bytes <= limits.max_weights_bytes
        and tables <= limits.max_table_bytes
    ):
        return
    counts = (
        ("sequences", cost.sequences, limits.max_sequences),
        ("query and key rows", cost.tokens, limits.max_tokens),
        ("attention scores (sequences x heads x L x S)", cost.cells, limits.max_cells),
        ("bytes of returned weights", cost.weights_bytes, limits.max_weights_bytes),
        ("bytes of tables for its masks and weights", tables, limits.max_table_bytes),
    )
    for what, need, limit in counts:
        if need > limit:
            raise CostLimit(f"the request needs {need:,} {what}; a request may have at most {limit:,}")


def _count_masked_rows(mask: CombinedMask, *, is_error: bool) -> int:
    """Count (sequence, query row) pairs with no allowed key in at least one head; `is_error` raises MaskedRow at the first."""
    count = seen = 0
    for rows in masked_rows(mask):
        found = int(rows.sum())
        if found and is_error:
            sequence, row = divmod(seen + int(rows.nonzero()[0]), mask.sizes.queries)
            raise MaskedRow(
                f"query row {row} of sequence {sequence} may attend to no key in at least one head", param="/masks"
            )
        count, seen = count + found, seen + len(rows)
    return count


def _form(encoding: str | None, came: TensorForm) -> TensorForm:
    """Return the form of the tensors of a JSON answer: that of `query` unless the request sets `encoding`."""
    if encoding == "base64" or (came is TensorForm.BINARY and encoding is None):
        return TensorForm.BASE64
    if encoding is None:
        return came
    return TensorForm.NESTED if came is TensorForm.NESTED else TensorForm.LIST
