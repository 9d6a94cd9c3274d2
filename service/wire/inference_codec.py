"""Open Inference codec: schemas of V2, a V2 request converted to the document that `/v1` takes, and an answer as V2 says.

A body is JSON, or JSON followed by the bytes of the inputs that announce them (the binary tensor extension). The batch axis is
always present. The fields of `/v1` beside the tensors are scalars in `parameters`.
Invariants: The converted request takes the path of `/v1`, so it gives the same bits. Every byte after the JSON belongs to
exactly one input. Outputs, and the bytes of outputs, come in the requested order. The bytes of tensors are views of the body,
which they keep in memory. If the JSON is larger than the tensors, they are copied, so that the body is freed. The schemas check
everything except tensors and ignore unknown keys, except among the request's parameters, which could change the answer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, NamedTuple

import orjson
import torch
from pydantic import BaseModel, Field
from pydantic.json_schema import SkipJsonSchema
from typing_extensions import TypeAliasType

from service.attention.call import POSITIONS
from service.errors import BadBinary, BadDtype, BadShape, InvalidInput
from service.wire.answer import write_tensor
from service.wire.attend_request import EXTRAS, AnswerFacts, LayerMasks, MaskedRows, ShortWeights, Stage, validated
from service.wire.body_faults import unless_compressed
from service.wire.field_names import instead, kind_of
from service.wire.mask_kinds import Align, Axes
from service.wire.number_list import NumberList, nested_numbers
from service.wire.positions import PAST_FIELDS
from service.wire.schemas import StrictModel, unknown_field
from service.wire.tensor_fields import BY_INFERENCE, BY_TORCH, FLOATS, FLOATS_ARE_A_BIAS, WHOLES
from service.wire.tensors import MAX_VALUES, TensorForm, bytes_of, too_many_values

VERSION = "1"
"""The only version of a layer as a model."""
MAX_ID = 256
MAX_LISTED = 16  # inputs, and outputs
MAX_TIMEOUT_US = 10**15
MASKS = {"attend_mask": "attend", "ignore_mask": "ignore", "bias": "bias", "lengths": "lengths"}
_FLOATS = tuple(dtype.inference for dtype in FLOATS)
_BOOL = ("BOOL",)
_WHOLES = tuple(dtype.inference for dtype in WHOLES)
_DATATYPES = dict.fromkeys(("attend_mask", "ignore_mask"), _BOOL) | dict.fromkeys(("lengths", *POSITIONS), _WHOLES)
_WITHOUT_JSON = ("FP16", "BF16")
_SHARED_MEMORY = {"shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"}

TensorParameters = TypeAliasType("TensorParameters", dict[str, Any])
MaskAxes = Annotated[Axes | None, Field(description="axes of that input; required for 2 or 3; default: by its rank")]


Id = Annotated[str, Field(max_length=MAX_ID)] | None


class AnyParameters(StrictModel):
    """Parameters that change an answer, and those that clients send by default and a stateless layer ignores. null is absent."""

    causal: Align | None = Field(default=None, description="where query row 0 stands; default: all keys are visible")
    attend_mask_axes: MaskAxes = None
    ignore_mask_axes: MaskAxes = None
    bias_axes: MaskAxes = None
    weights: ShortWeights | None = Field(default=None, description="also an output; default: none")
    scores: Stage | None = Field(default=None, description="stage of the output scores; default: none")
    lse: bool | None = Field(default=None, description="return the log-sum-exp of the masked scores; default: no")
    entropy: bool | None = Field(default=None, description="return each row's entropy in nats; default: no")
    masked_rows: MaskedRows | None = Field(default=None, description="as on `/v1`; default: zero")
    present: bool | None = Field(default=None, description="return present_key and present_value; default: no")
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


class InferParameters(AnyParameters):
    """The parameters of a layer."""

    layer_masks: LayerMasks | None = Field(default=None, description="as on `/v1`; default: apply")


class AttentionParameters(AnyParameters):
    """The parameters of `sdpa`, attention without a layer."""

    scale: float | None = Field(default=None, description="factor of query·key; default: 1/√d")
    softcap: float | None = Field(default=None, description="c > 0: a score s becomes c·tanh(s/c), before the masks")


class InferOutput(StrictModel, extra="ignore"):
    """A wanted output; `parameters.binary_data` says whether it comes as bytes."""

    name: str = Field(description="output, weights, scores, lse, entropy, present_key or present_value")
    parameters: TensorParameters | None = Field(default=None, description="binary_data: as bytes; default: false")


class InferInput(StrictModel, extra="ignore"):
    """One tensor: `data` (nested or flat), or `parameters.binary_data_size` bytes behind the JSON."""

    name: str = Field(description="query, key, value, past_key, past_value, a mask, positions, for sdpa also sinks")
    parameters: TensorParameters | None = Field(
        default=None, description="binary_data_size; default: none, there is data"
    )
    shape: list[int] = Field(description="sizes of the axes, each at least 1")
    datatype: str = Field(description="FP32, FP64, FP16, BF16, BOOL, INT32 or INT64")
    data: Any = Field(default=None, description="nested or flat; default: bytes")


class InferRequest(StrictModel, extra="ignore"):
    """The JSON of an inference request."""

    AXES: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("query", "key", "value"), "[B, L, d]"),
        **dict.fromkeys(PAST_FIELDS, "[B, Hkv, P, d]"),
        **dict(zip(POSITIONS, ("[B, L]", "[B, S]"), strict=True)),
    }
    """Those of each input that is no mask."""
    OUTPUTS: ClassVar[tuple[str, ...]] = ("output", "weights", *EXTRAS)
    PARAMETERS: ClassVar[type[AnyParameters]] = InferParameters
    PRESENT_DTYPE_OF: ClassVar[str] = "query"
    """The input whose dtype present_key and present_value have."""
    id: Id = Field(default=None, description=f"repeated in the answer, at most {MAX_ID} characters; default: none")
    parameters: InferParameters | None = Field(default=None, description="change the answer; default: none")
    inputs: list[InferInput] = Field(min_length=1, description="query, and what the layer needs beside it")
    outputs: list[InferOutput] | None = Field(default=None, description="default: output, and what parameters request")


class InferAttentionRequest(InferRequest):
    """The JSON of an inference request to `sdpa`."""

    AXES: ClassVar = {
        **dict.fromkeys(("query", "key", "value", "past_key", "past_value"), "[B, H, L, d]"),
        "sinks": "[H]",
    }
    PARAMETERS = AttentionParameters
    PRESENT_DTYPE_OF = "key"
    parameters: AttentionParameters | None = None  # type: ignore[assignment]  # a model of its own, not a narrower one


class InferOutputAnswer(BaseModel):
    """An output: `data` flat in row-major order ("nan", "inf", "-inf" for what is not finite), or
    `parameters.binary_data_size` bytes behind the JSON.
    """

    name: str = Field(description="which output")
    datatype: str = Field(description="FP32, FP64, FP16, BF16 or INT32")
    shape: list[int] = Field(description="sizes of the axes")
    parameters: dict[str, int] | SkipJsonSchema[None] = Field(default=None, description="binary_data_size, if bytes")
    data: list[float | str] | SkipJsonSchema[None] = Field(default=None, description="flat, unless bytes")


class InferAnswer(BaseModel):
    """An inference answer; `parameters` are the fields of `/v1` beside the tensors."""

    model_name: str = Field(description="the layer, or sdpa")
    model_version: str = Field(description="always 1")
    id: str | SkipJsonSchema[None] = Field(default=None, description="as in the request, if it has one")
    outputs: list[InferOutputAnswer] = Field(description="in the requested order")
    parameters: dict[str, str | int | float] = Field(description="masked_rows, digest, batch and times")


class InferenceError(BaseModel):
    """The body of an error on every route of the protocol."""

    error: str = Field(description="what was expected and what came, and the code in brackets")


class WantedAnswer(NamedTuple):
    """The id of the answer, its outputs in order (true: binary), and its timeout."""

    id: str | None
    outputs: dict[str, bool]
    timeout_s: float | None


def split_inference(body: bytearray, json_length: bytes | None) -> tuple[bytearray, memoryview]:
    """Return the JSON and the bytes after it, and take `body`; `json_length` is the header's text or None. Raises BadBinary."""
    size = head = len(body)
    if json_length is not None:
        # Compare the number of digits first: int() refuses text of more than 4,300 digits, leading zeros included.
        digits = json_length.lstrip(b"0") or b"0"
        if not json_length.isdigit() or len(digits) > len(str(size)) or (head := int(digits)) > size:
            words = f"must be a number of bytes from 1 to {size}, the body's length"
            raise unless_compressed(body, BadBinary(f"Inference-Header-Content-Length {words}"))
        if head == 0:
            words = "a body without JSON is only for models with one input"
            raise BadBinary(f"{words}; name the inputs of this model in JSON")
    if head <= size - head:
        return body[:head], memoryview(body)[head:]
    rest = memoryview(body[head:])  # a copy: views would keep the whole body, most of which is JSON
    del body[head:]
    return body, rest


