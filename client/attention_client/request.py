"""Request: the inputs of an attend call, and the encoding of attend and attention calls as HTTP requests.

Invariants: pure, nothing is sent here. Only what the encoding needs is checked (kinds, dtypes, names), and it raises the errors
that the service would report. The service checks everything else, so a newer one may allow more.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Literal, cast

import numpy as np
import numpy.typing as npt

from attention_client.answer import (
    EXTRAS,
    PRESENT,
    Answer,
    Axes,
    Reply,
    Result,
    TextAnswer,
    read_answer,
    read_text_answer,
)
from attention_client.arrays import FLOATS, INTEGERS, MEDIA_TYPE, VALUES, Array, Raw, Summarized, raw, write
from attention_client.errors import BadDtype, InvalidInput, LayerNotFound, MaskKindRequired, ModelNotFound, NotServed
from attention_client.keywords import with_remedies
from attention_client.masks import Mask, converted, given

Indices = Sequence[int] | npt.NDArray[np.integer[Any]]
Positions = Any
"""Whole numbers `[L]`, or `[B, L]` for a batch: lists, an array or a tensor. None: 0, 1, … each."""
LayerMasks = Literal["apply", "none"]
MaskedRows = Literal["zero", "error"]
Layout = Literal["ld", "bld", "hld", "lhd", "bhld", "blhd", "packed"]
Stage = Literal["scaled", "capped", "masked"]
ScoresWanted = Stage | Mapping[str, Any] | None

ATTENTION_PATH = "/v1/attention"
_POSITIONS = ("positions", "key_positions")
_KINDS = ("attend", "ignore", "lengths", "bias", "causal", "window")
_TOP_K = {"weights.values": "float", "weights.indices": "int32", "weights.rest": "float"}
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


@dataclasses.dataclass(frozen=True, eq=False)
class Weights:
    """Attention weights to return, of some `heads` and `queries` (default: all); `top_k` gives the `k` largest of each row.

    `contributions` gives for each head the length of what each key adds to the output, ‖α·v·W_O‖.
    Their `dtype` is by default float64 for a float64 query, which alone may have it, and else float32.
    """

    form: Literal["heads", "mean", "top_k", "contributions"] = "heads"
    heads: Indices | None = None
    queries: Indices | None = None
    k: int | None = None
    dtype: Literal["float32", "float16", "float64"] | None = None


WeightsWanted = Weights | Literal["heads", "mean", "contributions"] | Mapping[str, Any] | None


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class Request(Summarized, Generic[Array]):
    """One sequence `[L, d]`, or a batch of sequences of equal length `[B, L, d]`, with its masks and options.

    `key` defaults to `query`, `value` to `key`. `weights` is a `Weights`, a form's name, the API's object, or None for none,
    `scores` a stage (scaled, capped, masked) or the API's object.
    A query row that may attend to nothing is an error for `masked_rows` "error"; for "zero" the heads give zeros there.
    `positions` and `key_positions` are those of a layer that uses positions, `layer_masks` "none" leaves out its own masks.
    `past_key` and `past_value` stand before the keys; `present` returns both with the new rows.
    """

    query: Array
    key: Array | None = None
    value: Array | None = None
    masks: Sequence[Mask] = ()
    weights: WeightsWanted = None
    masked_rows: MaskedRows = "zero"
    scores: ScoresWanted = None
    lse: bool = False
    entropy: bool = False
    positions: Positions | None = None
    key_positions: Positions | None = None
    layer_masks: LayerMasks = "apply"
    past_key: Array | None = None
    past_value: Array | None = None
    present: bool = False


Request.__init__ = with_remedies(Request.__init__)  # type: ignore[method-assign]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Call(Generic[Result]):
    """One HTTP request without its address, and the function that decodes its reply. Without content it is a GET."""

    path: str
    read: Callable[[Reply], Result]
    content: bytes | None = None
    media_type: str = "application/json"
    answer_type: str | None = None  # None: that of the content
    attempts: int | None = None  # None: those of the client


def attend_call(layer: str, request: Request[Array]) -> Call[Answer[Array]]:
    """Encode an attend call. Raises InvalidInput, BadDtype, MaskKindRequired or LayerNotFound."""
    names = ("query", "key", "value", *_POSITIONS, "past_key", "past_value")
    arrays = {name: getattr(request, name) for name in names}
    layer_masks = None if request.layer_masks == "apply" else request.layer_masks
    options = {"masks": request.masks, "weights": request.weights, "layer_masks": layer_masks}
    options |= extras(request.scores, request.lse, request.entropy) | {"present": request.present or None}
    return tensor_call(f"{layer_path(layer)}/attend", read_answer, arrays, request.masked_rows, options)


def extras(scores: str | Mapping[str, Any] | None, lse: bool, entropy: bool) -> dict[str, Any]:
    """Return the fields of a call that ask for these; None leaves a field out."""
    stage = {"stage": scores} if isinstance(scores, str) else scores
    return {"scores": stage, "lse": lse or None, "entropy": entropy or None}


def tensor_call(
    path: str,
    read: Callable[[Reply, Array, Axes, Mapping[str, str]], Result],
    arrays: Mapping[str, Array | None],
    masked_rows: MaskedRows,
    options: Mapping[str, Any],
) -> Call[Result]:
    """Encode a call with its arrays in binary; `options` are its other fields by name, and None leaves a field out.

    Raises InvalidInput, BadDtype or MaskKindRequired.
    """
    tensors = {name: _raw(x, name) for name, x in arrays.items() if x is not None or name == "query"}
    query, rows, dtype = cast("Array", arrays["query"]), tensors["query"].bits.shape[:-1], tensors["query"].dtype
    # A layer's present has the dtype of the query; without a layer it has those of key and value.
    sources = ("key", "value") if path == ATTENTION_PATH else ("query", "query")
    present = {name: tensors[of].dtype for name, of in zip(PRESENT, sources, strict=True) if of in tensors}
    fields, wanted = _fields(options, masked_rows, tensors)
    wanted |= {"output": dtype} | (present if "present" in fields else {})
    content = write(tensors, {"request": json_text(fields)})
    return Call(path, lambda reply: read(reply, query, rows, wanted), content, MEDIA_TYPE)


def _raw(array: object, name: str) -> Raw:
    if name in _POSITIONS:
        array = converted(array, np.int64, "iu", BadDtype, "whole numbers", name)
    return raw(array, f"/{name}", INTEGERS if name in _POSITIONS else FLOATS)


def text_call(
    model: str, text: dict[str, object], masked_rows: MaskedRows, options: Mapping[str, Any]
) -> Call[TextAnswer]:
    """Encode an attend call on text in JSON, the values of masks in base64. Raises as `attend_call`, or ModelNotFound."""
    values: dict[str, Raw] = {}
    fields, wanted = _fields(options, masked_rows, values)
    for i, mask in enumerate(fields.get("masks", ())):
        if (found := values.get(f"masks.{i}.values")) is not None:
            data = base64.b64encode(found.bits.tobytes()).decode()
            mask["values"] = {"dtype": found.dtype, "shape": found.bits.shape, "data": data}
    wanted["output"] = "float32"
    return binary_answer(f"{model_path(model)}/attend", lambda reply: read_text_answer(reply, wanted), text | fields)


def binary_answer(path: str, read: Callable[[Reply], Result], fields: Mapping[str, object]) -> Call[Result]:
    """Encode a call in JSON whose answer is binary; None leaves a field out."""
    return Call(path, read, json_text(given(**fields)).encode(), answer_type=MEDIA_TYPE)


def _fields(
    options: Mapping[str, Any], masked_rows: MaskedRows, tensors: dict[str, Raw]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the options that are not None, and the tensors that they ask for by dtype; values of masks go to `tensors`."""
    fields: dict[str, Any] = given(**options)
    wanted: dict[str, str] = {name: "float" for name in EXTRAS if name in fields}
    if (masks := fields.pop("masks", None)) is not None and (found := _masks(masks, tensors)):
        fields["masks"] = found
    if (weights := fields.get("weights")) is not None:
        fields["weights"] = weights = _weights(weights)
        form = weights if isinstance(weights, str) else weights.get("form")
        wanted |= _TOP_K if form == "top_k" else {"weights": "float"}
    if masked_rows != "zero":
        fields["masked_rows"] = masked_rows
    return fields, wanted


