"""OpenAPI document: describes the whole contract, hot routes included, with examples that run as they stand.

Invariants: schemas come from the pydantic models that check requests. Examples have the widths of a served layer, so the
document is made anew when the catalog changes. Nothing in it needs the network.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from service.api.attend_route import ATTENTION_ROUTE, INFER_ROUTES, ROUTE
from service.api.problems import INFERENCE_STATUS, STATUS, is_inference, problem_responses
from service.api.reply import JSON, OCTET_STREAM, SAFETENSORS
from service.attention.spec import LayerSpec
from service.errors import ServiceError
from service.wire.answer import AttendAnswer, AttentionReply
from service.wire.attend_request import AttendRequest
from service.wire.attention_request import AttentionRequest
from service.wire.inference_schemas import VERSION, InferAnswer, InferenceError, InferRequest
from service.wire.schemas import Problem

_REF = "#/components/schemas/{model}"
_DESCRIPTION = (
    "Sends query, key and value through one multi-head attention layer, batched with other requests; the bits of the "
    "answer do not depend on them. `query` is `[L, d]` or `[B, L, d]`; `key` defaults to `query`, `value` to `key`. Tensors are "
    "nested lists (float32) or objects with `dtype`, `shape` and `data` (base64 of little-endian bytes, or a flat list).\n\n"
    "Request headers: `X-Request-ID` (taken if sane), `X-Request-Timeout-Ms` (shortens the deadline), "
    "`Content-Encoding: gzip` or `zstd`. Answer headers: `X-Request-ID`, `Server-Timing`.\n\n"
    "Binary form: one safetensors file with the tensors `query`, `key`, `value`, `masks.<i>.values`; its metadata has one key, "
    "`request`: the JSON of the other fields. The answer is then safetensors too (`output`, `weights` …, the other fields in the "
    "metadata's `response`), with the same bits. `Accept` requests the other form."
)
_ATTENTION_DESCRIPTION = (
    "Scaled dot-product attention on your own query, key and value, without a layer: "
    "`softmax(softcap(query·keyᵀ·scale) + masks)·value`. It has no parameters and needs no stored layer.\n\n"
    "`layout` names the order of the axes: `ld`, `bld`, `hld`, `lhd`, `bhld`, `blhd`, or `packed` (`[L, H·d]` or `[B, L, H·d]`, "
    "with `num_heads` and `num_kv_heads`). Two axes are `ld` and four are `bhld` by default; three must say. The number of key "
    "and value heads divides that of query heads; query head h uses key head `h // (H / Hkv)`. The output has the layout of the "
    "query. `past_key` and `past_value` (`[Hkv, P, d]`, with B in front of a batch) stand before `key` and `value`.\n\n"
    "`scores` returns the scores of a `stage`: `scaled`, `capped` (after the softcap) or `masked`. `lse` is their natural "
    "log-sum-exp. A row that may attend to nothing gives zeros, and its lse is the sink, or `-inf`. With `sinks` the weights of "
    "a row sum to less than 1. float64 computes in float64, every other dtype in float32; the answer has the query's dtype.\n\n"
    "Masks, weights, headers and the safetensors form are those of a layer's attend route."
)
_INFER_DESCRIPTION = (
    "The Open Inference Protocol V2 with its binary tensor extension. A layer is a model, its version is 1. Inputs: `query`, "
    "`key`, `value` (`[B, L, d]`; FP32, FP64, and FP16, BF16 as bytes), `attend_mask`, `ignore_mask` (BOOL), `bias` (floats), "
    "`lengths` (INT64, INT32). Parameters: `attend_mask_axes`, `ignore_mask_axes`, `bias_axes` (`s`, `ls`, `hls`, `bs`, `bls`, "
    "`bhls`; required where that input has 2 or 3 axes), `causal` (`top_left`, `bottom_right`), `weights` (`heads`, `mean`), "
    "`masked_rows` (`zero`, `error`), `timeout` (microseconds), `binary_data_output`. Outputs: `output`, and `weights` where "
    "asked for.\n\n"
    "The model `sdpa` is attention without a layer: query, key and value are `[B, H, L, d]`, with the further inputs `past_key`, "
    "`past_value` and `sinks`, the parameters `scale`, `softcap`, `scores`, `lse` and `present`, and outputs of those names "
    "(`present_key`, `present_value`)."
)


def write_openapi(app: FastAPI, examples_for: tuple[str, LayerSpec] | None) -> dict[str, Any]:
    """Return the document; `examples_for` is the name and spec of a served layer, None while there is none."""
    page = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
    _, schemas = models_json_schema(
        [(model, "validation") for model in (AttendRequest, AttentionRequest, InferRequest)]
        + [(model, "serialization") for model in (AttendAnswer, AttentionReply, Problem, InferAnswer, InferenceError)],
        ref_template=_REF,
    )
    page.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
    hot = _operations(None if examples_for is None else examples_for[1])
    page["paths"] |= {path: {"post": operation} for path, operation in hot.items()}
    page["paths"] = dict(sorted(page["paths"].items()))
    for path, operations in page["paths"].items():
        for operation in operations.values():
            # FastAPI announces its own validation errors, which no route of ours returns.
            if "HTTPValidationError" in str(operation["responses"].get("422")):
                del operation["responses"]["422"]
            _give_examples(path, operation, examples_for)
    for name in ("HTTPValidationError", "ValidationError"):
        page["components"]["schemas"].pop(name, None)
    return page


def announce_keys(page: dict[str, Any], needs_key: Callable[[str], bool]) -> dict[str, Any]:
    """Add the key schemes to the page and to every operation that needs a key; return the page."""
    page["components"]["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
    }
    for path, operations in page["paths"].items():
        for operation in operations.values() if needs_key(path) else ():
            operation["security"] = [{"bearer": []}, {"header": []}]
            refusals = _refusals(path)
            for status in ("401", "403"):
                operation["responses"].setdefault(status, refusals[status])
    return page


def _give_examples(path: str, operation: dict[str, Any], examples_for: tuple[str, LayerSpec] | None) -> None:
    """Declare every parameter of the path, with a served value as its example."""
    values = {"version": VERSION} | ({} if examples_for is None else {"layer": examples_for[0]})
    parameters = operation.setdefault("parameters", [])
    declared = {parameter["name"] for parameter in parameters}
    for name in re.findall(r"{(\w+)}", path):
        if name not in declared:
            parameters.append({"name": name, "in": "path", "required": True, "schema": {"type": "string"}})
    for parameter in parameters:
        if parameter["name"] in values:
            parameter["example"] = values[parameter["name"]]
    if not parameters:
        del operation["parameters"]


def _operations(spec: LayerSpec | None) -> dict[str, dict[str, Any]]:
    """Return the OpenAPI operation of each hot route, with examples for a layer of this spec if there is one."""
    attend = {
        "tags": ["layers"],
        "summary": "Attend: one sequence or a batch through a layer",
        "description": _DESCRIPTION,
        "operationId": "attend",
        **_request("AttendRequest", SAFETENSORS, {} if spec is None else _attend_examples(spec)),
        **_responses(ROUTE, "the layer's answer", "AttendAnswer", SAFETENSORS),
    }
    attention = {
        "tags": ["attention"],
        "summary": "Attention: scaled dot-product attention on your own tensors",
        "description": _ATTENTION_DESCRIPTION,
        "operationId": "attention",
        **_request("AttentionRequest", SAFETENSORS, _attention_examples()),
        **_responses(ATTENTION_ROUTE, "the output and what else was asked for", "AttentionReply", SAFETENSORS),
    }
    infer = {
        "tags": ["open inference protocol"],
        "summary": "Infer: the same layers for the protocol's own clients",
        "description": _INFER_DESCRIPTION,
        "operationId": "infer",
        **_request("InferRequest", OCTET_STREAM, {} if spec is None else _infer_examples(spec)),
        **_responses(INFER_ROUTES[0], "the model's outputs", "InferAnswer", OCTET_STREAM),
    }
    infer_version = infer | {"operationId": "infer_version"}
    return dict(zip((ROUTE, ATTENTION_ROUTE, *INFER_ROUTES), (attend, attention, infer, infer_version), strict=True))


def _request(model: str, binary: bytes, examples: dict[str, Any]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": _content(model, binary, examples)}}


def _responses(route: str, meaning: str, model: str, binary: bytes) -> dict[str, Any]:
    return {"responses": {"200": {"description": meaning, "content": _content(model, binary)}, **_refusals(route)}}


def _content(model: str, binary: bytes, examples: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the two forms of a body: JSON by `model`, with examples if there are any, and the media type `binary`."""
    content: dict[str, Any] = {"schema": {"$ref": _REF.format(model=model)}}
    if examples:
        content["examples"] = examples
    return {
        JSON.decode("ascii"): content,
        binary.decode("ascii"): {"schema": {"type": "string", "format": "binary"}},
    }


