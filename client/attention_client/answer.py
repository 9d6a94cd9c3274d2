"""Answer: decodes a reply into the result of a call, or raises the error that it reports.

Invariants: pure. The output of an answer has the rows and the dtype of the query, and is an array of the same kind. A reply that
is damaged or comes from something else raises BadAnswer, whatever goes wrong while it is decoded (`read_reply`). Tensors and
fields that were not requested, as a newer service may add, are ignored. The `code` of an error response decides the class of the
error. If the client does not know the code, or a proxy answered instead of the service, the status decides the base class, so
`except Refused` also catches the new errors of a newer service. A proxy's own 500, 502 or 504 is ConnectionFailed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from attention_client import errors
from attention_client.arrays import MEDIA_TYPE, Array, Summarized, made_like, read
from attention_client.errors import BadAnswer, ConnectionFailed, MethodNotAllowed, ServiceError

# Tensors that an answer may have besides output and weights, and the keys and values that a later call takes as its past.
EXTRAS = ("scores", "lse", "entropy")
PRESENT = ("present_key", "present_value")
OK = 200
_REPORTED = (errors.Rejected, errors.Refused, errors.Failed, errors.LayerError)
_KINDS = {kind.code: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, _REPORTED)}
_BY_STATUS = {429: errors.Refused, 502: ConnectionFailed, 503: errors.Refused, 504: errors.DeadlineExceeded}
_BY_HUNDRED = {4: errors.Rejected, 5: errors.Failed}
# Without the service's problem body: something in front of the service had no answer of it.
_OF_PROXY = {500: ConnectionFailed, 502: ConnectionFailed, 504: ConnectionFailed}

Result = TypeVar("Result")
_NUMPY: npt.NDArray[Any] = np.empty(0)  # an array of the kind that answers on text have
Axes = tuple[int, ...]


class Reply(NamedTuple):
    """A complete HTTP response; the names of `headers` are in lower case."""

    status: int
    headers: Mapping[str, str]
    content: bytes
    request_id: str


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


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class TopK(Summarized, Generic[Array]):
    """The k largest weights of each row: values and indices `[H, L, k]`, rest `[H, L]`; a batch has `B` in front.

    `rest` is the sum of the weights of a row that are not returned.
    """

    values: Array
    indices: Array
    rest: Array


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class Answer(Summarized, Generic[Array]):
    """Result of one call. `output` has the rank, the dtype and the number of rows of the query.

    `weights` is `[H, L, S]`, or `[L, S]` for the mean over heads, with `B` in front for a batch; float32, or float64 of a
    float64 query. It is a TopK for the form `top_k`, and None if the request asks for no weights. So are `scores` `[H, L, S]`,
    `lse` and `entropy` `[H, L]`, and `present_key` and `present_value` `[Hkv, S, d]` in the dtype of the query: the past and
    the new rows, rotated if the layer rotates. `masked_rows` counts query rows that may attend to nothing.
    """

    output: Array
    weights: Array | TopK[Array] | None
    scores: Array | None
    lse: Array | None
    entropy: Array | None
    present_key: Array | None
    present_value: Array | None
    masked_rows: int
    layer: str
    digest: str = dataclasses.field(repr=False)
    batch: Batch = dataclasses.field(repr=False)
    timing_ms: Timing = dataclasses.field(repr=False)
    request_id: str = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class AttentionAnswer(Summarized, Generic[Array]):
    """Result of attention without a layer. `output` has the layout and the dtype of the query.

    A result that was not requested is None. Weights and `scores` are `[B, H, L, S]`, `lse` and `entropy` `[B, H, L]`, without
    the axes that the layout lacks; float32, or float64 of a float64 query. `present_key` and `present_value` are `[Hkv, S, d]`,
    with `B` in front for a batch.
    """

    output: Array
    weights: Array | TopK[Array] | None
    scores: Array | None
    lse: Array | None
    entropy: Array | None
    present_key: Array | None
    present_value: Array | None
    masked_rows: int
    batch: Batch = dataclasses.field(repr=False)
    timing_ms: Timing = dataclasses.field(repr=False)
    request_id: str = dataclasses.field(repr=False)


class Token(NamedTuple):
    """A token of a text: the vocabulary's string and id, and its place in the text (`sequence` 0) or in its pair (1).

    `offsets` are its first character and the one behind its last. Both are None without such a place: for special tokens, and
    for tokens that were sent.
    """

    text: str
    id: int
    offsets: tuple[int, int] | None
    sequence: int | None


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class TextAnswer(Answer[npt.NDArray[Any]]):
    """Result of an attend call on text, in NumPy arrays: its rows and keys are those of the `tokens`, its output is float32."""

    tokens: list[Token] = dataclasses.field(repr=False)
    model: str
    model_digest: str = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class States(Summarized):
    """Hidden states `[K, L, D]` of the L `tokens` of a text, in front of each of the K `layers`; float32."""

    states: npt.NDArray[np.float32]
    layers: list[int]
    tokens: list[Token] = dataclasses.field(repr=False)
    model: str
    model_digest: str = dataclasses.field(repr=False)
    batch: Batch = dataclasses.field(repr=False)
    timing_ms: Timing = dataclasses.field(repr=False)
    request_id: str = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """A layer that is served: widths in features, `limits` of one request. `facts` is the service's whole JSON object."""

    name: str
    digest: str = dataclasses.field(repr=False)
    query_width: int
    key_width: int
    value_width: int
    out_width: int
    num_heads: int
    limits: Mapping[str, int] = dataclasses.field(repr=False)
    facts: Mapping[str, Any] = dataclasses.field(repr=False)