def _weights(wanted: Any) -> str | Mapping[str, object]:
    """Return the field of the weights that are wanted. A truth value does not say which, so it raises."""
    if not isinstance(wanted, Weights | str | Mapping):
        forms = '"heads" (a table for each head), weights="mean" (their mean), Weights("top_k", k=3), or None for none'
        raise InvalidInput(f"this does not say which weights: write weights={forms}", param="/weights")
    return given(**vars(wanted)) if isinstance(wanted, Weights) else wanted


def _masks(masks: Any, tensors: dict[str, Raw]) -> list[dict[str, object]]:
    """Return the fields of the masks, and add their values to `tensors`. An array is a mask without a kind, so it raises."""
    if isinstance(masks, Mask | str | Mapping) or not hasattr(masks, "__iter__"):
        raise InvalidInput(f"masks must be a list: write masks=[{_written(masks) or 'masks.causal()'}]", param="/masks")
    found: list[dict[str, object]] = []
    for i, mask in enumerate([None] if hasattr(masks, "dtype") else masks):
        if written := _written(mask):
            raise InvalidInput(f"masks[{i}] is a {type(mask).__name__}: write {written}", param=f"/masks/{i}")
        if not isinstance(mask, Mask):
            raise MaskKindRequired(
                "a mask must say what its values mean: masks.attend(values) where true = may attend, "
                "masks.ignore(values) where true = blocked, or lengths, bias, causal, window",
                param=f"/masks/{i}",
            )
        if mask.values is not None:
            tensors[f"masks.{i}.values"] = raw(mask.values, f"/masks/{i}/values", VALUES)
        found.append({"kind": mask.kind, **mask.fields})
    return found


