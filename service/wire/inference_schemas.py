"""Open Inference Protocol V2 schemas: pydantic models of the JSON of its requests, answers and errors.

Invariants: Unknown keys are ignored, except for request parameters, which could change the answer. The models check everything
except tensors, and OpenAPI shows them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from service.wire.mask_kinds import Axes

VERSION = "1"
"""The only version of a layer as a model."""
MAX_ID = 256

Causal = Literal["top_left", "bottom_right"]
MaskAxes = Annotated[Axes | None, Field(description="axes of that input; required where it has 2 or 3")]


def _as_text(value: str) -> str:
    """Raise a ValueError for an unpaired surrogate: it is valid JSON, but the answer could not encode it."""
    value.encode()
    return value


Id = Annotated[str, Field(max_length=MAX_ID), AfterValidator(_as_text)] | None


class InferParameters(BaseModel):
    """Parameters that change an answer, and those that clients send by default and a stateless layer ignores. null is absent."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    causal: Causal | None = Field(default=None, description="no looking ahead: where query row 0 stands")
    attend_mask_axes: MaskAxes = None
    ignore_mask_axes: MaskAxes = None
    bias_axes: MaskAxes = None
    weights: Literal["heads", "mean"] | None = Field(default=None, description="attention weights to return")
    masked_rows: Literal["zero", "error"] | None = None
    timeout: int | None = Field(default=None, ge=0, description="deadline in microseconds; 0 = the service's own")
    binary_data_output: bool | None = Field(
        default=None, description="outputs without a flag of their own come as bytes"
    )
    sequence_id: Any = None
    sequence_start: Any = None
    sequence_end: Any = None
    priority: Any = None
    headers: Any = None
    content_type: Any = None


WITHOUT_MEANING = ("sequence_id", "sequence_start", "sequence_end", "priority", "headers", "content_type")


class AttentionParameters(InferParameters):
    """The parameters of `sdpa`, attention without a layer."""

    scale: float | None = Field(default=None, description="factor of query·key; default: 1/√d")
    softcap: float | None = Field(default=None, description="c > 0: a score s becomes c·tanh(s/c), before the masks")
    scores: Literal["scaled", "capped", "masked"] | None = Field(default=None, description="stage of the output scores")
    lse: bool | None = Field(default=None, description="return the log-sum-exp of the masked scores")
    present: bool | None = Field(default=None, description="return present_key and present_value")


class InferOutput(BaseModel):
    """A wanted output; `parameters.binary_data` says whether it comes as bytes."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    name: str
    parameters: dict[str, Any] | None = None


class InferInput(BaseModel):
    """One tensor: `data` (nested or flat), or `parameters.binary_data_size` bytes behind the JSON."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    name: str
    parameters: dict[str, Any] | None = None
    shape: list[int]
    datatype: str
    data: Any = None


class InferRequest(BaseModel):
    """The JSON of an inference request."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    id: Id = None
    parameters: InferParameters | None = None
    inputs: Annotated[list[InferInput], Field(min_length=1)]
    outputs: list[InferOutput] | None = None


class InferAttentionRequest(InferRequest):
    """The JSON of an inference request to `sdpa`."""

    parameters: AttentionParameters | None = None


class InferOutputAnswer(BaseModel):
    """An output: `data` flat in row-major order ("nan", "inf", "-inf" for what is not finite), or
    `parameters.binary_data_size` bytes behind the JSON.
    """

    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, int] | None = None
    data: list[float | str] | None = None


class InferAnswer(BaseModel):
    """An inference answer; `parameters` are the fields of `/v1` beside the tensors."""

    model_name: str
    model_version: str
    id: str | None = None
    outputs: list[InferOutputAnswer]
    parameters: dict[str, str | int | float]


class InferenceError(BaseModel):
    """The body of an error on every route of the protocol."""

    error: str