def read_inference(
    document: dict[str, Any], rest: memoryview, kind: type[InferRequest]
) -> tuple[dict[str, object], tuple[str, ...], WantedAnswer]:
    """Return the same request as a document of `/v1`, JSON pointers to the inputs of its masks, and the wanted answer.

    Raises BadBinary if the bytes do not match their announced sizes, and the errors of the fields and tensors.
    """
    request = _checked(document, kind)
    parameters = request.parameters or kind.PARAMETERS()
    _check_names([entry.name for entry in request.inputs], (*kind.AXES, *MASKS), "input", "/inputs")
    tensors = {}
    for entry in request.inputs:
        tensors[entry.name], rest = _tensor(entry, rest, kind.AXES.get(entry.name))
    if len(rest):
        raise BadBinary(f"{len(rest)} bytes after the JSON belong to no input")
    outputs = _wanted_outputs(request, parameters)
    timeout_s = min(parameters.timeout, MAX_TIMEOUT_US) / 1e6 if parameters.timeout else None
    mask_params = tuple(f"/{name}" for name in MASKS if name in tensors)
    return _document(tensors, parameters, outputs), mask_params, WantedAnswer(request.id, outputs, timeout_s)


def _checked(document: dict[str, Any], kind: type[InferRequest]) -> InferRequest:
    """Validate the document, lengths and names first: pydantic would describe each of a hundred thousand wrong entries."""
    for name in ("inputs", "outputs"):
        listed = document.get(name)
        if isinstance(listed, list) and len(listed) > MAX_LISTED:
            raise InvalidInput(f"{name} has {len(listed)} entries, expected at most {MAX_LISTED}", param=f"/{name}")
    parameters = document.get("parameters")
    names = kind.PARAMETERS.model_fields
    if isinstance(parameters, dict) and parameters.keys() - names.keys():
        known = [name for name in names if name not in WITHOUT_MEANING]
        raise unknown_field([name for name in parameters if name not in names], known, "/parameters", "parameter")
    return validated(kind, document)