def read_answer(reply: Reply, query: Array, rows: Axes, wanted: Mapping[str, str]) -> Answer[Array]:
    """Decode the reply to an attend call; its arrays are of the kind of the query.

    `rows` are the axes of the output but its last; `wanted` has each tensor of the answer, and how the name of its dtype begins.
    """
    arrays, facts = _decoded(reply, query, wanted)
    _check_rows(arrays["output"], rows)
    return Answer(**_named("layer", facts), **_shared_fields(reply, arrays, facts))


def read_text_answer(reply: Reply, wanted: Mapping[str, str]) -> TextAnswer:
    """Decode the reply to an attend call on text, whose rows are the tokens that the answer names."""
    arrays, facts = _decoded(reply, _NUMPY, wanted)
    text = _text_fields(facts)
    _check_rows(arrays["output"], (len(text["tokens"]),))
    return TextAnswer(**_named("layer", facts), **_shared_fields(reply, arrays, facts), **text)


def read_states(reply: Reply) -> States:
    """Decode the reply to a call for hidden states."""
    arrays, facts = _decoded(reply, _NUMPY, {"states": "float32"})
    text, layers = _text_fields(facts), [_checked(layer, int) for layer in facts["layers"]]
    _check_rows(arrays["states"], (len(layers), len(text["tokens"])))
    return States(states=arrays["states"], layers=layers, **text, **_run_fields(reply, facts))


def read_attention(reply: Reply, query: Array, rows: Axes, wanted: Mapping[str, str]) -> AttentionAnswer[Array]:
    """Decode the reply to a call of attention without a layer, as `read_answer` does."""
    arrays, facts = _decoded(reply, query, wanted)
    _check_rows(arrays["output"], rows)
    return AttentionAnswer(**_shared_fields(reply, arrays, facts))


