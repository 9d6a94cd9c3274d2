"""Schemas: pydantic models of the JSON of an attend request and of its answer.

Invariants: The models check everything except tensors, and OpenAPI shows them. Tensors pass through unchanged (`tensors.py`
decodes them). Unknown fields of a request are rejected everywhere. A caller never sees a message of pydantic.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema

from service.errors import BadMask, InvalidInput, MaskKindRequired, UnknownField
from service.wire.dtypes import DTYPES
from service.wire.number_list import NumberList

MAX_MASKS = 16

_TENSOR_OBJECT: dict[str, Any] = {
    "type": "object",
    "required": ["dtype", "shape", "data"],
    "additionalProperties": False,
    "properties": {
        "dtype": {"enum": [dtype.name for dtype in DTYPES]},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        "data": {
            "anyOf": [
                {"type": "string", "contentEncoding": "base64", "description": "little-endian bytes in C order"},
                {"type": "array", "items": {}, "description": "flat list of the values"},
            ]
        },
    },
}


def _tensor_schema(description: str, items: dict[str, Any] | None = None) -> WithJsonSchema:
    nested: dict[str, Any] = {"type": "array", "items": items or {}, "description": "nested lists of numbers (float32)"}
    return WithJsonSchema({"anyOf": [nested, _TENSOR_OBJECT], "description": description})


Tensor = Annotated[Any, _tensor_schema("a tensor: nested lists, or an object with dtype, shape and data")]
Lengths = Annotated[
    Any, WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"type": "array", "items": {}}, _TENSOR_OBJECT]})
]
Indices = Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1})]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class AttendMask(_Strict):
    """true = may attend (torch scaled_dot_product_attention, ONNX, Keras, JAX)."""

    kind: Literal["attend"]
    values: Tensor


class IgnoreMask(_Strict):
    """true = blocked (torch nn.MultiheadAttention's attn_mask and key_padding_mask)."""

    kind: Literal["ignore"]
    values: Tensor


class LengthsMask(_Strict):
    """Only the first n keys: a number or [L] for one sequence, [B] or [B, L] for a batch."""

    kind: Literal["lengths"]
    values: Lengths


class BiasMask(_Strict):
    """Added to the scaled scores; "-inf" = may not attend."""

    kind: Literal["bias"]
    values: Tensor


class _Aligned(_Strict):
    align: Literal["top_left", "bottom_right"] | None = None
    offset: int | None = None


class CausalMask(_Aligned):
    """Query i sees keys up to i + offset; top_left = 0, bottom_right = S - L; may be left out only where L = S."""

    kind: Literal["causal"]


class WindowMask(_Aligned):
    """Query i sees keys from i + offset - left to i + offset + right; null = open."""

    kind: Literal["window"]
    left: Annotated[int, Field(ge=0)] | None = None
    right: Annotated[int, Field(ge=0)] | None = None


MaskField = Annotated[
    AttendMask | IgnoreMask | LengthsMask | BiasMask | CausalMask | WindowMask, Field(discriminator="kind")
]
MASK_KINDS: dict[str, type[BaseModel]] = {
    "attend": AttendMask,
    "ignore": IgnoreMask,
    "lengths": LengthsMask,
    "bias": BiasMask,
    "causal": CausalMask,
    "window": WindowMask,
}


class WeightsField(_Strict):
    """Which attention weights to return: all heads, their mean, or the k largest of each row."""

    form: Literal["heads", "mean", "top_k"]
    k: Annotated[int, Field(ge=1)] | None = None
    heads: Indices | None = None
    queries: Indices | None = None
    dtype: Literal["float32", "float16"] = "float32"


class AttendRequest(_Strict):
    """One sequence [L, d], or B sequences of one length [B, L, d], for a multi-head attention layer."""

    query: Tensor
    key: Tensor | None = None
    value: Tensor | None = None
    # A factory, because pydantic deep-copies a default list for every request.
    masks: Annotated[list[MaskField], Field(default_factory=list, max_length=MAX_MASKS)]
    weights: WeightsField | None = None
    masked_rows: Literal["zero", "error"] = "zero"
    encoding: Literal["list", "base64"] | None = None


class LayerName(BaseModel):
    name: str
    digest: str


class BatchField(BaseModel):
    """What shared the forward pass with this request, itself included."""

    requests: int
    sequences: int
    tokens: int


class TimingField(BaseModel):
    """Milliseconds; `total` runs from the complete body to the encoded answer."""

    decode: float
    queue: float
    compute: float
    total: float


class TopKField(BaseModel):
    values: Tensor
    indices: Tensor
    rest: Tensor


class AttendAnswer(BaseModel):
    output: Tensor
    weights: Tensor | TopKField | None
    masked_rows: int
    layer: LayerName
    batch: BatchField
    timing_ms: TimingField


class Problem(BaseModel):
    """RFC 9457 problem details."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    param: str | None
    request_id: str


def checked_request(value: Mapping[str, object]) -> AttendRequest:
    """Return the request; raises its first error as a ServiceError, with unknown fields before all others.

    Names are compared here, because pydantic would describe each of a hundred thousand wrong fields.
    """
    _check_names(value, AttendRequest, "")
    masks, weights = value.get("masks"), value.get("weights")
    if isinstance(masks, NumberList):  # a bare array
        _checked_kind(None, "/masks/0")
    if isinstance(weights, dict):
        _check_names(weights, WeightsField, "/weights")
    for i, mask in enumerate(masks[:MAX_MASKS] if isinstance(masks, list) else []):
        _check_names(mask, _checked_kind(mask, f"/masks/{i}"), f"/masks/{i}")
    try:
        return AttendRequest.model_validate(value)
    except ValidationError as error:
        raise translated(error) from None


def _check_names(value: Mapping[str, object], model: type[BaseModel], where: str) -> None:
    """Raise UnknownField with the known names and the nearest of them; the message never contains the caller's text."""
    known = _NAMES[model]
    if value.keys() <= known.keys():
        return
    unknown = next(name for name in value if name not in known)
    near = difflib.get_close_matches(unknown[:64], list(known), n=1)
    hint = f'; did you mean "{near[0]}"?' if near else ""
    raise UnknownField(f"unknown field in {where or 'the request'}; it takes {', '.join(known)}{hint}", param=where)


# Kept here, because every request needs them and pydantic builds them at each access.
_MODELS: tuple[type[BaseModel], ...] = (AttendRequest, WeightsField, *MASK_KINDS.values())
_NAMES = {model: dict(model.model_fields) for model in _MODELS}


def _checked_kind(mask: Any, param: str) -> type[BaseModel]:
    """Return the model of the mask's kind; raises MaskKindRequired, with an explanation, for a mask without a kind."""
    if not isinstance(mask, dict) or "kind" not in mask:
        raise MaskKindRequired(
            'a mask must say what its values mean: write {"kind": "attend", "values": …} where true = may attend, or '
            '{"kind": "ignore", …} where true = blocked. A bare array is refused because torch\'s own two conventions '
            f"contradict each other. Kinds: {', '.join(MASK_KINDS)}",
            param=param,
        )
    kind = mask["kind"]
    if not isinstance(kind, str) or kind not in MASK_KINDS:
        raise BadMask(f"the mask's kind must be one of {', '.join(MASK_KINDS)}", param=f"{param}/kind")
    return MASK_KINDS[kind]


# Our message for each of pydantic's error types; `{expected}` comes from our models, never from the caller.
_WORDS = {
    "missing": "is required",
    "literal_error": "must be one of {expected}",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "greater_than_equal": "must be at least {ge}",
    "list_type": "must be a list",
    "too_long": "has more than {max_length} entries",
    "string_too_long": "has more than {max_length} characters",
    "string_unicode": "must be text",
    "value_error": "must be text",
    "too_short": "must not be empty",
    "string_type": "must be a string",
    "bool_type": "must be true or false",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "dict_type": "must be an object",
}


def translated(error: ValidationError) -> InvalidInput:
    """Return the first of pydantic's errors with our message."""
    first = error.errors(include_url=False)[0]
    # A discriminated union adds the tag to the location: the caller's /masks/0/offset is /masks/0/causal/offset here.
    loc = [part for i, part in enumerate(first["loc"]) if not (i == 2 and first["loc"][0] == "masks")]  # noqa: PLR2004
    param = "".join(f"/{part}" for part in loc)
    context = first.get("ctx", {})
    words = _WORDS.get(first["type"], "is not valid")
    words = words.format_map({**context, "expected": context.get("expected", "")})
    is_mask = len(loc) > 1 and loc[0] == "masks"
    return (BadMask if is_mask else InvalidInput)(f"{param.lstrip('/') or 'the request'} {words}", param=param)
