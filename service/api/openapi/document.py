"""OpenAPI document: describes the whole contract, hot routes included, with examples that run as they stand.

Invariants: schemas come from the pydantic models that check requests. Examples have the widths of a served layer, so the
document is made anew when the catalog changes. Nothing in it needs the network. Only the hot routes' texts stand here: every
other text stands where its route or its field is declared.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from service.api.attend_route import ATTENTION_ROUTE, INFER_ROUTES, ROUTE
from service.api.openapi.examples import attend_examples, attention_examples, error_answer, infer_examples
from service.api.openapi.headers import describe_headers
from service.api.problems import error_rows, is_inference, problem_responses
from service.api.reply import JSON, OCTET_STREAM, SAFETENSORS
from service.attention.spec import LayerSpec
from service.wire.answer import AttendAnswer, AttentionReply
from service.wire.attend_request import AttendRequest
from service.wire.attention_request import AttentionRequest
from service.wire.inference_schemas import VERSION, InferAnswer, InferenceError, InferRequest
from service.wire.schemas import Problem

_REF = "#/components/schemas/{model}"
_ABOUT = (
    "Choose an example of an operation, press *Try it out* and *Execute*; where keys are set, press *Authorize* first.\n\n"
    "The bits of an answer do not depend on the requests that it was computed with. Attention changes nothing, so it is safe to "
    "repeat. Errors are problem details (RFC 9457) with a stable `code`; on `/v2` they are the protocol's. If you report a "
    "fault, name the `X-Request-ID` of the answer."
)
_CONTACT = {"name": "The maintainers of attention-service"}
_LICENCE = {"name": "Apache License 2.0", "identifier": "Apache-2.0"}
_TAGS = {
    "layers": "Multi-head attention through a stored layer, and what the served layers are.",
    "attention": "Attention on your own query, key and value, without a layer.",
    "admin": "Load and unload layers; it needs a key with the role admin.",
    "operations": "Health, readiness and metrics.",
    "open inference protocol": "The same layers as models of the Open Inference Protocol V2, for its own clients.",
}
_DESCRIPTION = (
    "Sends query, key and value through one multi-head attention layer, batched with other requests; the bits of the "
    "answer do not depend on them. `query` is `[L, d]` or `[B, L, d]`; `key` defaults to `query`, `value` to `key`. Tensors are "
    "nested lists (float32) or objects with `dtype`, `shape` and `data` (base64 of little-endian bytes, or a flat list).\n\n"
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
    "`lengths` (INT64, INT32). Outputs: `output`, and `weights` where asked for.\n\n"
    "The model `sdpa` is attention without a layer: query, key and value are `[B, H, L, d]`, with the further inputs `past_key`, "
    "`past_value` and `sinks`, the parameters `scale`, `softcap`, `scores`, `lse` and `present`, and outputs of those names "
    "(`present_key`, `present_value`)."
)


def write_openapi(
    app: FastAPI, examples_for: tuple[str, LayerSpec] | None, needs_key: Callable[[str], bool]
) -> dict[str, Any]:
    """Return the document; `examples_for`: name and spec of a served layer, None while there is none."""
    page = get_openapi(
        title=app.title,
        version=app.version,
        summary=app.summary,
        description=_ABOUT,
        contact=_CONTACT,
        license_info=_LICENCE,
        tags=[{"name": name, "description": words} for name, words in _TAGS.items()],
        routes=app.routes,
    )
    page.setdefault("components", {}).setdefault("schemas", {}).update(_schemas())
    page["components"]["responses"] = _error_answers("v1") | _error_answers("v2")
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
    if any(map(needs_key, page["paths"])):
        _announce_keys(page, needs_key)
    describe_headers(page)
    return page


def _schemas() -> dict[str, Any]:
    """Return the schemas of the hot routes' bodies; FastAPI has those of the others."""
    _, schemas = models_json_schema(
        [(model, "validation") for model in (AttendRequest, AttentionRequest, InferRequest)]
        + [(model, "serialization") for model in (AttendAnswer, AttentionReply, Problem, InferAnswer, InferenceError)],
        ref_template=_REF,
    )
    found: dict[str, Any] = schemas["$defs"]
    return found


def _announce_keys(page: dict[str, Any], needs_key: Callable[[str], bool]) -> None:
    """Add the key schemes to the page and to every operation that needs a key."""
    page["components"]["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer", "description": "a key of the keys file"},
        "header": {"type": "apiKey", "in": "header", "name": "X-API-Key", "description": "the same, without `Bearer`"},
    }
    for path, operations in page["paths"].items():
        for operation in operations.values() if needs_key(path) else ():
            operation["security"] = [{"bearer": []}, {"header": []}]
            refusals = _refusals(path)
            for status in ("401", "403"):
                operation["responses"].setdefault(status, refusals[status])


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


def _operations(spec: LayerSpec | None) -> dict[str, dict[str, Any]]:
    """Return the OpenAPI operation of each hot route, with examples for a layer of this spec if there is one."""
    attend = {
        "tags": ["layers"],
        "summary": "Attend: one sequence or a batch through a layer",
        "description": _DESCRIPTION,
        "operationId": "attend",
        **_request("AttendRequest", SAFETENSORS, {} if spec is None else attend_examples(spec)),
        **_responses(ROUTE, "the layer's answer", "AttendAnswer", SAFETENSORS),
    }
    attention = {
        "tags": ["attention"],
        "summary": "Attention: scaled dot-product attention on your own tensors",
        "description": _ATTENTION_DESCRIPTION,
        "operationId": "attention",
        **_request("AttentionRequest", SAFETENSORS, attention_examples()),
        **_responses(ATTENTION_ROUTE, "the output and what else was asked for", "AttentionReply", SAFETENSORS),
    }
    infer = {
        "tags": ["open inference protocol"],
        "summary": "Infer: the same layers for the protocol's own clients",
        "description": _INFER_DESCRIPTION,
        "operationId": "infer",
        **_request("InferRequest", OCTET_STREAM, {} if spec is None else infer_examples(spec)),
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
    """Return the error responses of a POST to this path, as references to the answers below."""
    version = "v2" if is_inference(path) else "v1"
    return {name.partition("_")[2]: {"$ref": f"#/components/responses/{name}"} for name in _error_answers(version)}


@functools.cache
def _error_answers(version: str) -> dict[str, Any]:
    """Return the error answers of a version by version and status: each with its codes and a document of each code."""
    as_inference = version == "v2"
    examples: dict[int, dict[str, Any]] = {}
    for row in sorted(error_rows()):
        if row.status != HTTPStatus.METHOD_NOT_ALLOWED:
            of_status = examples.setdefault(row.inference_status if as_inference else row.status, {})
            of_status[row.code] = error_answer(row, as_inference=as_inference)
    words = {status: ", ".join(f"`{code}`" for code in found) for status, found in sorted(examples.items())}
    answers = problem_responses(words, *words, as_inference=as_inference)
    for status, answer in answers.items():
        (media,) = answer["content"]
        answer["content"] = {media: answer["content"][media] | {"examples": examples[int(status)]}}
    return {f"{version}_{status}": answer for status, answer in answers.items()}
