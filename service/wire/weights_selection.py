"""Weights selection: the JSON form and the decoding of which attention weights and scores a request wants, and their bytes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field, WithJsonSchema

from service.attention.call import ScoresWanted, WeightsWanted
from service.attention.masks import Sizes
from service.errors import InvalidInput
from service.wire.schemas import StrictModel
from service.wire.tensor_fields import TensorField, TensorKind
from service.wire.tensors import decode_tensor

Indices = Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1})]


class WeightsField(StrictModel):
    """Which attention weights to return: all heads, their mean, or the k largest of each row."""

    form: Literal["heads", "mean", "top_k"]
    k: Annotated[int, Field(ge=1)] | None = None
    heads: Indices | None = None
    queries: Indices | None = None
    dtype: Literal["float32", "float16"] = "float32"

    def wanted(self, sizes: Sizes) -> WeightsWanted:
        """Return the selection for a call of these sizes; raises InvalidInput for a `k` or an index out of range.

        The keys of `sizes` include the columns that a layer appends.
        """
        keys = sizes.keys
        if (self.form == "top_k") != (self.k is not None):
            raise InvalidInput(
                'weights.k is required with form "top_k" and allowed with no other form', param="/weights/k"
            )
        if self.k is not None and self.k > keys:
            raise InvalidInput(f"weights.k must be from 1 to {keys}, the number of keys", param="/weights/k")
        heads = _indices(self.heads, sizes.heads, "/weights/heads")
        queries = _indices(self.queries, sizes.queries, "/weights/queries")
        return WeightsWanted(self.form, self.k, heads, queries, getattr(torch, self.dtype))


def _in_full(value: object) -> object:
    """Return the object for a short form; any other value is returned as it is."""
    return {"form": value} if isinstance(value, str) and value in SHORT_FORMS else value


SHORT_FORMS = ("heads", "mean")
WeightsSelection = Annotated[
    WeightsField, BeforeValidator(_in_full, json_schema_input_type=WeightsField | Literal["heads", "mean"])
]


class ScoresField(StrictModel):
    """Which attention scores to return: times the scale, then capped, then masked (ONNX's output modes 0, 1 and 2)."""

    stage: Literal["scaled", "capped", "masked"]
    heads: Indices | None = None
    queries: Indices | None = None
    dtype: Literal["float32", "float16"] = "float32"

    def wanted(self, sizes: Sizes) -> ScoresWanted:
        """Return the selection for a call of these sizes; raises InvalidInput for an index out of range."""
        heads = _indices(self.heads, sizes.heads, "/scores/heads")
        queries = _indices(self.queries, sizes.queries, "/scores/queries")
        return ScoresWanted(self.stage, WeightsWanted("heads", None, heads, queries, getattr(torch, self.dtype)))


def _indices(value: object, count: int, param: str) -> tuple[int, ...] | None:
    """Return a selection in the caller's order; raises InvalidInput unless it is non-empty, unique and in range."""
    if value is None:
        return None
    tensor = decode_tensor(value, TensorField(param, TensorKind.INT))
    # Check the length first, so that a list of millions of entries is not converted.
    chosen = tuple(tensor.tolist()) if tensor.dim() == 1 and len(tensor) <= count else ()
    if not chosen or len(set(chosen)) != len(chosen) or min(chosen) < 0 or max(chosen) >= count:
        words = param[1:].replace("/", ".")
        raise InvalidInput(f"{words} must be a non-empty list of different numbers from 0 to {count - 1}", param=param)
    return chosen


def weights_bytes(wanted: WeightsWanted, heads: int, queries: int, keys: int) -> int:
    """Return the bytes of one sequence's returned weights, including the indices and rest of top_k."""
    heads = 1 if wanted.form == "mean" else heads if wanted.heads is None else len(wanted.heads)
    rows = heads * (queries if wanted.queries is None else len(wanted.queries))
    size = wanted.dtype.itemsize
    if wanted.k is not None:
        return rows * (wanted.k * (size + torch.int32.itemsize) + size)
    return rows * keys * size
