"""Schemas: what the pydantic models of requests share: strictness, and the errors of names and fields in our words.

Invariants: The models check everything except tensors, and OpenAPI shows them. Tensors pass through unchanged (`tensors.py`
decodes them). Unknown fields of a request are rejected everywhere. A caller never sees a message of pydantic.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, ValidationError, WithJsonSchema

from service.errors import BadMask, InvalidInput, UnknownField
from service.wire.tensor_fields import DTYPES, words_of

TENSOR_OBJECT: dict[str, Any] = {
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


_NESTED = {"type": "array", "items": {}, "description": "nested lists of numbers (float32)"}
_WORDS_OF_TENSOR = "a tensor: nested lists, or an object with dtype, shape and data"
Tensor = Annotated[Any, WithJsonSchema({"anyOf": [_NESTED, TENSOR_OBJECT], "description": _WORDS_OF_TENSOR})]


class StrictModel(BaseModel):
    """A model of a request: it takes no unknown fields and converts no types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Problem(BaseModel):
    """RFC 9457 problem details."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    param: str | None
    request_id: str


def unknown_field(value: Mapping[str, object], known: Iterable[str], where: str) -> UnknownField:
    """Return the error for a name in `value` that is not `known`: it gives the known names and the nearest of them, and never
    the caller's text.
    """
    names = list(known)
    unknown = next(name for name in value if name not in names)
    near = difflib.get_close_matches(unknown[:64], names, n=1)
    hint = f'; did you mean "{near[0]}"?' if near else ""
    return UnknownField(
        f"unknown field in {words_of(where) or 'the request'}; the fields are {', '.join(names)}{hint}", param=where
    )


# Our message for each of pydantic's error types; `{expected}` comes from our models, never from the caller.
_WORDS = {
    "missing": "is required",
    "literal_error": "must be one of {expected}",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "float_type": "must be a number",
    "list_type": "must be a list",
    "too_long": "must have at most {max_length} entries",
    "string_too_long": "must have at most {max_length} characters",
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
    return (BadMask if is_mask else InvalidInput)(f"{words_of(param) or 'the request'} {words}", param=param)
