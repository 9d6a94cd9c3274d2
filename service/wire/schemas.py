"""Schemas: what the pydantic models of requests share: strictness, and the errors of names and fields in our words.

Invariants: The models check everything except tensors, and OpenAPI shows them. Tensors pass through unchanged (`tensors.py`
decodes them). Unknown fields of a request are rejected everywhere. A caller never sees a message of pydantic.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, SkipValidation, ValidationError, WithJsonSchema
from typing_extensions import TypeAliasType

from service.errors import BadMask, InvalidInput, UnknownField
from service.wire.field_names import ECHOED, hint, instead, kind_of, words_of
from service.wire.tensor_fields import DTYPES

M = TypeVar("M", bound="StrictModel")

# OpenAPI shows an alias of this type as a schema of its name, of which a generator of clients makes one class.
Dtype = TypeAliasType("Dtype", Annotated[str, WithJsonSchema({"type": "string", "enum": [one.name for one in DTYPES]})])
Base64 = Annotated[str, WithJsonSchema({"type": "string", "contentEncoding": "base64"})]
Rows = TypeAliasType("Rows", Annotated[list[Any], Field(description="nested lists, one level an axis")])


class TensorObject(BaseModel):
    """A tensor as its dtype, its sizes and its values in C order."""

    model_config = ConfigDict(extra="forbid")

    dtype: Dtype = Field(description="of the values")
    shape: list[Annotated[int, Field(ge=0)]] = Field(description="sizes of the axes")
    data: Base64 | list[Any] = Field(description="base64 of the little-endian bytes, or a flat list of the values")


_WORDS_OF_TENSOR = "nested lists (numbers are float32), or an object with dtype, shape and data"
Tensor = TypeAliasType("Tensor", Annotated[Rows | TensorObject, SkipValidation, Field(description=_WORDS_OF_TENSOR)])


class StrictModel(BaseModel):
    """A model of a request: it takes no unknown fields and converts no types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Problem(BaseModel):
    """RFC 9457 problem details."""

    type: str = Field(description="path of the error's row on the page of errors, /docs/errors#<code>")
    title: str = Field(description="the status in words")
    status: int = Field(description="the HTTP status")
    detail: str = Field(description="what was expected and what came")
    code: str = Field(description="the stable name of the error")
    param: str | None = Field(description="JSON pointer to the field, null if there is none")
    request_id: str = Field(description="as in X-Request-ID")


def unknown_field(
    value: Iterable[str], known: Iterable[str], where: str, thing: str = "field", *, is_key: bool = True
) -> UnknownField:
    """Return the error for the first name in `value` that is not in `known`; it lists the known names and suggests one of them.

    The name is echoed if it is an identifier of at most 32 characters; otherwise only its place is named. If `is_key`,
    the name is a key of the object at `where`, so the pointer ends with it.
    """
    names = list(known)
    unknown = next(name for name in value if name not in names)
    is_echoed = ECHOED.fullmatch(unknown) is not None
    field = f'unknown {thing} "{unknown}"' if is_echoed else f"unknown {thing}"
    return UnknownField(
        f"{field} in {words_of(where) or 'the request'}; the {thing}s are {', '.join(names)}{hint(unknown, names)}",
        param=f"{where}/{unknown}" if is_echoed and is_key else where,
    )


# Our message for each of pydantic's error types; `{expected}` comes from our models, never from the caller.
_WORDS = {
    "missing": "is required",
    "literal_error": "must be one of {expected}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "float_type": "must be a number",
    "list_type": "must be a list",
    "too_long": "must have at most {max_length} entries",
    "string_too_long": "must have at most {max_length} characters",
    "too_short": "must not be empty",
    "string_type": "must be a string",
    "bool_type": "must be true or false",
    **dict.fromkeys(("int_type", "int_from_float"), "must be a whole number"),
    **dict.fromkeys(("string_unicode", "value_error"), "must be text"),
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "must be an object"),
}
_OWN_WORDS = {
    "/weights": 'must be "heads", "mean", "contributions" or an object whose form is one of them or top_k',
    "/tokens": "must be a list of strings",
}


def translated(error: ValidationError) -> InvalidInput:
    """Return BadMask or InvalidInput for the first of pydantic's errors, with our message."""
    first = error.errors(include_url=False)[0]
    # A discriminated union adds the tag to the location: the caller's /masks/0/offset is /masks/0/causal/offset here.
    loc = [part for i, part in enumerate(first["loc"]) if not (i == 2 and first["loc"][0] == "masks")]  # noqa: PLR2004
    param = "".join(f"/{part}" for part in loc)
    kind, context = first["type"], {"expected": "", **first.get("ctx", {})}
    words = _WORDS.get(kind, "is not valid").format_map(context)
    if kind == "literal_error":
        words += instead(first["input"], re.findall("'([^']*)'", context["expected"]))
    elif kind.endswith("_type"):
        words = f"{_OWN_WORDS.get(param, words)}, got {kind_of(first['input'])}"
    is_mask = len(loc) > 1 and loc[0] == "masks"
    return (BadMask if is_mask else InvalidInput)(f"{words_of(param) or 'the request'} {words}", param=param)
