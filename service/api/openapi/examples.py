"""Examples: the bodies of requests and the answers to errors that the API page shows.

Invariants: bodies have the widths of a served layer, or are a few numbers long. Each is answered with a 200, or with the error
whose code is its name. Every code of an answer has an example: an error of a body is what its body here raises, the others have
a text here that the service uses.
"""

from __future__ import annotations

import base64
import json
import struct
from http import HTTPStatus
from typing import Any

from service import errors
from service.api.problems import error_rows, render
from service.api.request_body import CHEAPER
from service.attention.spec import LayerSpec
from service.errors import ServiceError
from service.wire.attend_request import RequestLimits
from service.wire.attention_request import check_attention
from service.wire.json_document import parse

Body = dict[str, Any]
_ONE = [[0.5]]
_NAN = {"dtype": "float32", "shape": [1, 1], "data": "AADAfw=="}


def attend_examples(spec: LayerSpec) -> Body:
    query: Body = {name: _rows(3, width) for name, width in _needed(spec).items()}
    small = {name: _rows(2, width) for name, width in _needed(spec).items()}
    cross = {"query": query["query"], "key": _rows(4, spec.key_width), "value": _rows(4, spec.value_width)}
    padded = [{"kind": "attend", "axes": "bs", "values": [[True, True, True], [True, True, False]]}]
    placed = {"positions": [1, 2, 3], "key_positions": [0, 1, 2, 3]} if spec.uses_positions else {}
    unplaced = _example("Error positions_required: more keys than rows, and no positions", cross)
    cross = {**cross, **placed}
    return {
        "self-attention": _example("Three tokens attend to each other", query),
        "batch": _example(
            "Two sequences of three tokens, of which the last of the second is padding",
            {**{name: [tensor, tensor] for name, tensor in query.items()}, "masks": padded},
        ),
        "cross-attention": _example(
            "Three queries over four keys, of which the last is padding; the two strongest keys of each row",
            {**cross, "masks": [{"kind": "lengths", "values": 3}], "weights": {"form": "top_k", "k": 2}},
        ),
        "decode": _example("One new row behind a past of one row, and what the next one needs", _decode_body(spec)),
        "arithmetic": _example(
            "The scaled scores of the first row in head 0; each head's log-sum-exp and entropy",
            {**small, "scores": {"stage": "scaled", "heads": [0], "queries": [0]}, "lse": True, "entropy": True},
        ),
        "base64": _example("Tensors as base64", {name: _base64(tensor) for name, tensor in small.items()}),
        **_mask_bodies(small, 2, 2),
        **_weights_bodies(small),
        **({"positions_required": unplaced} if placed else {}),
        **_bodies_of_errors({**cross, "masks": [{"kind": "causal"}]}, None if spec.extra_keys else small),
    }


def _decode_body(spec: LayerSpec) -> Body:
    rows: Body = {name: _rows(1, width) for name, width in _needed(spec).items()}
    for name, width in (("past_key", spec.head_width), ("past_value", spec.value_head_width)):
        rows[name] = [_rows(1, width)] * spec.num_kv_heads
    places = {"positions": [1], "key_positions": [0, 1]} if spec.uses_positions else {}
    return {**rows, **places, "present": True}


def attention_examples() -> Body:
    two = {"query": _rows(3, 4), "key": _rows(5, 4), "value": _rows(5, 2)}
    heads = {"query": [_rows(1, 4)] * 4, "key": [_rows(1, 4)] * 2, "value": [_rows(1, 4)] * 2, "layout": "hld"}
    past = {"past_key": [_rows(3, 4)] * 2, "past_value": [_rows(3, 4)] * 2, "present": True}
    packed = {name: _rows(3, 4) for name in ("query", "key", "value")}
    return {
        "plain": _example("Three queries over five keys, with the weights", {**two, "weights": {"form": "heads"}}),
        "causal": _example(
            "No looking ahead, the masked scores and their log-sum-exp",
            {**two, "masks": [{"kind": "causal", "align": "top_left"}], "scores": {"stage": "masked"}, "lse": True},
        ),
        "decode": _example(
            "One new row of four query heads that share two key and value heads, behind a past of three rows",
            {**heads, **past, "masks": [{"kind": "causal"}]},
        ),
        "packed": _example(
            "Two heads side by side, with a scale, a softcap and a sink for each head",
            {**packed, "layout": "packed", "num_heads": 2, "scale": 0.5, "softcap": 20.0, "sinks": [0.0, 0.5]},
        ),
        "base64": _example("Tensors as base64", {name: _base64(tensor) for name, tensor in two.items()}),
        **_mask_bodies(two, 3, 5),
        **_weights_bodies(two),
        **_bodies_of_errors(
            {**two, "masks": [{"kind": "causal"}]}, two, without_layout={name: [_ONE] for name in packed}
        ),
    }


def _example(summary: str, body: Body) -> Body:
    return {"summary": summary, "value": body}


