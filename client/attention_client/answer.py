"""Answer: decodes a reply into the result of a call, with arrays of the same kind as the query.

Invariants: pure. A reply is accepted only if its tensors have the shapes and dtypes that the request calls for, so the caller
need not check them; any other reply raises BadAnswer. Fields that a newer service adds are ignored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Generic, NamedTuple

import orjson

from attention_client.arrays import FLOATS, Array, Entry, dtype_of, maker, shape_of
from attention_client.errors import BadAnswer
from attention_client.problem import Reply
from attention_client.request import Request, weights_fields
from attention_client.safetensors_body import MEDIA_TYPE, read

Shape = tuple[int | None, ...]


class Batch(NamedTuple):
    """Size of the forward pass that computed this request: all its requests, sequences and tokens, including this one's."""

    requests: int
    sequences: int
    tokens: int


class Timing(NamedTuple):
    """Milliseconds in the service, by phase; `total` runs from the complete request body to the encoded answer."""

    decode: float
    queue: float
    compute: float
    total: float


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TopK(Generic[Array]):
    """The k largest weights of each row: values and indices `[H, L, k]`, rest `[H, L]`; a batch has `B` in front.

    `rest` is the sum of the weights of a row that are not returned.
    """

    values: Array
    indices: Array
    rest: Array


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Answer(Generic[Array]):
    """Result of one call. `output` has the rank, the dtype and the number of rows of the query.

    `weights` is `[H, L, S]`, or `[L, S]` for the mean over heads, with `B` in front for a batch. It is a TopK for the
    form `top_k`, and None if the request asks for no weights. `masked_rows` counts query rows that may attend to nothing.
    """

    output: Array
    weights: Array | TopK[Array] | None
    masked_rows: int
    layer: str
    digest: str
    batch: Batch
    timing_ms: Timing
    request_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """A layer that is served: widths in features, `limits` of one request. `facts` is the service's whole JSON object."""

    name: str
    digest: str
    query_width: int
    key_width: int
    value_width: int
    out_width: int
    num_heads: int
    limits: Mapping[str, int]
    facts: Mapping[str, Any]


def read_answer(reply: Reply, request: Request[Array]) -> Answer[Array]:
    """Decode the reply to an attend call. Raises BadAnswer if it does not match the request."""
    if _media_type(reply) != MEDIA_TYPE:
        raise _bad("the answer is no safetensors body; is the address that of an attention service?", reply)
    try:
        tensors, metadata = read(reply.content)
        facts = orjson.loads(metadata["response"])
        make = maker(request.query)
        return Answer(
            output=make(_output(tensors, request)),
            weights=_weights(tensors, request),
            masked_rows=_number(facts["masked_rows"], int),
            layer=_text(facts["layer"]["name"]),
            digest=_text(facts["layer"]["digest"]),
            batch=Batch(*(_number(facts["batch"][name], int) for name in Batch._fields)),
            timing_ms=Timing(*(_number(facts["timing_ms"][name], float) for name in Timing._fields)),
            request_id=reply.request_id,
        )
    except KeyError:
        raise _bad("a tensor or a field is missing in the answer", reply) from None
    except (TypeError, ValueError, AttributeError):
        raise _bad("the answer is damaged, or not what was asked for", reply) from None


def read_json(reply: Reply) -> dict[str, Any]:
    """Decode a JSON object. Raises BadAnswer for anything else."""
    try:
        found = orjson.loads(reply.content)
    except orjson.JSONDecodeError:
        raise _bad("the answer is no JSON; is the address that of an attention service?", reply) from None
    if not isinstance(found, dict):
        raise _bad("the answer is no JSON object", reply)
    return found


def read_layers(reply: Reply) -> list[Layer]:
    found = read_json(reply).get("layers")
    if not isinstance(found, list):
        raise _bad("the answer has no list of layers", reply)
    return [_layer(facts, reply) for facts in found]


def read_layer(reply: Reply) -> Layer:
    return _layer(read_json(reply), reply)


def _layer(facts: Any, reply: Reply) -> Layer:
    widths = ("query_width", "key_width", "value_width", "out_width", "num_heads")
    try:
        limits = {_text(name): _number(value, int) for name, value in facts["limits"].items()}
        numbers = {name: _number(facts[name], int) for name in widths}
        return Layer(_text(facts["name"]), _text(facts["digest"]), **numbers, limits=limits, facts=facts)
    except (KeyError, TypeError, AttributeError):
        raise _bad("a field of a layer is missing or of another kind", reply) from None


def _output(tensors: Mapping[str, Entry], request: Request[Any]) -> Entry:
    """Return the output if it has the rows and the dtype of the query; its width is the layer's, so any width is accepted."""
    entry = _checked(tensors["output"], (*shape_of(request.query, "/query")[:-1], None))
    if entry.dtype != dtype_of(request.query):
        raise ValueError("the output has another dtype than the query")
    return entry


def _weights(tensors: Mapping[str, Entry], request: Request[Array]) -> Array | TopK[Array] | None:
    wanted = weights_fields(request.weights)
    if wanted is None:
        return None
    make = maker(request.query)
    *batch, length, _ = shape_of(request.query, "/query")
    rows = length if wanted.get("queries") is None else len(wanted["queries"])
    heads = None if wanted.get("heads") is None else len(wanted["heads"])
    if wanted.get("form") == "mean":
        return make(_checked(_floats(tensors["weights"]), (*batch, rows, None)))
    if wanted.get("form") == "heads":
        return make(_checked(_floats(tensors["weights"]), (*batch, heads, rows, None)))
    values = _checked(_floats(tensors["weights.values"]), (*batch, heads, rows, wanted.get("k")))
    indices = _checked(tensors["weights.indices"], values.shape)
    if not indices.dtype.startswith("int"):
        raise ValueError("the indices are no integers")
    rest = _checked(_floats(tensors["weights.rest"]), values.shape[:-1])
    return TopK(make(values), make(indices), make(rest))


def _checked(entry: Entry, shape: Shape) -> Entry:
    """Return the entry if it has this shape, where None is any size above 0. Raises ValueError otherwise."""
    fits = len(entry.shape) == len(shape) and all(
        size > 0 and wanted in (None, size) for size, wanted in zip(entry.shape, shape, strict=True)
    )
    if not fits:
        raise ValueError("a tensor has another shape than the request calls for")
    return entry


def _floats(entry: Entry) -> Entry:
    # The service never returns weights as bfloat16, and NumPy has that dtype only with ml_dtypes.
    if entry.dtype not in FLOATS - {"bfloat16"}:
        raise ValueError("the weights are no floating-point numbers")
    return entry


def _bad(message: str, reply: Reply) -> BadAnswer:
    error = BadAnswer(message)
    error.status, error.request_id = reply.status, reply.request_id
    return error


def _number(value: Any, kind: type[int | float]) -> Any:
    wanted = int if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, wanted):
        raise TypeError
    return kind(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _media_type(reply: Reply) -> str:
    return reply.headers.get("content-type", "").partition(";")[0].strip().lower()
