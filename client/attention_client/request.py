"""Request: the inputs of an attend call, and the encoding of calls as HTTP requests.

Invariants: pure, nothing is sent here. Only what the encoding needs is checked (kinds, dtypes, names), with the same errors that
the service would answer. The service checks everything else, so a newer one may allow more.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, Literal, NamedTuple
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import orjson

from attention_client.arrays import FLOATS, VALUES, Array, Raw, raw, shape_of
from attention_client.errors import BadShape, InvalidInput, LayerNotFound, MaskKindRequired
from attention_client.masks import Mask
from attention_client.safetensors_body import MEDIA_TYPE, write

Indices = Sequence[int] | npt.NDArray[np.integer[Any]]
WeightsForm = Literal["heads", "mean", "top_k"]
MaskedRows = Literal["zero", "error"]

_LAYER_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_RANKS = (2, 3)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """Attention weights to return: those of `heads` and `queries` (default: all); for `top_k` the `k` largest of each row."""

    form: WeightsForm = "heads"
    heads: Indices | None = None
    queries: Indices | None = None
    k: int | None = None
    dtype: Literal["float32", "float16"] | None = None

    def fields(self) -> dict[str, object]:
        named = {name: getattr(self, name) for name in ("form", "heads", "queries", "k", "dtype")}
        given = {name: value for name, value in named.items() if value is not None}
        return {name: list(value) if isinstance(value, range) else value for name, value in given.items()}


WeightsWanted = Weights | Literal["heads", "mean"] | Mapping[str, Any] | None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Request(Generic[Array]):
    """One sequence `[L, d]`, or a batch of sequences of equal length `[B, L, d]`, with its masks and options.

    `key` defaults to `query`, `value` to `key`. `weights` is a `Weights`, a form's name, the contract's object, or None for none.
    `masked_rows` "error" refuses a request with a query row that may attend to nothing; "zero" gives zeros from the heads.
    """

    query: Array
    key: Array | None = None
    value: Array | None = None
    masks: Sequence[Mask] = ()
    weights: WeightsWanted = None
    masked_rows: MaskedRows = "zero"


class Call(NamedTuple):
    """One HTTP request without its address: `path` begins with a slash, `content` is None for a GET."""

    method: Literal["GET", "POST"]
    path: str
    headers: Mapping[str, str]
    content: bytes | None = None


def attend_call(layer: str, request: Request[Any]) -> Call:
    """Encode an attend call. Raises InvalidInput, BadShape, BadDtype, MaskKindRequired or LayerNotFound."""
    if len(shape_of(request.query, "/query")) not in _RANKS:
        raise BadShape("query must be [L, d] for one sequence or [B, L, d] for a batch", param="/query")
    tensors = {
        name: raw(array, f"/{name}", FLOATS)
        for name in ("query", "key", "value")
        if (array := getattr(request, name)) is not None
    }
    fields: dict[str, object] = {}
    if masks := _listed(request.masks):
        fields["masks"] = [_mask_fields(mask, i, tensors) for i, mask in enumerate(masks)]
    if (weights := weights_fields(request.weights)) is not None:
        fields["weights"] = weights
    if request.masked_rows != "zero":
        fields["masked_rows"] = request.masked_rows
    content = write(tensors, {"request": _json(fields).decode()})
    return Call("POST", _path(layer) + "/attend", {"content-type": MEDIA_TYPE, "accept": MEDIA_TYPE}, content)


def attend_json_call(layer: str, body: Mapping[str, Any]) -> Call:
    headers = {"content-type": "application/json", "accept": "application/json"}
    return Call("POST", _path(layer) + "/attend", headers, _json(body))


def layers_call() -> Call:
    return Call("GET", "/v1/layers", {"accept": "application/json"})


def layer_call(layer: str) -> Call:
    return Call("GET", _path(layer), {"accept": "application/json"})


def ready_call() -> Call:
    return Call("GET", "/readyz", {"accept": "application/json"})


def weights_fields(wanted: WeightsWanted) -> Mapping[str, Any] | None:
    if isinstance(wanted, Weights):
        return wanted.fields()
    return {"form": wanted} if isinstance(wanted, str) else wanted


def _listed(masks: object) -> list[object]:
    """Return any iterable of masks as a list. An array in place of the list is a mask without a kind, so it raises."""
    if masks is None:
        return []
    if hasattr(masks, "dtype"):
        raise _kind_required("/masks")
    if isinstance(masks, Iterable) and not isinstance(masks, Mask | Mapping | str | bytes):
        return list(masks)
    raise InvalidInput("masks must be a list of masks, like [masks.causal()]", param="/masks")


def _mask_fields(mask: object, i: int, tensors: dict[str, Raw]) -> dict[str, object]:
    """Return the mask's fields without its values, and add the values to `tensors`."""
    if not isinstance(mask, Mask):
        raise _kind_required(f"/masks/{i}")
    if not isinstance(mask.fields, Mapping):
        raise InvalidInput("the fields of a mask must be a mapping", param=f"/masks/{i}")
    if mask.values is not None:
        tensors[f"masks.{i}.values"] = raw(mask.values, f"/masks/{i}/values", VALUES)
    return {"kind": mask.kind, **mask.fields}


def _kind_required(param: str) -> MaskKindRequired:
    return MaskKindRequired(
        "a mask must say what its values mean: masks.attend(values) where true = may attend, masks.ignore(values) "
        "where true = blocked, or lengths, bias, causal, window",
        param=param,
    )


def _path(layer: object) -> str:
    # A malformed name ("..", "") would reach another route, which answers something else.
    if not isinstance(layer, str) or not _LAYER_NAME.fullmatch(layer):
        raise LayerNotFound("a layer's name is [a-z0-9][a-z0-9._-]{0,63}; the service serves no other")
    return f"/v1/layers/{quote(layer, safe='')}"


def _is_finite(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_finite, value))
    if isinstance(value, np.ndarray | np.floating):
        return value.dtype.kind != "f" or bool(np.isfinite(value).all())
    return not isinstance(value, float) or math.isfinite(value)


def _json(fields: Mapping[str, object]) -> bytes:
    try:
        content = orjson.dumps(fields, option=orjson.OPT_SERIALIZE_NUMPY)
    except orjson.JSONEncodeError:
        raise InvalidInput("masks and weights must be numbers, strings and lists of them") from None
    # orjson writes null for a number that is not finite: the service would read it as an unbounded window, or report a
    # null that the caller never wrote.
    if b"null" in content and not _is_finite(fields):
        raise InvalidInput('numbers must be finite; a bias in JSON writes minus infinity as "-inf"')
    return content