def _refusals(path: str) -> dict[str, Any]:
    """Return the error responses of a POST to this path: each status with its error codes."""
    as_inference = is_inference(path)
    table = INFERENCE_STATUS if as_inference else STATUS
    codes = {status: _leaf_codes(status, table) for status in table.values() if status != 405}  # noqa: PLR2004
    words = {status: ", ".join(f"`{code}`" for code in sorted(found)) for status, found in codes.items()}
    answers = problem_responses(words, *sorted(words), as_inference=as_inference)
    return {str(status): answer for status, answer in answers.items()}


def _leaf_codes(status: int, table: Mapping[type[ServiceError], int]) -> set[str]:
    """Return the error codes with `status`: those of the table's classes and, for a branch, of its subclasses."""
    codes: set[str] = set()
    for kind, value in table.items():
        if value == status:
            below = kind.__subclasses__()
            codes |= {leaf.code for leaf in below} or {kind.code}
            if kind.code == "invalid":
                codes.add(kind.code)
    return codes


def _attend_examples(spec: LayerSpec) -> dict[str, Any]:
    query = {name: _rows(3, width) for name, width in _needed(spec)}
    memory = {"key": _rows(4, spec.key_width), "value": _rows(4, spec.value_width)}
    bodies = {
        "self-attention": ("Three tokens attend to each other", query),
        "weights": ("The same, with the weights of head 0", {**query, "weights": {"form": "heads", "heads": [0]}}),
        "causal": ("No looking ahead", {**query, "masks": [{"kind": "causal"}]}),
        "batch": (
            "Two sequences of three tokens, of which the last of the second is padding",
            {
                **{name: [tensor, tensor] for name, tensor in query.items()},
                "masks": [{"kind": "attend", "axes": "bs", "values": [[True, True, True], [True, True, False]]}],
            },
        ),
        "cross-attention": (
            "Three queries over four keys, of which the last is padding; the two strongest keys of each row",
            {
                "query": query["query"],
                **memory,
                "masks": [{"kind": "lengths", "values": 3}],
                "weights": {"form": "top_k", "k": 2},
            },
        ),
    }
    return _examples(bodies)