def _mask_bodies(body: Body, queries: int, keys: int) -> Body:
    """Return an example of each kind of mask, for a body with so many query rows and keys."""
    is_last = [j == keys - 1 for j in range(keys)]
    far = [[-abs(i - j) / 2 for j in range(keys)] for i in range(queries)]
    align = {"align": "bottom_right"}
    masks: dict[str, tuple[str, Body]] = {
        "attend": ("true = may attend; the last key is padding", {"values": [not last for last in is_last]}),
        "ignore": ("true = blocked; the last key is padding", {"values": is_last}),
        "lengths": ("the last key is padding", {"values": keys - 1}),
        "bias": ("the farther a key, the lower its score", {"axes": "ls", "values": far}),
        "causal": ("no looking ahead; the last query stands at the last key", align),
        "window": ("each query sees its own key and the one before", {"left": 1, "right": 0, **align}),
    }
    return {
        f"mask_{kind}": _example(f"Mask {kind}: {words}", {**body, "masks": [{"kind": kind, **fields}]})
        for kind, (words, fields) in masks.items()
    }


def _weights_bodies(body: Body) -> Body:
    forms: dict[str, tuple[str, Any]] = {
        "heads": ("of head 0", {"form": "heads", "heads": [0]}),
        "mean": ("averaged over the heads, for the first query row", {"form": "mean", "queries": [0]}),
        "top_k": ("the largest of each row, and the rest", {"form": "top_k", "k": 1, "dtype": "float16"}),
        "contributions": ("times what each key's value adds to the output", {"form": "contributions", "heads": [0]}),
        "short": ("a short form", "mean"),
    }
    return {
        f"weights_{form}": _example(f"Weights {words}", {**body, "weights": it}) for form, (words, it) in forms.items()
    }


def _bodies_of_errors(unaligned: Body, whole: Body | None, without_layout: Body | None = None) -> Body:
    """Return the errors of bodies by their codes; `whole` is a valid body in which a row can be masked, None if none can."""
    one = {"query": _ONE, "key": _ONE, "value": _ONE}
    batch = {name: [rows] for name, rows in one.items()} | ({"layout": "bld"} if without_layout else {})
    bodies: dict[str, tuple[str, Body]] = {
        "bad_encoding": ("base64 with a blank", {**one, "query": {**_NAN, "data": "AAD Afw="}}),
        "bad_shape": ("a query of one axis", {**one, "query": [0.5]}),
        "bad_dtype": ("a query of whole numbers", {**one, "query": {"dtype": "int32", "shape": [1, 1], "data": [1]}}),
        "bad_mask": ("a kind that does not exist", {**one, "masks": [{"kind": "padding", "values": [True]}]}),
        "mask_kind_required": ("a mask that does not say what true means", {**one, "masks": [[[True]]]}),
        "mask_axes_required": ("[B, S] or [L, S]?", {**batch, "masks": [{"kind": "attend", "values": [[True]]}]}),
        "causal_align_required": ("a causal mask where L is not S", unaligned),
        "non_finite": ("a query of NaN", {**one, "query": _NAN}),
        "unknown_field": ("another library's name", {**one, "is_causal": True}),
        "invalid": ("an encoding that does not exist", {**one, "encoding": "hex"}),
        "cost_limit": ("too many values", {**one, "query": {**_NAN, "shape": [2**40, 1]}}),
    }
    if without_layout is not None:
        bodies["layout_required"] = ("three axes without a layout", without_layout)
    if whole is not None:
        masked = {**whole, "masks": [{"kind": "lengths", "values": 0}], "masked_rows": "error"}
        bodies["masked_row"] = ("rows that may attend to nothing", masked)
    return {code: _example(f"Error {code}: {words}", body) for code, (words, body) in bodies.items()}


def _needed(spec: LayerSpec) -> dict[str, int]:
    """Return the tensors that every request to this layer has, with their widths."""
    key = {"key": spec.key_width} if spec.needs_key else {}
    value = {"value": spec.value_width} if spec.needs_value else {}
    return {"query": spec.query_width, **key, **value}


def _rows(count: int, width: int) -> list[list[float]]:
    """Return short decimal numbers that differ from row to row."""
    return [[((7 * i + 3 * j) % 11 - 5) / 10 for j in range(width)] for i in range(count)]


def _base64(rows: list[list[float]]) -> Body:
    values = [value for row in rows for value in row]
    data = base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode("ascii")
    return {"dtype": "float32", "shape": [len(rows), len(rows[0])], "data": data}


MODEL = "minilm"
"""The model of the examples, which `make run` serves."""
_SENTENCE = "The animal did not cross the street because it was too tired"


def model_examples() -> Body:
    asked = {"text": _SENTENCE, "layer": 3}
    return {
        "text": _example("Which words the heads of layer 3 look at", {**asked, "weights": "heads"}),
        "pair": _example(
            "A pair of texts, and the entropy of each head's rows",
            {"text": "Who was tired?", "text_pair": _SENTENCE, "layer": 0, "entropy": True},
        ),
        "tokens": _example(
            "Tokens of the vocabulary, and no looking ahead",
            {"tokens": ["the", "animal", "was", "tired"], "layer": 0, "masks": [{"kind": "causal"}], "weights": "mean"},
        ),
    }


