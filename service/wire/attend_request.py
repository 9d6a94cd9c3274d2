"""Attend request: its JSON form, and its check against a layer and the limits, which gives a call with its exact cost.

Attention without a layer (`attention_request.py`) has the same weights, limits and last steps. The names of an answer's tensors,
and the facts beside them, are here too, because every form of an answer has them.
Invariants: Every error that one request can contain is found before the request is queued. The checks run in the order of the
contract: unknown field, dtype, shape, mask, cost. What costs too much by its shapes alone is refused before masks are made.
Counting masked rows may be left to the caller, because it is slow for many scores. Sizes are Python integers, which do not
overflow.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import torch
from pydantic import BaseModel, BeforeValidator, Field, SkipValidation, ValidationError
from typing_extensions import TypeAliasType

from service.attention import masks
from service.attention.call import POSITIONS, Answer, AttentionCall, Call, TopK, WeightsWanted
from service.attention.cost import flops, table_bytes
from service.attention.masks import CombinedMask, Mask, Sizes, masked_rows
from service.attention.spec import LayerSpec
from service.batching.job import BatchInfo, Cost
from service.errors import BadShape, CostLimit, InvalidInput, MaskedRow
from service.wire.layouts import ONE_ROW, Layout
from service.wire.mask_kinds import MAX_MASKS, MaskKind, MaskList, MaskPlace, TableMask, ValuedMask, kind_of
from service.wire.number_list import NumberList
from service.wire.positions import PAST_FIELDS, POSITION_FIELDS, check_past, past_of, positions_of
from service.wire.schemas import M, StrictModel, Tensor, translated, unknown_field
from service.wire.tensor_fields import TensorField, TensorKind, expect
from service.wire.tensors import TensorForm, answer_form, check_fields, decode_tensor, rank_of

BATCH_RANK = 3
TOP_K = TopK._fields
EXTRAS = ("scores", "lse", "entropy", "present_key", "present_value")
"""Tensors that an answer has only if the request asks for them."""
# Counting the masked rows of this many attention scores takes about a millisecond. Reading a mask for one of the sequences takes
# as long as so many scores: 10 to 20 µs, however short the sequence.
MAX_COUNTED_CELLS = 2**21
READ_CELLS = 2**15
_SPLIT = "send the sequences in several requests"
_SPLIT_ROWS = f"{_SPLIT}, or a long sequence's query rows in parts"
_FEWER_WEIGHTS = 'ask for "mean", for "top_k", or for some heads and queries'
_SMALLER_TABLES = "a mask without a head axis, and an answer without weights, need less"

Indices = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1), SkipValidation]
_ONCE = "in this order, each once; default: all"
HeadIndices = Annotated[Indices | None, Field(description=f"heads, from 0 to H - 1, {_ONCE}")]
RowIndices = Annotated[Indices | None, Field(description=f"query rows, from 0 to L - 1, {_ONCE}")]
ReturnedDtype = TypeAliasType("ReturnedDtype", Literal["float32", "float16", "float64"])
_DTYPE_WORDS = "of what is returned; default: float64 if query is, else float32; float64 needs a float64 query"
DtypeField = Annotated[ReturnedDtype | None, Field(description=_DTYPE_WORDS)]


class Weights(StrictModel):
    """Which attention weights to return: all heads, their mean, the k largest of each row, or what each key adds."""

    form: Literal["heads", "mean", "top_k", "contributions"] = Field(
        description="each head, their mean, the k largest of each row, or, for each head, the length of what each key adds to "
        "the output: ‖α·v·W_O‖, without a layer ‖α·v‖"
    )
    k: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="1 to S: required with top_k, and only there"
    )
    heads: HeadIndices = None
    queries: RowIndices = None
    dtype: DtypeField = None

    def wanted(self, sizes: Sizes, query: torch.dtype) -> WeightsWanted:
        """Return the selection for a call of these sizes, keys with the columns that a layer appends.
        Raises InvalidInput for a `k` or an index out of range, and for float64 where `query` is not.
        """
        if (self.form == "top_k") != (self.k is not None):
            words = 'weights.k is required with form "top_k" and allowed with no other form'
            raise InvalidInput(words, param="/weights/k")
        if self.k is not None and self.k > sizes.keys:
            raise InvalidInput(f"weights.k must be from 1 to {sizes.keys}, the number of keys", param="/weights/k")
        heads = decode_indices(self.heads, sizes.heads, "/weights/heads")
        queries = decode_indices(self.queries, sizes.queries, "/weights/queries")
        return WeightsWanted(self.form, self.k, heads, queries, _selection_dtype(self.dtype, query, "weights"))


Stage = TypeAliasType("Stage", Literal["scaled", "capped", "masked"])


class Scores(StrictModel):
    """Which attention scores to return: times the scale, then capped, then masked (ONNX's output modes 0, 1 and 2)."""

    stage: Stage = Field(description="times the scale; then capped; then masked")
    heads: HeadIndices = None
    queries: RowIndices = None
    dtype: DtypeField = None

    def wanted(self, sizes: Sizes, query: torch.dtype) -> WeightsWanted:
        """Return the selection for a call of these sizes; raises InvalidInput as that of weights does."""
        heads = decode_indices(self.heads, sizes.heads, "/scores/heads")
        queries = decode_indices(self.queries, sizes.queries, "/scores/queries")
        dtype = _selection_dtype(self.dtype, query, "scores")
        return WeightsWanted("heads", None, heads, queries, dtype, self.stage)


_PARTS: dict[str, type[StrictModel]] = {"weights": Weights, "scores": Scores}
"""The fields of requests that are objects, masks aside."""
ShortWeights = TypeAliasType("ShortWeights", Literal["heads", "mean", "contributions"])
_FromShortForm = Annotated[
    Weights,
    BeforeValidator(
        lambda value: {"form": value} if isinstance(value, str) else value,
        json_schema_input_type=Weights | ShortWeights,
    ),
]
_WEIGHTS_WORDS = 'attention weights to return; "heads", "mean" and "contributions" are short forms; default: none'
WeightsSelection = Annotated[_FromShortForm | None, Field(description=_WEIGHTS_WORDS)]
ScoresSelection = Annotated[Scores | None, Field(description="attention scores to return; default: none")]
_LSE_WORDS = "return the log-sum-exp of the masked scores and sinks; default: no"
LseField = Annotated[bool, Field(description=_LSE_WORDS)]
_ENTROPY_WORDS = "return the entropy -Σ p·ln p of each row of weights in nats, 0 for a masked row; default: no"
EntropyField = Annotated[bool, Field(description=_ENTROPY_WORDS)]
_ROWS_WORDS = "a row that may attend to nothing: zero gives zeros, error is a 422; default: zero"
MaskedRows = TypeAliasType("MaskedRows", Literal["zero", "error"])
MaskedRowsField = Annotated[MaskedRows, Field(description=_ROWS_WORDS)]
_ENCODING_WORDS = "how the tensors of the answer are written; default: as query came"
Encoding = TypeAliasType("Encoding", Literal["list", "base64"])
EncodingField = Annotated[Encoding | None, Field(description=_ENCODING_WORDS)]
LayerMasks = TypeAliasType("LayerMasks", Literal["apply", "none"])


def _selection_dtype(asked: str | None, query: torch.dtype, name: str) -> torch.dtype:
    """Return the dtype of returned weights or scores; raises InvalidInput for one wider than they are computed in."""
    computed = torch.promote_types(query, torch.float32)
    if asked == "float64" and computed != torch.float64:
        words = f"must be float32 or float16 unless query is float64: the {name} are computed in float32"
        raise InvalidInput(f"{name}.dtype {words}", param=f"/{name}/dtype")
    return computed if asked is None else getattr(torch, asked)


def decode_indices(value: object, count: int, param: str) -> tuple[int, ...] | None:
    """Return the indices in the caller's order, None for all; raises InvalidInput unless they are unique and in range."""
    if value is None:
        return None
    field = TensorField(param, TensorKind.INT)
    tensor = decode_tensor(value, field)
    # Check the length first, so that a list of millions of entries is not converted.
    found = tuple(tensor.tolist()) if tensor.dim() == 1 and len(tensor) <= count else ()
    if not found or len(set(found)) != len(found) or min(found) < 0 or max(found) >= count:
        raise field.error(InvalidInput, f"must be a non-empty list of different numbers from 0 to {count - 1}")
    return found


def extras_bytes(call: Call | AttentionCall, sizes: Sizes) -> int:
    """Return the bytes of one sequence's returned weights, scores, lse and entropy; keys with the columns of a layer."""
    _, heads, queries, keys = sizes
    found = sum(_selection_bytes(one, heads, queries, keys) for one in (call.weights, call.scores) if one is not None)
    itemsize = torch.promote_types(call.query.dtype, torch.float32).itemsize
    return found + (call.has_lse + call.has_entropy) * heads * queries * itemsize


def _selection_bytes(wanted: WeightsWanted, heads: int, queries: int, keys: int) -> int:
    """Return the bytes of one sequence's returned weights or scores, including the indices and rest of top_k."""
    heads = 1 if wanted.form == "mean" else heads if wanted.heads is None else len(wanted.heads)
    rows = heads * (queries if wanted.queries is None else len(wanted.queries))
    size = wanted.dtype.itemsize
    if wanted.k is not None:
        return rows * (wanted.k * (size + torch.int32.itemsize) + size)
    return rows * keys * size


class AttendRequest(StrictModel):
    """One sequence [L, d], or B sequences of one length [B, L, d], for a multi-head attention layer."""

    query: Tensor = Field(description="[L, d], or [B, L, d] for B sequences; d as the layer has it, L and B at least 1")
    key: Tensor | None = Field(default=None, description="[S, d], or [B, S, d]; default: query")
    value: Tensor | None = Field(default=None, description="[S, dv], or [B, S, dv]; default: key")
    positions: Tensor | None = Field(
        default=None, description="[L] or [B, L], whole numbers from 0, for a layer that uses them; default: 0, 1, …"
    )
    key_positions: Tensor | None = Field(
        default=None, description="[S] or [B, S], those of the past included; default: positions, or 0, 1, …"
    )
    layer_masks: LayerMasks = Field(
        default="apply", description="whether the layer's own window applies; default: apply"
    )
    past_key: Tensor | None = Field(
        default=None, description="[Hkv, P, d] or [B, Hkv, P, d] of an answer's present_key, before key; default: none"
    )
    past_value: Tensor | None = Field(default=None, description="[Hkv, P, V] or [B, Hkv, P, V]; comes with past_key")
    present: bool = Field(default=False, description="return present_key and present_value, old and new; default: no")
    masks: MaskList
    weights: WeightsSelection = None
    scores: ScoresSelection = None
    lse: LseField = False
    entropy: EntropyField = False
    masked_rows: MaskedRowsField = "zero"
    encoding: EncodingField = None


@dataclasses.dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of one request; `max_cells` counts attention scores: sequences x heads x L x S. `max_table_bytes` limits the tables
    of one sequence, because sequences are computed one at a time.
    """

    max_sequences: int
    max_tokens: int
    max_cells: int
    max_weights_bytes: int
    max_table_bytes: int

    def check(self, cost: Cost, tables: int) -> None:
        """Raise CostLimit for the first need above its limit; `tables` is the bytes of one sequence's tables."""
        for what, need, limit, setting, cheaper in (
            ("sequences", cost.sequences, self.max_sequences, "SEQUENCES", _SPLIT),
            ("query and key rows", cost.tokens, self.max_tokens, "REQUEST_TOKENS", _SPLIT),
            ("attention scores (sequences x heads x L x S)", cost.cells, self.max_cells, "REQUEST_CELLS", _SPLIT_ROWS),
            ("bytes of returned weights", cost.weights_bytes, self.max_weights_bytes, "WEIGHTS_BYTES", _FEWER_WEIGHTS),
            ("bytes of tables for its masks and weights", tables, self.max_table_bytes, "TABLE_BYTES", _SMALLER_TABLES),
        ):
            if need > limit:
                raise CostLimit(
                    f"the request needs {need:,} {what}, expected at most {limit:,} (ATTENTION_MAX_{setting}); {cheaper}"
                )


class RequestMasks:
    """The masks of one request, each with the JSON pointer to itself and the one to its values."""

    def __init__(self, masks: Sequence[MaskKind], values_params: Sequence[str] = ()) -> None:
        """`values_params` are the pointers to the values of the first masks; the default is `/masks/<i>/values`."""
        self._masks = [
            (mask, f"/masks/{i}", values_params[i] if i < len(values_params) else f"/masks/{i}/values")
            for i, mask in enumerate(masks)
        ]

    def fields(self) -> list[tuple[object, TensorField]]:
        """Return the values of the masks before decoding, with their fields."""
        return [
            (mask.values, TensorField(values_param, mask.VALUES))
            for mask, _, values_param in self._masks
            if isinstance(mask, ValuedMask)
        ]

    def check_axes(self) -> None:
        """Raise MaskAxesRequired if a mask of a batch has two readings. Call it before shapes are checked: no size may choose."""
        for mask, param, values_param in self._masks:
            if isinstance(mask, TableMask):
                mask.check_axes_of_batch(param, values_param)

    def combined(self, sizes: Sizes, *own: Mask, is_batch: bool, past: int = 0) -> CombinedMask | None:
        """Return the masks as tensors, and a layer's `own`; None without any. `past` keys stand before those of the request."""
        found = tuple(
            mask.mask(MaskPlace(sizes, is_batch, param, values_param, past))
            for mask, param, values_param in self._masks
        )
        return CombinedMask(sizes, found + own) if found or own else None


class CheckedRequest(NamedTuple):
    """A call that can run, its cost, and the axes and the form of its answer."""

    call: Call | AttentionCall
    cost: Cost
    layout: Layout
    form: TensorForm
    rejects_masked_rows: bool = False
    masked_rows: int = 0
    is_counted: bool = True
    """False while the masked rows are not counted yet: `counted` does that, as the last check."""

    def tensors(self, answer: Answer) -> dict[str, torch.Tensor]:
        """Return the tensors of the answer by name, with the axes of the request.

        They are `output`, `weights` or its parts `weights.values`, `weights.indices`, `weights.rest`, and those of EXTRAS.
        """
        found = {"output": answer.output}
        if isinstance(answer.weights, TopK):
            found |= {f"weights.{name}": getattr(answer.weights, name) for name in TOP_K}
        elif answer.weights is not None:
            found["weights"] = answer.weights
        if not isinstance(self.call, Call) or self.call.asks_more or self.call.has_present:
            found |= {name: tensor for name in EXTRAS if (tensor := getattr(answer, name)) is not None}
        if isinstance(self.call, AttentionCall):
            return {name: self.layout.of_answer(tensor, name) for name, tensor in found.items()}
        return found if "b" in self.layout.axes else {name: tensor[0] for name, tensor in found.items()}

    def holding(self, num_bytes: int) -> CheckedRequest:
        """Return the request with these bytes of a body as its input if its tensors, which hold the body, are much smaller."""
        is_counted = 2 * self.cost.input_bytes >= num_bytes
        return self if is_counted else self._replace(cost=self.cost._replace(input_bytes=num_bytes))

    def counted_if_fast(self) -> CheckedRequest:
        """Return `counted` if that takes a few milliseconds at most; else the request itself, which the caller counts later."""
        mask = self.call.mask
        num_reads = 0 if mask is None else mask.sizes.sequences * len(mask.masks)
        return self.counted() if self.cost.cells + num_reads * READ_CELLS <= MAX_COUNTED_CELLS else self

    def counted(self) -> CheckedRequest:
        """Return the request with its masked rows counted: (sequence, query row) pairs with no allowed key in at least one head.
        Raises MaskedRow at the first of them if the request rejects masked rows.
        """
        if self.is_counted or (mask := self.call.mask) is None:
            return self
        count = seen = 0
        for rows in masked_rows(mask):
            found = int(rows.sum())
            if found and self.rejects_masked_rows:
                sequence, row = divmod(seen + int(rows.nonzero()[0]), mask.sizes.queries)
                words = f"query row {row} of sequence {sequence} may attend to no key in at least one head"
                raise MaskedRow(words, param="/masks")
            count, seen = count + found, seen + len(rows)
        return self._replace(masked_rows=count, is_counted=True)


class Facts(Protocol):
    """The fields of an answer beside its tensors."""

    def to_json(self) -> dict[str, Any]: ...


class AnswerFacts(NamedTuple):
    """The fields of an answer beside its tensors; `timing_ms` is called last, after the tensors are written."""

    masked_rows: int
    layer: str
    digest: str | None
    batch: BatchInfo
    timing_ms: Callable[[], dict[str, float]]

    def to_json(self) -> dict[str, Any]:
        batch = self.batch
        return {
            "masked_rows": self.masked_rows,
            "layer": {"name": self.layer, "digest": self.digest},
            "batch": {"requests": batch.requests, "sequences": batch.sequences, "tokens": batch.tokens},
            "timing_ms": self.timing_ms(),
        }


def check_request(
    document: Mapping[str, object], name: str, spec: LayerSpec, limits: RequestLimits, mask_params: Sequence[str] = ()
) -> CheckedRequest:
    """Return the checked call for layer `name` in a decoded body; the caller runs the remaining check (`counted`).

    Raises InvalidInput or a subclass for malformed input, and CostLimit for a request above its limits. `mask_params` are as in
    RequestMasks.
    """
    body = read_model(AttendRequest, document)
    asked = RequestMasks(body.masks, mask_params)
    given = {field: value for field in _FIELDS if (value := getattr(body, field)) is not None}
    check_fields([(value, _FIELDS[field]) for field, value in given.items()] + asked.fields())
    if is_batch := rank_of(body.query) == BATCH_RANK:
        asked.check_axes()
    layout = Layout("bld" if is_batch else "ld")
    call = _call(body, given, name, spec, layout)
    window = spec.window if body.layer_masks == "apply" else None
    if spec.uses_positions or "positions" in given or "key_positions" in given:
        places = {field: given[field] for field in POSITIONS if field in given}
        has_window = window is not None
        call = call._replace(**positions_of(call, places, name, spec, is_batch=is_batch, has_window=has_window))
    past = call.num_past
    sizes = Sizes(len(call.query), spec.num_heads, call.query.shape[1], past + call.source.shape[1])
    whole = sizes._replace(keys=sizes.keys + spec.extra_keys) if spec.extra_keys else sizes
    weights, scores = selections(body, whole, call.query.dtype)
    if weights is not None or scores is not None:
        call = call._replace(weights=weights, scores=scores)
    if body.masks or window is not None:
        limits.check(_cost(spec, call, sizes), 0)  # before masks are made of these sizes
        own = () if window is None else (masks.of_positions(window, *call.places),)
        call = call._replace(mask=asked.combined(sizes, *own, is_batch=is_batch, past=past))
    cost = _cost(spec, call, sizes)
    limits.check(cost, table_bytes(call, whole, spec))
    form, is_error = answer_form(body.query, body.encoding), body.masked_rows == "error"
    # Every row may attend to the columns that a layer appends, and within a window to the key at its own position.
    sees_itself = not body.masks and call.key_positions is call.positions
    is_counted = call.mask is None or spec.extra_keys > 0 or sees_itself
    return CheckedRequest(call, cost, layout, form, is_error, is_counted=is_counted).counted_if_fast()


def _call(body: AttendRequest, given: Mapping[str, object], name: str, spec: LayerSpec, layout: Layout) -> Call:
    """Return the call without positions, masks and selections."""
    is_batch = "b" in layout.axes
    query = _rows(body.query, _FIELDS["query"], spec.query_width, name, is_batch)
    key = None if body.key is None else _rows(body.key, _FIELDS["key"], spec.key_width, name, is_batch)
    value = None if body.value is None else _rows(body.value, _FIELDS["value"], spec.value_width, name, is_batch)
    _check_together(query, key, value, spec)
    call = Call(query, key, value, has_lse=body.lse, has_entropy=body.entropy, has_present=body.present)
    if body.past_key is None and body.past_value is None:
        return call
    cached = {field: decode_tensor(given[field], _FIELDS[field]) for field in PAST_FIELDS if field in given}
    past, other = past_of(cached, layout), f'layer "{name}"'
    check_past(past, len(query), spec.num_kv_heads, (spec.head_width, spec.value_head_width), (other, other))
    return call._replace(**past)


def selections(body: Any, sizes: Sizes, query: torch.dtype) -> tuple[WeightsWanted | None, WeightsWanted | None]:
    """Return the weights and the scores that a request selects, for a call of these sizes; raises InvalidInput."""
    weights, scores = body.weights, body.scores
    return weights and weights.wanted(sizes, query), scores and scores.wanted(sizes, query)


def _rows(value: object, field: TensorField, width: int, name: str, is_batch: bool) -> torch.Tensor:
    """Return the rows as [B, L, d]; raises BadShape for a wrong rank, an empty axis, or a d other than `width`."""
    tensor = decode_tensor(value, field)
    if tensor.dim() not in (BATCH_RANK, BATCH_RANK - 1):
        raise field.error(BadShape, f"must be [L, d] or [B, L, d], got {list(tensor.shape)}{ONE_ROW}")
    if (tensor.dim() == BATCH_RANK) != is_batch:
        layout = "B sequences [B, S, d]" if is_batch else "one sequence [S, d]"
        raise field.error(BadShape, f"must be {layout} like query, got {list(tensor.shape)}")
    if 0 in tensor.shape:
        raise field.error(BadShape, f"must not be empty, got {list(tensor.shape)}{ONE_ROW}")
    if tensor.shape[-1] != width:
        raise field.error(BadShape, f'has {tensor.shape[-1]} features, layer "{name}" takes {width}')
    return tensor if is_batch else tensor.unsqueeze(0)


def _check_together(query: torch.Tensor, key: torch.Tensor | None, value: torch.Tensor | None, spec: LayerSpec) -> None:
    """Check that sequence counts agree, each key row has a value row, and no default has the wrong width."""
    if key is None and spec.needs_key:
        words = f"is required: it has {spec.key_width} features in this layer, query has {spec.query_width}"
        raise float_field("key").error(InvalidInput, words)
    if value is None and spec.needs_value:
        words = f"is required: it has {spec.value_width} features in this layer, key has {spec.key_width}"
        raise float_field("value").error(InvalidInput, words)
    for field, tensor in (("key", key), ("value", value)):
        if tensor is not None:
            expect(field, "sequences", tensor.shape[0], query.shape[0], "query")
    if value is not None:
        expect("value", "rows", value.shape[1], (query if key is None else key).shape[1], "key")


def _cost(spec: LayerSpec, call: Call, sizes: Sizes) -> Cost:
    b, n, queries, keys = sizes
    columns, past = keys + spec.extra_keys, call.num_past
    returned = extras_bytes(call, sizes._replace(keys=columns)) if call.asks_more else 0
    if call.has_present:
        widths = spec.head_width + spec.value_head_width
        returned += spec.num_kv_heads * keys * widths * call.query.element_size()
    passes = call.has_lse + call.has_entropy
    placed = call.positions, call.key_positions, call.past_key, call.past_value
    return Cost(
        sequences=b,
        tokens=b * (queries + (past if call.is_self_attention else keys)),
        cells=b * n * queries * columns,
        weights_bytes=b * returned,
        input_bytes=input_bytes((call.query, call.key, call.value, *placed), call.mask),
        flops=flops(spec, sizes, call.mask, call.weights, call.scores, num_passes=passes, num_past=past),
    )


def read_model(model: type[M], document: Mapping[str, object]) -> M:
    """Return the request in a document; raises its first error as a ServiceError, with unknown fields before all others."""
    _check_names(document, model, "")
    for name, part in _PARTS.items():
        if isinstance(value := document.get(name), dict):
            _check_names(value, part, f"/{name}")
    given = document.get("masks")
    if isinstance(given, NumberList) or (isinstance(given, dict) and "data" in given):  # a bare array
        kind_of(None, "/masks/0")
    for i, mask in enumerate(given[:MAX_MASKS] if isinstance(given, list) else []):
        _check_names(mask, kind_of(mask, f"/masks/{i}"), f"/masks/{i}")
    return validated(model, document)


def validated(model: type[M], document: Mapping[str, object]) -> M:
    """Return the model of a document; raises BadMask or InvalidInput for its first error."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise translated(error) from None


def _check_names(value: Mapping[str, object], model: type[BaseModel], where: str) -> None:
    """Raise UnknownField for a name that the model lacks. Pydantic itself would describe each of a hundred thousand names."""
    if not value.keys() <= (known := model.model_fields).keys():
        raise unknown_field(value, known, where)


@functools.cache
def float_field(name: str) -> TensorField:
    return TensorField(f"/{name}", TensorKind.FLOAT)


_FIELDS = {**{name: float_field(name) for name in ("query", "key", "value", *PAST_FIELDS)}, **POSITION_FIELDS}
"""The tensors of a request, masks aside."""


def input_bytes(tensors: Iterable[torch.Tensor | None], mask: CombinedMask | None) -> int:
    parts = [part for one in mask.masks for part in one] if mask is not None else []
    return sum(tensor.nbytes for tensor in (*tensors, *parts) if tensor is not None)
