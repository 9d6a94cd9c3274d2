"""OpenAPI document: describes the whole contract, hot routes included, with examples that run as they stand.

Invariants: schemas come from the pydantic models that check requests. Examples have the widths of a served layer, so the
document is made anew when the catalog changes. Nothing in it needs the network. Accept, Authorization and Content-Type are no
parameters, because OpenAPI ignores such: they are media types and security schemes. No parameter of a header has a default or an
example, or the page would send it with every request.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from service.api.attend_route import ATTENTION_ROUTE, BODY_CODINGS, INFER_CODINGS, INFER_ROUTES, ROUTE
from service.api.model_routes import MODEL_ROUTES
from service.api.openapi.examples import (
    MODEL,
    attend_examples,
    attention_examples,
    error_examples,
    infer_examples,
    model_examples,
    states_examples,
)
from service.api.problems import is_inference, problem_responses
from service.api.reply import JSON, OCTET_STREAM, SAFETENSORS
from service.attention.spec import LayerSpec
from service.wire.answer import Answer, AttentionAnswer
from service.wire.attend_request import AttendRequest
from service.wire.attention_request import AttentionRequest
from service.wire.inference_codec import VERSION, InferAnswer, InferenceError, InferRequest
from service.wire.model_request import ModelAnswer, ModelAttendRequest, StatesAnswer, StatesRequest
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
_KEY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "a key of the keys file"},
    "header": {"type": "apiKey", "in": "header", "name": "X-API-Key", "description": "the same, without `Bearer`"},
}
_TAGS = {
    "layers": "Multi-head attention through a stored layer, and what the served layers are.",
    "models": "Text in, attention and hidden states out: encoders of the BERT family over the served layers.",
    "attention": "Attention on your own query, key and value, without a layer.",
    "admin": "Load and unload layers; it needs a key with the role admin.",
    "operations": "Health, readiness and metrics.",
    "open inference protocol": "The same layers as models of the Open Inference Protocol V2, for its own clients.",
}
_DESCRIPTION = (
    "Sends query, key and value through one multi-head attention layer, batched with other requests; the bits of the "
    "answer do not depend on them. `query` is `[L, d]` or `[B, L, d]`; `key` defaults to `query`, `value` to `key`. Tensors are "
    "nested lists (float32) or objects with `dtype`, `shape` and `data` (base64 of little-endian bytes, or a flat list). The "
    "output has the dtype of the query. Weights are float32, or float64 of a float64 query, which computes in float64.\n\n"
    "A layer that uses positions takes `positions` and `key_positions`: whole numbers, 0, 1, … by default; if keys and rows "
    "differ in number they are required. Its own window applies unless `layer_masks` is `none`. With `present` the answer has "
    "the keys and values as a later request takes them: `past_key` and `past_value`.\n\n"
    "Binary form: one safetensors file with the tensors `query`, `key`, `value`, `positions`, `key_positions`, `past_key`, "
    "`past_value`, `masks.<i>.values`; its metadata has one key, `request`: the JSON of the other fields. The answer is then "
    "safetensors too (`output`, `weights` …, the other fields in the metadata's `response`), with the same bits. `Accept` "
    "requests the other form."
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
    "a row sum to less than 1. float64 computes in float64, every other dtype in float32; the output has the query's "
    "dtype, and weights, scores, lse and entropy are float32, or float64 of a float64 query.\n\n"
    "Masks, weights, headers and the safetensors form are those of a layer's attend route."
)
_INFER_DESCRIPTION = (
    "The Open Inference Protocol V2 with its binary tensor extension. A layer is a model, its version is 1. Inputs: `query`, "
    "`key`, `value` (`[B, L, d]`; FP32, FP64, and FP16, BF16 as bytes), `attend_mask`, `ignore_mask` (BOOL), `bias` (floats), "
    "`lengths` (INT64, INT32), `positions` `[B, L]` and `key_positions` `[B, S]` (INT64, INT32), `past_key` and `past_value` "
    "(`[B, Hkv, P, d]`). Outputs: `output`, and `weights`, `scores`, `lse`, `entropy`, `present_key` and `present_value` where "
    "asked for.\n\n"
    "The model `sdpa` is attention without a layer: query, key and value are `[B, H, L, d]`, without positions, with the further "
    "input `sinks` and the parameters `scale` and `softcap`."
)
_MODEL_DESCRIPTION = (
    "Attention of one layer on a text, or on a pair of texts: the layer attends on the hidden states that the unmasked model has "
    "in front of it. Instead of text, `tokens` are strings of the vocabulary, to which nothing is added. Masks, weights and the "
    "other fields mean what they mean on the layer's own route, with as many query rows and keys as tokens, and so does the "
    "answer, which also has the `tokens`. The first request reads and checks the model, which takes seconds.\n\n"
    "The answer is JSON, or safetensors if `Accept` requests it. Output and states are float32. The text is never logged."
)
_STATES_DESCRIPTION = (
    "The hidden states of a text: state n is in front of layer n, and the last is behind the last layer. As the `query` of a "
    "layer's own route they give the bits that the model's attend route gives. The answer is JSON, or safetensors if `Accept` "
    "requests it."
)
_REQUESTS: tuple[type[BaseModel], ...] = (
    AttendRequest,
    AttentionRequest,
    InferRequest,
    ModelAttendRequest,
    StatesRequest,
)
_ANSWERS: tuple[type[BaseModel], ...] = (
    Answer,
    AttentionAnswer,
    InferAnswer,
    ModelAnswer,
    StatesAnswer,
    Problem,
    InferenceError,
)
_HOT = (ROUTE, ATTENTION_ROUTE, *INFER_ROUTES, *MODEL_ROUTES)
_TEXT, _COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}
_ANY = ("X-Request-ID", "traceparent", "tracestate")
_FRAMED = "Inference-Header-Content-Length"
_ID = "in the answer and the log if it is 1 to 128 of A-Z a-z 0-9 . _ : / + = @ -; default: made"
_DEADLINE = "shortens the deadline, which begins when the body is complete; default: ATTENTION_REQUEST_TIMEOUT_MS"
_CODING = "of the body; default: none"
_REQUEST_HEADERS: dict[str, tuple[str, dict[str, Any]]] = {
    "X-Request-ID": (_ID, _TEXT),
    "traceparent": ("W3C trace context, continued where ATTENTION_TRACES is on; default: a new trace", _TEXT),
    "tracestate": ("of the same trace; default: none", _TEXT),
    "X-Request-Timeout-Ms": (_DEADLINE, {"type": "integer", "minimum": 1}),
    "Accept-Encoding": ("content codings of the answer; default: identity; several are an offer, not a request", _TEXT),
    _FRAMED: ("bytes of the JSON, where the bytes of tensors follow it; default: all is JSON", _COUNT),
    "Content-Encoding-v1": (_CODING, {"type": "string", "enum": [*map(bytes.decode, BODY_CODINGS)]}),
    "Content-Encoding-v2": (_CODING, {"type": "string", "enum": [*map(bytes.decode, INFER_CODINGS)]}),
}
_ANSWER_HEADERS: dict[str, tuple[str, dict[str, Any]]] = {
    "X-Request-ID": ("that of the request, or a made one; name it when you report a fault", _TEXT),
    "Server": ("attention-service/ and its major version, by which the Python client warns of another", _TEXT),
    "Cache-Control": ("no-store: an answer is about the client's own tensors", _TEXT),
    "Server-Timing": ("decode, queue, compute and total, in milliseconds", _TEXT),
    "Content-Encoding": ("the coding of the answer, if it was requested and is worth it", _TEXT),
    "Retry-After": ("whole seconds after which to send the request again", _COUNT),
    "WWW-Authenticate": ("Bearer", _TEXT),
    _FRAMED: ("bytes of the JSON, where the bytes of tensors follow it", _COUNT),
}
_OF_STATUS = {"401": ("WWW-Authenticate",), "409": ("Retry-After",), "429": ("Retry-After",), "503": ("Retry-After",)}
_PARAMETERS = {
    name: {"name": name.removesuffix("-v1").removesuffix("-v2"), "in": "header", "description": words, "schema": schema}
    for name, (words, schema) in _REQUEST_HEADERS.items()
}
_HEADERS = {name: {"description": words, "schema": schema} for name, (words, schema) in _ANSWER_HEADERS.items()}


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
    # FastAPI has the schemas of all bodies but those of the hot routes.
    _, hot_schemas = models_json_schema([(model, "validation") for model in _REQUESTS + _ANSWERS], ref_template=_REF)
    layer, spec = examples_for or (None, None)
    page["paths"] = paths = dict(sorted((page["paths"] | _hot_paths(spec)).items()))
    page["components"] = {
        "schemas": page["components"]["schemas"] | hot_schemas["$defs"],
        "responses": _error_answers("v1") | _error_answers("v2"),
        "parameters": _PARAMETERS,
        "headers": _HEADERS,
    }
    for name in ("HTTPValidationError", "ValidationError"):
        page["components"]["schemas"].pop(name, None)
    for schema in page["components"]["schemas"].values():
        for field in schema.get("properties", {}).values():
            field.pop("default", None)  # openapi-typescript requires a field that has one; the description tells it
    if any(map(needs_key, paths)):
        page["components"]["securitySchemes"] = _KEY_SCHEMES
    for path, operations in paths.items():
        for operation in operations.values():
            _complete(operation, path, layer, needs_key=needs_key(path))
    return page


def _complete(operation: dict[str, Any], path: str, layer: str | None, *, needs_key: bool) -> None:
    """Declare the headers of an operation, the parameters of its path with served values as examples, and its need of a key."""
    parameters = {parameter["name"]: parameter for parameter in operation.get("parameters", [])}
    for name in re.findall(r"{(\w+)}", path):
        parameters.setdefault(name, {"name": name, "in": "path", "required": True, "schema": {"type": "string"}})
        if example := {"version": VERSION, "layer": layer, "model": MODEL}.get(name):
            parameters[name]["example"] = example
    operation["parameters"] = [*parameters.values(), *_headers_read(path)]
    responses = operation["responses"]
    # FastAPI announces its own validation errors, which no route of ours returns.
    if "HTTPValidationError" in str(responses.get("422")):
        del responses["422"]
    for status, answer in responses.items():
        if "$ref" not in answer:
            answer["headers"] = _headers_sent(path, status)
    if needs_key:
        operation["security"] = [{name: []} for name in _KEY_SCHEMES]
    version = "v2" if is_inference(path) else "v1"
    for name in _error_answers(version):
        status = name.removeprefix(f"{version}_")
        if path in _HOT or (needs_key and status in ("401", "403")):
            responses.setdefault(status, {"$ref": f"#/components/responses/{name}"})


def _hot_paths(spec: LayerSpec | None) -> dict[str, dict[str, Any]]:
    """Return the operation of each hot route by its path, with examples for a layer of this spec if there is one."""
    for_layer, for_model = (attend_examples(spec), infer_examples(spec)) if spec is not None else (None, None)
    attend = {
        "tags": ["layers"],
        "summary": "Attend: one sequence or a batch through a layer",
        "description": _DESCRIPTION,
        "operationId": "attend",
        "requestBody": {"required": True, "content": _content("AttendRequest", SAFETENSORS, for_layer)},
        "responses": _success("the layer's answer", "Answer", SAFETENSORS),
    }
    attention = {
        "tags": ["attention"],
        "summary": "Attention: scaled dot-product attention on your own tensors",
        "description": _ATTENTION_DESCRIPTION,
        "operationId": "attention",
        "requestBody": {"required": True, "content": _content("AttentionRequest", SAFETENSORS, attention_examples())},
        "responses": _success("the output and what else was asked for", "AttentionAnswer", SAFETENSORS),
    }
    infer = {
        "tags": ["open inference protocol"],
        "summary": "Infer: the same layers for the protocol's own clients",
        "description": _INFER_DESCRIPTION,
        "operationId": "infer",
        "requestBody": {"required": True, "content": _content("InferRequest", OCTET_STREAM, for_model)},
        "responses": _success("the model's outputs", "InferAnswer", OCTET_STREAM),
    }
    operations = (attend, attention, infer, infer | {"operationId": "infer_version"}, *_model_operations())
    return {path: {"post": operation} for path, operation in zip(_HOT, operations, strict=True)}


def _model_operations() -> Iterator[dict[str, Any]]:
    """Yield the operations of models' hot routes; their bodies are JSON only."""
    for name, summary, words, asked, answer, examples in (
        ("attend_text", "Attend to a text: one layer of a model", _MODEL_DESCRIPTION, "ModelAttendRequest", "ModelAnswer",
         model_examples()),
        ("states", "Hidden states of a text", _STATES_DESCRIPTION, "StatesRequest", "StatesAnswer", states_examples()),
    ):  # fmt: skip
        as_json = {"schema": {"$ref": _REF.format(model=asked)}, "examples": examples}
        yield {
            "tags": ["models"],
            "summary": summary,
            "description": words,
            "operationId": name,
            "requestBody": {"required": True, "content": {JSON.decode("ascii"): as_json}},
            "responses": _success("the model's answer", answer, SAFETENSORS),
        }