def _attention_examples() -> dict[str, Any]:
    two = {"query": _rows(3, 4), "key": _rows(5, 4), "value": _rows(5, 2)}
    heads = {"query": [_rows(1, 4)] * 4, "key": [_rows(1, 4)] * 2, "value": [_rows(1, 4)] * 2, "layout": "hld"}
    past = {"past_key": [_rows(3, 4)] * 2, "past_value": [_rows(3, 4)] * 2, "present": True}
    bodies = {
        "plain": ("Three queries over five keys, with the weights", {**two, "weights": {"form": "heads"}}),
        "causal": (
            "No looking ahead, the masked scores and their log-sum-exp",
            {**two, "masks": [{"kind": "causal", "align": "top_left"}], "scores": {"stage": "masked"}, "lse": True},
        ),
        "decode": (
            "One new row of four query heads that share two key and value heads, behind a past of three rows",
            {**heads, **past, "masks": [{"kind": "causal"}]},
        ),
        "packed": (
            "Two heads side by side, with a scale, a softcap and a sink for each head",
            {
                **{name: _rows(3, 4) for name in ("query", "key", "value")},
                "layout": "packed",
                "num_heads": 2,
                "scale": 0.5,
                "softcap": 20.0,
                "sinks": [0.0, 0.5],
            },
        ),
    }
    return _examples(bodies)


def _examples(bodies: Mapping[str, tuple[str, object]]) -> dict[str, Any]:
    return {name: {"summary": summary, "value": body} for name, (summary, body) in bodies.items()}


def _needed(spec: LayerSpec) -> list[tuple[str, int]]:
    """Return the tensors that every request to this layer has, with their widths."""
    every = (
        (True, "query", spec.query_width),
        (spec.needs_key, "key", spec.key_width),
        (spec.needs_value, "value", spec.value_width),
    )
    return [(name, width) for is_needed, name, width in every if is_needed]


def _rows(count: int, width: int) -> list[list[float]]:
    """Return short decimal numbers that differ from row to row."""
    return [[round(((7 * i + 3 * j) % 11 - 5) / 10, 1) for j in range(width)] for i in range(count)]


def _infer_examples(spec: LayerSpec) -> dict[str, Any]:
    inputs = [
        {"name": name, "datatype": "FP32", "shape": [1, 3, width], "data": [_rows(3, width)]}
        for name, width in _needed(spec)
    ]
    bodies = {
        "output": ("Three tokens attend to each other", {"inputs": inputs}),
        "weights": (
            "No looking ahead, and the weights averaged over the heads",
            {"id": "42", "inputs": inputs, "parameters": {"causal": "top_left", "weights": "mean"}},
        ),
        "padding": (
            "The last token is padding",
            {
                "inputs": [*inputs, {"name": "attend_mask", "datatype": "BOOL", "shape": [1, 3], "data": [1, 1, 0]}],
                "parameters": {"attend_mask_axes": "bs"},
            },
        ),
    }
    return _examples(bodies)
