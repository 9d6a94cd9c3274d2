"""OpenAPI document: describes the whole contract, hot routes included, with examples that run as they stand.

Invariants: schemas come from the pydantic models that check requests. Examples fit a served layer, so the document is made anew
when the catalog changes. Nothing in it needs the network.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from service.api.attend_route import ATTENTION_ROUTE, INFER_ROUTES, ROUTE
from service.api.openapi.examples import attend_examples, attention_examples, infer_examples
from service.api.problems import INFERENCE_STATUS, STATUS, announced, is_inference
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
    spec = None if examples_for is None else examples_for[1]
    ours = {ROUTE: _attend_operation(spec), ATTENTION_ROUTE: _attention_operation()}
    ours |= {route: _infer_operation(route, {} if spec is None else infer_examples(spec)) for route in INFER_ROUTES}
    page["paths"] |= {path: {"post": operation} for path, operation in ours.items()}
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


def _attend_operation(spec: LayerSpec | None) -> dict[str, Any]:
    examples = {} if spec is None else attend_examples(spec)
    binary = {_name(SAFETENSORS): {"schema": {"type": "string", "format": "binary"}}}
    return {
        "tags": ["layers"],
        "summary": "Attend: one sequence or a batch through a layer",
        "description": _DESCRIPTION,
        "operationId": "attend",
        "requestBody": {"required": True, "content": _json_content("AttendRequest", examples) | binary},
        "responses": {
            "200": {"description": "the layer's answer", "content": _json_content("AttendAnswer") | binary},
            **_refusals(ROUTE),
        },
    }


def _attention_operation() -> dict[str, Any]:
    binary = {_name(SAFETENSORS): {"schema": {"type": "string", "format": "binary"}}}
    return {
        "tags": ["attention"],
        "summary": "Attention: scaled dot-product attention on your own tensors",
        "description": _ATTENTION_DESCRIPTION,
        "operationId": "attention",
        "requestBody": {"required": True, "content": _json_content("AttentionRequest", attention_examples()) | binary},
        "responses": {
            "200": {
                "description": "the output and what else was asked for",
                "content": _json_content("AttentionReply") | binary,
            },
            **_refusals(ATTENTION_ROUTE),
        },
    }


def _infer_operation(route: str, examples: dict[str, Any]) -> dict[str, Any]:
    binary = {_name(OCTET_STREAM): {"schema": {"type": "string", "format": "binary"}}}
    return {
        "tags": ["open inference protocol"],
        "summary": "Infer: the same layers for the protocol's own clients",
        "description": _INFER_DESCRIPTION,
        "operationId": "infer" if route == INFER_ROUTES[0] else "infer_version",
        "requestBody": {"required": True, "content": _json_content("InferRequest", examples) | binary},
        "responses": {
            "200": {"description": "the model's outputs", "content": _json_content("InferAnswer") | binary},
            **_refusals(route),
        },
    }


def _name(media_type: bytes) -> str:
    return media_type.decode("ascii")


def _json_content(model: str, examples: dict[str, Any] | None = None) -> dict[str, Any]:
    content: dict[str, Any] = {"schema": {"$ref": _REF.format(model=model)}}
    if examples:
        content["examples"] = examples
    return {_name(JSON): content}


def _refusals(path: str) -> dict[str, Any]:
    """Return the error responses of a POST to this path: each status with its error codes."""
    as_inference = is_inference(path)
    table = INFERENCE_STATUS if as_inference else STATUS
    codes = {status: _leaf_codes(status, table) for status in table.values() if status != 405}  # noqa: PLR2004
    words = {status: ", ".join(f"`{code}`" for code in sorted(found)) for status, found in codes.items()}
    answers = announced(words, *sorted(words), as_inference=as_inference)
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