def _written(mask: Any) -> str:
    """Return the call that makes the mask of an object of the API, {"kind": …}, or of a kind's name; else an empty text."""
    fields = mask if isinstance(mask, Mapping) else {"kind": mask}
    if not isinstance(kind := fields.get("kind"), str) or kind not in _KINDS:
        return ""
    words = ["values"] * (kind not in ("causal", "window"))
    words += [f"{name}={value!r}" for name, value in fields.items() if isinstance(value, str | int) and name != "kind"]
    return f"masks.{kind}({', '.join(words)})"


def layer_path(layer: object) -> str:
    return _path("layer", layer, LayerNotFound)


def model_path(model: object) -> str:
    return _path("model", model, ModelNotFound)


def _path(kind: str, name: object, error: type[NotServed]) -> str:
    # A malformed name ("..", "") would reach another route.
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise error(f"a {kind}'s name is {_NAME.pattern}; the service serves no other")
    return f"/v1/{kind}s/{name}"


def json_text(value: object, name: str = "") -> str:
    """Return the fields of a request as JSON. Raises InvalidInput that names the field."""
    try:
        return json.dumps(value, default=_listed, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        for field, part in value.items() if isinstance(value, Mapping) and not name else ():
            json_text(part, str(field))
        words = 'must be JSON: strings, lists and finite numbers; a bias in JSON writes minus infinity as "-inf"'
        raise InvalidInput(f"{name or 'a request'} {words}", param=f"/{name}" if name else None) from None


def _listed(value: Any) -> Any:
    """Return NumPy arrays and numbers, ranges and mappings as JSON has them. Raises TypeError for other types."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, range | Mapping):
        return dict(value) if isinstance(value, Mapping) else list(value)
    raise TypeError
