"""Checked request: a call that can run, its exact cost, its limits, and the steps that every kind of request shares.

Invariants: Every error that one request can contain is found before the request is queued. Counting masked rows may be left to
the caller, because it is slow for many scores. Sizes are Python integers, which do not overflow.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from pydantic import BaseModel, ValidationError

from service.attention.call import Answer, AttentionAnswer, AttentionCall, Call
from service.attention.masks import CombinedMask, Sizes, masked_rows
from service.batching.job import Cost
from service.errors import CostLimit, MaskedRow
from service.wire.answer import named_tensors
from service.wire.layouts import Layout
from service.wire.mask_kinds import MAX_MASKS, MaskKind, MaskPlace, TableMask, ValuedMask, kind_of
from service.wire.number_list import NumberList
from service.wire.schemas import StrictModel, translated, unknown_field
from service.wire.tensor_fields import TensorField
from service.wire.tensors import TensorForm

M = TypeVar("M", bound=StrictModel)

# Counting the masked rows of this many attention scores takes about a millisecond.
MAX_COUNTED_CELLS = 2**21


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

    call: Call | AttentionCall
    cost: Cost
    masked_rows: int
    is_batch: bool
    form: TensorForm
    count_masked_rows: Callable[[], int] | None = None
    """The last check, left to the caller where it is slow: it returns `masked_rows` or raises MaskedRow."""
    layout: Layout | None = None
    """The layout of the caller's own tensors; None for a layer."""

    def tensors(self, answer: Answer | AttentionAnswer) -> dict[str, torch.Tensor]:
        """Return the named tensors of the answer with the axes of the request."""
        found = named_tensors(answer, self.layout)
        if self.is_batch or self.layout is not None:
            return found
        return {name: tensor[0] for name, tensor in found.items()}

    def counted(self) -> CheckedRequest:
        """Return the request with its masked rows counted; raises MaskedRow."""
        if self.count_masked_rows is None:
            return self
        return self._replace(masked_rows=self.count_masked_rows(), count_masked_rows=None)


def read_model(model: type[M], document: Mapping[str, object], parts: Mapping[str, type[BaseModel]]) -> M:
    """Return the request in a document; raises its first error as a ServiceError, with unknown fields before all others.

    `parts` are the models of its fields that are objects; masks have the models of their kinds.
    """
    _check_names(document, model, "")
    for name, part in parts.items():
        if isinstance(value := document.get(name), dict):
            _check_names(value, part, f"/{name}")
    masks = document.get("masks")
    if isinstance(masks, NumberList) or (isinstance(masks, dict) and "data" in masks):  # a bare array
        kind_of(None, "/masks/0")
    for i, mask in enumerate(masks[:MAX_MASKS] if isinstance(masks, list) else []):
        _check_names(mask, kind_of(mask, f"/masks/{i}"), f"/masks/{i}")
    try:
        return model.model_validate(document)
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


def values_params(masks: Sequence[MaskKind], known: Sequence[str]) -> list[str]:
    """Return the JSON pointer to the values of each mask; `known` are those of the first masks."""
    return [known[i] if i < len(known) else f"/masks/{i}/values" for i in range(len(masks))]


def values_of(masks: Sequence[MaskKind], params: Sequence[str]) -> list[tuple[object, TensorField]]:
    """Return the values of the masks before decoding, with their fields."""
    pairs = zip(masks, params, strict=True)
    return [(mask.values, TensorField(param, mask.VALUES)) for mask, param in pairs if isinstance(mask, ValuedMask)]


def check_axes(masks: Sequence[MaskKind], params: Sequence[str]) -> None:
    """Raise MaskAxesRequired for a mask of a batch with two readings, before any shape is checked: no size may choose one."""
    for i, (mask, param) in enumerate(zip(masks, params, strict=True)):
        if isinstance(mask, TableMask):
            mask.check_axes_of_batch(f"/masks/{i}", param)


def combined_mask(
    masks: Sequence[MaskKind], sizes: Sizes, params: Sequence[str], *, is_batch: bool, past: int = 0
) -> CombinedMask | None:
    """Return the masks as tensors; None without masks. `past` is the number of keys before those of the request."""
    places = [MaskPlace(sizes, is_batch, f"/masks/{i}", param, past) for i, param in enumerate(params)]
    found = tuple(mask.mask(place) for mask, place in zip(masks, places, strict=True))
    return CombinedMask(sizes, found) if found else None


def with_masked_rows(request: CheckedRequest, mask: CombinedMask | None, *, is_error: bool) -> CheckedRequest:
    """Return the request with its masked rows counted, or with the counting left to the caller; raises MaskedRow."""
    if mask is None:
        return request
    request = request._replace(count_masked_rows=functools.partial(_count_masked_rows, mask, is_error=is_error))
    return request if request.cost.cells > MAX_COUNTED_CELLS else request.counted()


def check_cost(cost: Cost, tables: int, limits: RequestLimits) -> None:
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
