"""Answer of an attend request: its fields as pydantic models, and its JSON in small pieces of text.

Invariants: A piece has at most about 256 KiB, so that the event loop is free between two pieces and memory grows by one piece
beside the tensors. The joined pieces are one JSON object. Every number reads back into its dtype to the same bits. A value that
is not finite is the string "nan", "inf" or "-inf" in lists, and its bits in base64.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import orjson
import pybase64
import torch
from pydantic import BaseModel, Field
from pydantic.json_schema import SkipJsonSchema

from service.wire.attend_request import EXTRAS, TOP_K, Facts
from service.wire.schemas import Tensor
from service.wire.tensors import TensorForm, bytes_of

PIECE_VALUES = 8 * 1024
"""A number takes up to 25 characters and a comma, so a piece takes at most 208 KiB."""
PIECE_BYTES = 192 * 1024  # a multiple of 3, so that base64 pieces join without padding

_WORDS = {"nan": b'"nan"', "inf": b'"inf"', "-inf": b'"-inf"'}


def write_tensor(tensor: torch.Tensor, form: TensorForm) -> Iterator[bytes]:
    """Yield the JSON of a CPU tensor in `form`; as numbers, half precision widens to float32, which changes no value."""
    is_object = form is not TensorForm.NESTED
    if is_object:
        fields = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        yield orjson.dumps(fields)[:-1] + b',"data":'
    if form is TensorForm.BASE64:
        data = bytes_of(tensor)
        yield b'"'
        for start in range(0, len(data), PIECE_BYTES):
            yield pybase64.b64encode(data[start : start + PIECE_BYTES])
        yield b'"'
    else:
        yield from _nested(tensor.reshape(-1) if is_object else tensor)
    if is_object:
        yield b"}"


def _nested(tensor: torch.Tensor) -> Iterator[bytes]:
    """Yield the tensor as one piece if it fits; else in runs of whole entries, or, for large entries, each in pieces."""
    if not tensor.dim():
        yield _text(tensor.reshape(1))[1:-1]
    elif tensor.numel() <= PIECE_VALUES:
        yield _text(tensor)
    else:
        run = PIECE_VALUES // tensor[0].numel()
        for start in range(0, len(tensor), run or 1):
            yield b"," if start else b"["
            if run:
                yield _text(tensor[start : start + run])[1:-1]
            else:
                yield from _nested(tensor[start])
        yield b"]"


def _text(tensor: torch.Tensor) -> bytes:
    array = (tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor).contiguous().numpy()
    text = orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY)
    if array.dtype.kind != "f":
        return text
    # orjson writes null for values that are not finite, and for nothing else.
    words = [_WORDS[str(value)] for value in array[~np.isfinite(array)].tolist()]
    return text.replace(b"null", b"%b") % tuple(words) if words else text


class LayerName(BaseModel):
    """`digest` is null for attention without a layer."""

    name: str = Field(description="the layer, or sdpa")
    digest: str | None = Field(description="sha256 of the layer's tensors and spec")


class Batch(BaseModel):
    """What shared the forward pass with this request, itself included."""

    requests: int = Field(description="requests, this one included")
    sequences: int = Field(description="their sequences")
    tokens: int = Field(description="their query and key rows")


class Timing(BaseModel):
    """Milliseconds; `total` runs from the complete body to the encoded answer."""

    decode: float = Field(description="parsing and checking")
    queue: float = Field(description="waiting for a pass")
    compute: float = Field(description="the forward pass")
    total: float = Field(description="all of it")


class TopK(BaseModel):
    values: Tensor = Field(description="[H, L, k], descending")
    indices: Tensor = Field(description="[H, L, k], int32")
    rest: Tensor = Field(description="[H, L]: the mass not returned")


class Answer(BaseModel):
    """`scores`, `lse`, `entropy`, `present_key` and `present_value` are there if the request asks for them."""

    output: Tensor = Field(description="of the rank, the layout and the dtype of query")
    weights: Tensor | TopK | None = Field(
        description="[H, L, S], [L, S] for mean, or top_k; float64 if query is; null if not requested"
    )
    scores: Tensor | SkipJsonSchema[None] = Field(
        default=None, description="[H, L, S], with B in front of a batch; float64 if query is"
    )
    lse: Tensor | SkipJsonSchema[None] = Field(
        default=None, description="[H, L], with B in front of a batch; float64 if query is"
    )
    entropy: Tensor | SkipJsonSchema[None] = Field(
        default=None, description="[H, L] in nats, with B in front of a batch; float64 if query is"
    )
    present_key: Tensor | SkipJsonSchema[None] = Field(
        default=None, description="past_key and the keys in one; of a layer [Hkv, S, d], with B in front of a batch"
    )
    present_value: Tensor | SkipJsonSchema[None] = Field(default=None, description="past_value and the values in one")
    masked_rows: int = Field(description="query rows that may attend to nothing in at least one head")
    layer: LayerName = Field(description="what answered")
    batch: Batch = Field(description="what shared the forward pass")
    timing_ms: Timing = Field(description="how long it took")


class AttentionAnswer(Answer):
    """The answer of attention without a layer; its `present_key` and `present_value` have the axes of the layout."""


def write_json(tensors: dict[str, torch.Tensor], facts: Facts, form: TensorForm) -> Iterator[bytes]:
    """Yield the JSON answer in pieces; fields are in the order of the contract."""
    yield b'{"output":'
    yield from write_tensor(tensors["output"], form)
    yield b',"weights":'
    if "weights" in tensors:
        yield from write_tensor(tensors["weights"], form)
    elif "weights.values" in tensors:
        opening = b"{"
        for name in TOP_K:
            yield opening + f'"{name}":'.encode()
            yield from write_tensor(tensors[f"weights.{name}"], form)
            opening = b","
        yield b"}"
    else:
        yield b"null"
    for name in EXTRAS:
        if name in tensors:
            yield b',"' + name.encode() + b'":'
            yield from write_tensor(tensors[name], form)
    yield b"," + orjson.dumps(facts.to_json())[1:]