def _check_names(names: list[str], known: tuple[str, ...], what: str, param: str) -> None:
    if not set(names).issubset(known):
        raise unknown_field(names, known, param, what, is_key=False)
    if len(set(names)) != len(names):
        raise InvalidInput(f"the same {what} is listed twice", param=param)


def _tensor(entry: InferInput, rest: memoryview, axes: str | None) -> tuple[dict[str, object], memoryview]:
    """Return the tensor as `/v1` takes it, and the bytes left for the next inputs."""
    name, shape, param = entry.name, entry.shape, f"/{entry.name}"
    datatypes = _DATATYPES.get(name, _FLOATS)
    if entry.datatype not in datatypes:
        hint = f"; {FLOATS_ARE_A_BIAS}" if datatypes == _BOOL and entry.datatype in _FLOATS else ""
        words = f"the datatype of {name} must be one of {', '.join(datatypes)}"
        raise BadDtype(f"{words}{instead(entry.datatype, datatypes)}{hint}", param=f"{param}/datatype")
    if axes is not None and len(shape) != axes.count(",") + 1:
        raise BadShape(f"{name} must be {axes}, got {len(shape)} axes", param=param)
    # An empty mask is refused later, with the shapes that it may have.
    if min(shape, default=1) < (0 if name in MASKS else 1):
        raise BadShape(f"the shape of {name} must be whole numbers of at least 1", param=param)
    if (num_values := math.prod(shape)) > MAX_VALUES:
        raise too_many_values(name, num_values, param)
    dtype = BY_INFERENCE[entry.datatype]
    size = _binary_size(entry)
    if size is None:
        return _listed_tensor(entry, dtype.name), rest
    if size != (expected := num_values * dtype.torch.itemsize):
        words = f"must be the {expected} bytes that its shape and datatype need, got {size}"
        raise BadBinary(f"binary_data_size of {name} {words}")
    if size > len(rest):
        raise BadBinary(f"{name} announces {size} bytes; the body has only {len(rest)} left")
    return {"dtype": dtype.name, "shape": tuple(shape), "data": rest[:size]}, rest[size:]


