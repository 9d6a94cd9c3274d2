"""Schemas: the JSON forms of a request and of an answer, as pydantic models.

Laws: these models check what is not a tensor and are what OpenAPI shows; tensors pass through as they came (`tensors.py` reads
them); unknown fields are refused everywhere; pydantic's own words never reach a caller (`checked` translates them).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema

from service.errors import BadMask, InvalidInput, MaskKindRequired, UnknownField

MAX_MASKS = 16

_DTYPES = ["float16", "bfloat16", "float32", "float64", "bool", "int32", "int64"]
_TENSOR_OBJECT: dict[str, Any] = {
    "type": "object",
    "required": ["dtype", "shape", "data"],
    "additionalProperties": False,
    "properties": {
        "dtype": {"enum": _DTYPES},
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
MASK_KINDS = ("attend", "ignore", "lengths", "bias", "causal", "window")


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
    masks: Annotated[list[MaskField], Field(max_length=MAX_MASKS)] = []
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


M = TypeVar("M", bound=BaseModel)


def checked(model: type[M], value: Mapping[str, object]) -> M:
    """The model of `value`, or the first thing that is wrong with it as one of our errors."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _translated(error, model, value) from None


def checked_request(value: Mapping[str, object]) -> AttendRequest:
    """As `checked`, with the mask errors that deserve an explanation."""
    masks = value.get("masks")
    for i, mask in enumerate(masks if isinstance(masks, list) else []):
        _check_kind(mask, f"/masks/{i}")
    return checked(AttendRequest, value)


def _check_kind(mask: object, param: str) -> None:
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


# What each of pydantic's error types means in our words; `{expected}` comes from our own models, never from the caller.
_WORDS = {
    "missing": "is required",
    "literal_error": "must be one of {expected}",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "greater_than_equal": "must be at least {ge}",
    "list_type": "must be a list",
    "too_long": "has more than {max_length} entries",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "dict_type": "must be an object",
}


def _translated(error: ValidationError, model: type[BaseModel], value: Mapping[str, object]) -> InvalidInput:
    """The first error in our words; an unknown field before everything else (the contract's order of checks)."""
    found = error.errors(include_url=False, include_input=False)
    first = next((item for item in found if item["type"] == "extra_forbidden"), found[0])
    # A discriminated union puts the tag into the location: /masks/0/causal/offset is /masks/0/offset to the caller.
    loc = [part for i, part in enumerate(first["loc"]) if not (i == 2 and first["loc"][0] == "masks")]  # noqa: PLR2004
    if first["type"] == "extra_forbidden":
        return _unknown_field(loc, model, value)
    param = "".join(f"/{part}" for part in loc)
    context = first.get("ctx", {})
    words = _WORDS.get(first["type"], "is not valid").format_map({**context, "expected": context.get("expected", "")})
    is_mask = len(loc) > 1 and loc[0] == "masks"
    return (BadMask if is_mask else InvalidInput)(f"{param.lstrip('/') or 'the request'} {words}", param=param)


def _unknown_field(loc: list[int | str], model: type[BaseModel], value: Mapping[str, object]) -> UnknownField:
    """Names the parent and what it takes, and the nearest of our own names; never the caller's."""
    owner: type[BaseModel] = model
    if loc[0] == "weights" and len(loc) > 1:
        owner = WeightsField
    elif loc[0] == "masks" and len(loc) > 1:
        masks = value["masks"]
        kind = masks[int(loc[1])]["kind"] if isinstance(masks, list) else ""
        owner = next(
            m
            for m in (AttendMask, IgnoreMask, LengthsMask, BiasMask, CausalMask, WindowMask)
            if m.__name__ == f"{kind.title()}Mask"
        )
    known = list(owner.model_fields)
    near = difflib.get_close_matches(str(loc[-1])[:64], known, n=1)
    hint = f'; did you mean "{near[0]}"?' if near else ""
    where = "".join(f"/{part}" for part in loc[:-1])
    return UnknownField(f"unknown field in {where or 'the request'}; it takes {', '.join(known)}{hint}", param=where)
