"""Open Inference Protocol V2 schemas: pydantic models of the JSON of its requests, answers and errors.

Invariants: Unknown keys are ignored, except for request parameters, which could change the answer. The models check everything
except tensors, and OpenAPI shows them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field

from service.wire.mask_kinds import Axes
from service.wire.schemas import StrictModel

VERSION = "1"
"""The only version of a layer as a model."""
MAX_ID = 256

Causal = Literal["top_left", "bottom_right"]
MaskAxes = Annotated[Axes | None, Field(description="axes of that input; required for 2 or 3; default: by its rank")]


def _as_text(value: str) -> str:
    """Raise a ValueError for an unpaired surrogate: it is valid JSON, but the answer could not encode it."""
    value.encode()
    return value


Id = Annotated[str, Field(max_length=MAX_ID), AfterValidator(_as_text)] | None


class InferParameters(StrictModel):
    """Parameters that change an answer, and those that clients send by default and a stateless layer ignores. null is absent."""

    causal: Causal | None = Field(default=None, description="where query row 0 stands; default: all keys are visible")
    attend_mask_axes: MaskAxes = None
    ignore_mask_axes: MaskAxes = None
    bias_axes: MaskAxes = None
    weights: Literal["heads", "mean"] | None = Field(default=None, description="also an output; default: none")
    masked_rows: Literal["zero", "error"] | None = Field(default=None, description="as on `/v1`; default: zero")
    timeout: int | None = Field(
        default=None, ge=0, description="deadline in microseconds; default: 0, the service's own"
    )
    binary_data_output: bool | None = Field(default=None, description="outputs come as bytes; default: false")
    sequence_id: Any = Field(default=None, description="ignored: clients send it by default; any value")
    sequence_start: Any = Field(default=None, description="ignored: clients send it by default; any value")
    sequence_end: Any = Field(default=None, description="ignored: clients send it by default; any value")
    priority: Any = Field(default=None, description="ignored: clients send it by default; any value")
    headers: Any = Field(default=None, description="ignored: clients send it by default; any value")
    content_type: Any = Field(default=None, description="ignored: clients send it by default; any value")


WITHOUT_MEANING = ("sequence_id", "sequence_start", "sequence_end", "priority", "headers", "content_type")


class AttentionParameters(InferParameters):
    """The parameters of `sdpa`, attention without a layer."""

    scale: float | None = Field(default=None, description="factor of query·key; default: 1/√d")
    softcap: float | None = Field(default=None, description="c > 0: a score s becomes c·tanh(s/c), before the masks")
    scores: Literal["scaled", "capped", "masked"] | None = Field(default=None, description="stage of the output scores")
    lse: bool | None = Field(default=None, description="return the log-sum-exp of the masked scores")
    present: bool | None = Field(default=None, description="return present_key and present_value")


class InferOutput(StrictModel, extra="ignore"):
    """A wanted output; `parameters.binary_data` says whether it comes as bytes."""

    name: str = Field(description="output, weights, or for sdpa scores, lse, present_key, present_value")
    parameters: dict[str, Any] | None = Field(default=None, description="binary_data: as bytes; default: false")


class InferInput(StrictModel, extra="ignore"):
    """One tensor: `data` (nested or flat), or `parameters.binary_data_size` bytes behind the JSON."""

    name: str = Field(description="query, key, value, a mask; for sdpa also past_key, past_value, sinks")
    parameters: dict[str, Any] | None = Field(
        default=None, description="binary_data_size; default: none, there is data"
    )
    shape: list[int] = Field(description="sizes of the axes, each at least 1")
    datatype: str = Field(description="FP32, FP64, FP16, BF16, BOOL, INT32 or INT64")
    data: Any = Field(default=None, description="nested or flat; default: bytes")


class InferRequest(StrictModel, extra="ignore"):
    """The JSON of an inference request."""

    id: Id = Field(default=None, description=f"repeated in the answer, at most {MAX_ID} characters; default: none")
    parameters: InferParameters | None = Field(default=None, description="change the answer; default: none")
    inputs: list[InferInput] = Field(min_length=1, description="query, and what the layer needs beside it")
    outputs: list[InferOutput] | None = Field(default=None, description="default: output, and what parameters request")


class InferAttentionRequest(InferRequest):
    """The JSON of an inference request to `sdpa`."""

    parameters: AttentionParameters | None = None


class InferOutputAnswer(BaseModel):
    """An output: `data` flat in row-major order ("nan", "inf", "-inf" for what is not finite), or
    `parameters.binary_data_size` bytes behind the JSON.
    """

    name: str = Field(description="which output")
    datatype: str = Field(description="FP32, FP64, FP16, BF16 or INT32")
    shape: list[int] = Field(description="sizes of the axes")
    parameters: dict[str, int] | None = Field(default=None, description="binary_data_size")
    data: list[float | str] | None = Field(default=None, description="flat; null if bytes")


class InferAnswer(BaseModel):
    """An inference answer; `parameters` are the fields of `/v1` beside the tensors."""

    model_name: str = Field(description="the layer, or sdpa")
    model_version: str = Field(description="always 1")
    id: str | None = Field(default=None, description="as in the request")
    outputs: list[InferOutputAnswer] = Field(description="in the requested order")
    parameters: dict[str, str | int | float] = Field(description="masked_rows, digest, batch and times")


class InferenceError(BaseModel):
    """The body of an error on every route of the protocol."""

    error: str = Field(description="what was expected and what came, and the code in brackets")