def _binary_size(entry: InferInput) -> int | None:
    """Return the announced number of bytes; None if the values are in the JSON."""
    name, parameters = entry.name, entry.parameters or {}
    if not _SHARED_MEMORY.isdisjoint(parameters):
        raise InvalidInput(f"{name} is in shared memory, which is not supported", param=f"/{name}")
    size = parameters.get("binary_data_size")
    if (size is None) == (entry.data is None):
        raise InvalidInput(f"{name} must have either data or binary_data_size", param=f"/{name}")
    if size is not None and (type(size) is not int or not 0 <= size < 2**63):
        raise InvalidInput(f"binary_data_size of {name} must be a number of bytes", param=f"/{name}")
    return size


def _listed_tensor(entry: InferInput, dtype: str) -> dict[str, object]:
    """Return the tensor of row-major values in the JSON: nested as in its shape, or flat."""
    name = entry.name
    if entry.datatype in _WITHOUT_JSON:
        raise BadDtype(f"{entry.datatype} has no JSON form: send {name} with binary_data_size", param=f"/{name}")
    numbers = nested_numbers(entry.data) if isinstance(entry.data, list) else entry.data
    if not isinstance(numbers, NumberList):
        raise InvalidInput(f"the data of {name} must be a list, got {kind_of(numbers)}", param=f"/{name}")
    count = math.prod(entry.shape)
    if numbers.fault is None:
        if numbers.shape not in (tuple(entry.shape), (count,)):
            words = f"has the shape {list(numbers.shape)}, expected {entry.shape} or [{count}]"
            raise BadShape(f"the data of {name} {words}", param=f"/{name}")
        numbers = dataclasses.replace(numbers, shape=(len(numbers.values),))
    return {"dtype": dtype, "shape": entry.shape, "data": numbers}


def _wanted_outputs(request: InferRequest, parameters: AnyParameters) -> dict[str, bool]:
    """Return {output: is binary} in the requested order. The `binary_data` of an output overrides the request's.

    Raises BadDtype if an output is requested as JSON and the dtype that it takes from its input has no JSON form.
    """
    default = parameters.binary_data_output or False
    if request.outputs:
        _check_names([output.name for output in request.outputs], request.OUTPUTS, "output", "/outputs")
        outputs = {output.name: _is_binary(output, default) for output in request.outputs}
    else:
        # The parameter that asks for present_key and present_value is `present`.
        asked = [name for name in request.OUTPUTS[1:] if getattr(parameters, name.partition("_")[0], None)]
        outputs = dict.fromkeys(("output", *asked), default)
    # Every other output is float32 or float64.
    dtype_of = {"output": "query"} | dict.fromkeys(("present_key", "present_value"), request.PRESENT_DTYPE_OF)
    sources = {dtype_of.get(name) for name, is_binary in outputs.items() if not is_binary}
    for entry in request.inputs:
        if entry.name in sources and entry.datatype in _WITHOUT_JSON:
            raise BadDtype(f"{entry.datatype} has no JSON form: request the output with binary_data", param="/outputs")
    return outputs