def _shared_fields(reply: Reply, arrays: Mapping[str, Array], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that an answer has with and without a layer."""
    weights: Array | TopK[Array] | None = arrays.get("weights")
    if "weights.values" in arrays:
        weights = TopK(*(arrays[f"weights.{part}"] for part in ("values", "indices", "rest")))
    return {
        **{name: arrays.get(name) for name in (*EXTRAS, *PRESENT)},
        "output": arrays["output"],
        "weights": weights,
        "masked_rows": _checked(facts["masked_rows"], int),
        **_run_fields(reply, facts),
    }


def _run_fields(reply: Reply, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that every answer has."""
    return {
        "batch": Batch(*(_checked(facts["batch"][name], int) for name in Batch._fields)),
        "timing_ms": Timing(*(_checked(facts["timing_ms"][name], float) for name in Timing._fields)),
        "request_id": reply.request_id,
    }


def _named(kind: str, facts: Mapping[str, Any], digest: str = "digest") -> dict[str, Any]:
    """Return the name of the layer or model that computed, and its digest."""
    return {kind: _checked(facts[kind]["name"], str), digest: _checked(facts[kind]["digest"], str)}


def _text_fields(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that answers on text have besides."""
    tokens = [_token(token) for token in _checked(facts["tokens"], list)]
    return {"tokens": tokens, **_named("model", facts, "model_digest")}


def _token(facts: Mapping[str, Any]) -> Token:
    offsets, sequence = facts["offsets"], facts["sequence"]
    start, end = (0, 0) if offsets is None else (_checked(place, int) for place in offsets)
    return Token(
        text=_checked(facts["text"], str),
        id=_checked(facts["id"], int),
        offsets=None if offsets is None else (start, end),
        sequence=None if sequence is None else _checked(sequence, int),
    )


def _decoded(reply: Reply, query: Array, wanted: Mapping[str, str]) -> tuple[dict[str, Array], dict[str, Any]]:
    """Return the arrays of a reply, of the kind of the query, and its other fields."""
    if reply.headers.get("content-type", "").partition(";")[0] != MEDIA_TYPE:
        raise ValueError("the answer is not a safetensors body; is this the address of an attention service?")
    tensors, metadata = read(reply.content)
    for name, dtype in wanted.items():
        if name not in tensors or not tensors[name].dtype.startswith(dtype):
            raise ValueError(f"it lacks {name} in the requested dtype")
    return {name: made_like(query, tensors[name]) for name in wanted}, _object(metadata["response"])


def _check_rows(found: Array, rows: Axes) -> None:
    if tuple(found.shape[:-1]) != rows:
        raise ValueError("the output has another number of rows than the query")


def _object(text: str | bytes) -> dict[str, Any]:
    """Decode a JSON object; TypeError for any other JSON, KeyError for what JSON lacks, such as NaN."""
    return _checked(json.loads(text, parse_constant=dict[str, Any]().__getitem__), dict)


def _checked(value: Any, kind: type[Result]) -> Result:
    """Return the value, which must be of this type, or for float any finite number. Raises TypeError or OverflowError."""
    value = float(value) if kind is float and type(value) is int else value
    if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
        raise TypeError
    return value


def read_json(reply: Reply) -> dict[str, Any]:
    return _object(reply.content)


def read_layers(reply: Reply) -> list[Layer]:
    return [_layer(facts) for facts in read_json(reply)["layers"]]


def read_models(reply: Reply) -> list[dict[str, Any]]:
    return [dict(facts, name=_checked(facts["name"], str)) for facts in read_json(reply)["models"]]


def read_layer(reply: Reply) -> Layer:
    return _layer(read_json(reply))


def _layer(facts: Mapping[str, Any]) -> Layer:
    kinds: dict[str, type] = {"name": str, "digest": str, "limits": dict}
    named = {field.name: field for field in dataclasses.fields(Layer) if field.name != "facts"}
    return Layer(**{name: _checked(facts[name], kinds.get(name, int)) for name in named}, facts=_checked(facts, dict))


def read_reply(reply: Reply, read: Callable[[Reply], Result]) -> Result:
    """Return what `read` makes of the reply. Raises BadAnswer for every error that a damaged or foreign answer causes there."""
    try:
        return read(reply)
    # Not what this process lacks: memory, or the package of a dtype.
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        words = "the answer is damaged, or does not come from an attention service"
        bad = BadAnswer(f"{words}: {error}" if isinstance(error, ValueError) else words)
        bad.status, bad.request_id = reply.status, reply.request_id
        raise bad from None


def check(reply: Reply) -> Reply:
    """Return the reply if it is a 200; otherwise raise the error that it reports."""
    if reply.status == OK:
        return reply
    error = _error(reply)
    error.status, error.request_id = reply.status, reply.request_id
    error.retry_after_s = retry_after_s(reply.headers)
    if isinstance(error, MethodNotAllowed):
        error.allow = reply.headers.get("allow", "")
    raise error


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of Retry-After, or None if it is absent or no number; the service never sends a date."""
    value = headers.get("retry-after", "").strip()
    return float(value[:9]) if value.isascii() and value.isdigit() else None


def _error(reply: Reply) -> ServiceError:
    """Return the error of a problem body (RFC 9457), or one by the status if the body lacks the service's fields."""
    branch = _BY_STATUS.get(reply.status) or _BY_HUNDRED.get(reply.status // 100, BadAnswer)
    with contextlib.suppress(ValueError, RecursionError):
        match json.loads(reply.content):
            case {"code": str(code), "detail": str(detail), **others}:
                kind, param = _KINDS.get(code), others.get("param")
                if kind is None:
                    return branch(f"{code}: {detail}")
                return kind(detail, param=param if isinstance(param, str) else None)
    branch = _OF_PROXY.get(reply.status, branch)
    return branch(f"the answer with status {reply.status} does not come from this service, but perhaps from a proxy")