def states_examples() -> Body:
    return {
        "text": _example("In front of the first layer and behind it", {"text": _SENTENCE, "layers": [0, 1]}),
        "base64": _example("As base64", {"text": _SENTENCE, "layers": [2], "encoding": "base64"}),
    }


def infer_examples(spec: LayerSpec) -> Body:
    inputs = [
        {"name": name, "datatype": "FP32", "shape": [1, 3, width], "data": [_rows(3, width)]}
        for name, width in _needed(spec).items()
    ]
    mask = {"name": "attend_mask", "datatype": "BOOL", "shape": [1, 3], "data": [1, 1, 0]}
    return {
        "output": _example("Three tokens attend to each other", {"inputs": inputs}),
        "weights": _example(
            "No looking ahead, and the weights averaged over the heads",
            {"id": "42", "inputs": inputs, "parameters": {"causal": "top_left", "weights": "mean"}},
        ),
        "padding": _example(
            "The last token is padding",
            {"inputs": [*inputs, mask], "parameters": {"attend_mask_axes": "bs"}},
        ),
    }


_REQUEST_ID = "2f9c4a7d1e8b5c3f6a0d9e24"
_LIMITS = RequestLimits(2**10, 2**20, 2**20, 2**20, 2**20)
_TEXTS: dict[type[ServiceError], str] = {
    errors.PositionsRequired: 'positions is required: layer "gpt2-l0" uses positions, and the number of query rows is 1, that of '
    "keys 5. Usual are positions 0 with key_positions 0 to 4 (top left: the first row at the first key), or positions 4 with "
    "key_positions 0 to 4 (bottom right: the last row at the last key)",
    errors.BadRequest: "Content-Length must be one number of bytes with at most 19 digits",
    errors.BadJson: "the body is not valid JSON (byte 1): the body ends too early (is it cut off?); around it: {",
    errors.JsonTooDeep: "the body is nested deeper than 32 levels",
    errors.DuplicateKey: 'an object of the body has the key "query" twice',
    errors.BadBinary: "the body has 3 bytes, too few for safetensors",
    errors.Unauthorized: "this route needs a key: Authorization: Bearer <key>, or X-API-Key: <key>",
    errors.Forbidden: "this route needs a key with the role admin",
    errors.LayerNotFound: "no layer of that name is served; GET /v1/layers lists them",
    errors.ModelNotFound: "no model of that name is in the layer directory; GET /v1/models lists them",
    errors.RouteNotFound: "nothing is served at that path; GET /openapi.json lists what is",
    errors.NotAcceptable: "Accept must allow application/json or application/vnd.safetensors",
    errors.LayersFixed: "this service follows ATTENTION_LAYERS_SOURCE; publish another set there",
    errors.ClientTimeout: "the body did not arrive within 30 s",
    errors.LayerChanged: "another change of this layer came first; nothing was changed",
    errors.BodyTooLarge: f"the body has 16,777,217 bytes, expected at most 16,777,216 (ATTENTION_MAX_BODY_BYTES); {CHEAPER}",
    errors.DecompressedTooLarge: f"the decompressed body has more than 16,777,216 bytes (ATTENTION_MAX_BODY_BYTES); {CHEAPER}",
    errors.TargetTooLong: "the request target has more than 8,192 bytes (ATTENTION_MAX_TARGET_BYTES); put data into the body",
    errors.HeadersTooLarge: "the header fields of the request have more than 16,384 bytes together (ATTENTION_MAX_HEADER_BYTES)",
    errors.UnsupportedMediaType: "Content-Type must be application/json or application/vnd.safetensors, with text in UTF-8",
    errors.UnsupportedContentEncoding: "a body may be compressed once, with gzip or zstd",
    errors.QueueFull: "256 requests wait; the queue holds at most 256",
    errors.RateLimited: "more than 10 requests a second, in bursts of at most 20",
    errors.EngineFailed: "an internal fault; the log has its traceback under the request id",
    errors.NotReady: "layers are being loaded",
    errors.Draining: "the service is shutting down and accepts no new requests",
    errors.EngineDown: "the engine has stopped; this process computes nothing until it is replaced",
    errors.DeadlineExceeded: "the deadline passed before the request was queued",
}


def error_examples(*, as_inference: bool) -> dict[int, Body]:
    """Return OpenAPI's examples of the answers to a POST's errors by status and code; raises KeyError for a code without one."""
    raised = {kind.code: kind(text) for kind, text in _TEXTS.items()}
    for example in attention_examples().values():
        body = json.dumps(example["value"]).encode()
        try:
            check_attention(parse(body, max_depth=32, max_numbers=1000), _LIMITS)
        except ServiceError as error:
            raised[error.code] = error.with_traceback(None)
    answers: dict[int, Body] = {}
    for row in sorted(error_rows()):
        if row.status != HTTPStatus.METHOD_NOT_ALLOWED:
            problem = render(raised[row.code], _REQUEST_ID, as_inference=as_inference)
            example = _example(f"{row.code}: {row.cause}", json.loads(problem.body))
            answers.setdefault(problem.status, {})[row.code] = example
    return answers