def _success(meaning: str, model: str, binary: bytes) -> dict[str, Any]:
    return {"200": {"description": meaning, "content": _content(model, binary)}}


def _content(model: str, binary: bytes, examples: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the two forms of a body: JSON by `model`, and the media type `binary`."""
    as_json: dict[str, Any] = {"schema": {"$ref": _REF.format(model=model)}}
    if examples:
        as_json["examples"] = examples
    return {JSON.decode("ascii"): as_json, binary.decode("ascii"): {"schema": {"type": "string", "format": "binary"}}}


@functools.cache
def _error_answers(version: str) -> dict[str, Any]:
    """Return the error answers to a POST by version and status: each with its codes and a document of each code."""
    as_inference, answers = version == "v2", {}
    for status, found in sorted(error_examples(as_inference=as_inference).items()):
        words = ", ".join(f"`{code}`" for code in found)
        answer = problem_responses({status: words}, as_inference=as_inference)[status]
        (content,) = answer["content"].values()
        content["examples"] = found
        answers[f"{version}_{status}"] = answer | {"headers": _headers_sent("", str(status))}
    return answers


def _headers_read(path: str) -> list[dict[str, str]]:
    """Return the headers that a request to this path may have, as references to _PARAMETERS."""
    names = list(_ANY)
    if path in _HOT:
        version, framed = ("v2", [_FRAMED]) if is_inference(path) else ("v1", [])
        names = ["X-Request-Timeout-Ms", f"Content-Encoding-{version}", "Accept-Encoding", *framed, *names]
    return [{"$ref": f"#/components/parameters/{name}"} for name in names]


def _headers_sent(path: str, status: str) -> dict[str, dict[str, str]]:
    """Return the headers of an answer, as references to _HEADERS; `path` may be empty for errors."""
    names = ["X-Request-ID", "Server", "Cache-Control", *_OF_STATUS.get(status, ())]
    if path in _HOT and status == "200":
        names += ["Server-Timing", "Content-Encoding", *([_FRAMED] if is_inference(path) else ())]
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}