def _is_binary(output: InferOutput, default: bool) -> bool:
    parameters = output.parameters or {}
    if "classification" in parameters or not _SHARED_MEMORY.isdisjoint(parameters):
        raise InvalidInput("classification and shared memory are not supported", param="/outputs")
    flag = parameters.get("binary_data", default)
    if not isinstance(flag, bool):
        raise InvalidInput("binary_data must be true or false", param="/outputs")
    return flag


def _document(tensors: Mapping[str, object], parameters: AnyParameters, outputs: dict[str, bool]) -> dict[str, object]:
    document: dict[str, object] = {name: found for name, found in tensors.items() if name not in MASKS}
    document["masked_rows"] = parameters.masked_rows or "zero"
    if "weights" in outputs:
        document["weights"] = {"form": parameters.weights or "heads"}
    if "scores" in outputs:
        document["scores"] = {"stage": parameters.scores or "masked"}
    document |= {name: True for name in ("lse", "entropy") if name in outputs}
    document["present"] = "present_key" in outputs or "present_value" in outputs
    if isinstance(parameters, AttentionParameters):
        document |= {"layout": "bhld", "scale": parameters.scale, "softcap": parameters.softcap}
    elif isinstance(parameters, InferParameters) and parameters.layer_masks is not None:
        document["layer_masks"] = parameters.layer_masks
    masks: list[dict[str, object]] = []
    for name, kind in MASKS.items():
        axes = getattr(parameters, f"{name}_axes", None)
        if name in tensors:
            masks.append({"kind": kind, "values": tensors[name]} | ({} if axes is None else {"axes": axes}))
        elif axes is not None:
            raise InvalidInput(f"the parameter {name}_axes names the axes of an input {name}, which is missing")
    if parameters.causal is not None:
        masks.append({"kind": "causal", "align": parameters.causal})
    return {**document, "masks": masks}


def write_inference(
    tensors: dict[str, torch.Tensor], facts: AnswerFacts, wanted: WantedAnswer
) -> tuple[Iterator[bytes], list[memoryview]]:
    """Return the pieces of the JSON, and the bytes that follow it.

    If bytes follow, the length of the JSON goes into a header, so the whole JSON must be made first.
    """
    blobs = [bytes_of(tensors[name]) for name, is_binary in wanted.outputs.items() if is_binary]
    return _json(facts, wanted, tensors), blobs


def _json(facts: AnswerFacts, wanted: WantedAnswer, tensors: dict[str, torch.Tensor]) -> Iterator[bytes]:
    opening: dict[str, Any] = {"model_name": facts.layer, "model_version": VERSION}
    if wanted.id is not None:
        opening["id"] = wanted.id
    yield orjson.dumps(opening)[:-1] + b',"outputs":'
    separator = b"["
    for name, is_binary in wanted.outputs.items():
        tensor = tensors[name]
        fields = {"name": name, "datatype": BY_TORCH[tensor.dtype].inference, "shape": list(tensor.shape)}
        yield separator
        separator = b","
        if is_binary:
            yield orjson.dumps({**fields, "parameters": {"binary_data_size": tensor.nbytes}})
            continue
        yield orjson.dumps(fields)[:-1] + b',"data":'
        yield from write_tensor(tensor.reshape(-1), TensorForm.NESTED)
        yield b"}"
    found = facts.to_json()
    scalars = {"masked_rows": found["masked_rows"]} | ({} if facts.digest is None else {"layer_digest": facts.digest})
    scalars |= {f"batch_{name}": count for name, count in found["batch"].items()}
    scalars |= {f"{phase}_ms": ms for phase, ms in found["timing_ms"].items()}
    yield b'],"parameters":' + orjson.dumps(scalars) + b"}"
