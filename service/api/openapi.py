"""OpenAPI: the page of the whole contract, the hot route included, with examples that run as they stand.

Laws: schemas come from the same pydantic models that check requests; examples fit a layer that is served, so the page is made
anew when the catalog changes; nothing on it needs the network.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from service.api.attend import ROUTE
from service.api.problems import STATUS
from service.attention.spec import LayerSpec
from service.wire.schemas import AttendAnswer, AttendRequest, Problem

_REF = "#/components/schemas/{model}"
_DESCRIPTION = (
    "Sends query, key and value through one multi-head attention layer, batched with whoever else is calling; the bits of the "
    "answer do not depend on them. `query` is `[L, d]` or `[B, L, d]`; `key` defaults to `query`, `value` to `key`. Tensors are "
    "nested lists (float32) or objects with `dtype`, `shape` and `data` (base64 of little-endian bytes, or a flat list).\n\n"
    "Request headers: `X-Request-ID` (taken if sane), `X-Request-Timeout-Ms` (shortens the deadline), "
    "`Content-Encoding: gzip` or `zstd`. Answer headers: `X-Request-ID`, `Server-Timing`."
)


def write_openapi(app: FastAPI, examples_for: tuple[str, LayerSpec] | None) -> dict[str, Any]:
    """The document; `examples_for` is the name and spec of a served layer, None while there is none."""
    page = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
    _, schemas = models_json_schema(
        [(AttendRequest, "validation"), (AttendAnswer, "serialization"), (Problem, "serialization")],
        ref_template=_REF,
    )
    page.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
    page["paths"][ROUTE] = {"post": _attend_operation(examples_for)}
    page["paths"] = dict(sorted(page["paths"].items()))
    for path, operations in page["paths"].items():
        for operation in operations.values():
            # FastAPI announces its own validation errors, which no route of ours can answer with.
            if path != ROUTE:
                operation["responses"].pop("422", None)
            if examples_for is not None:
                _name_layer(operation, examples_for[0])
    for name in ("HTTPValidationError", "ValidationError"):
        page["components"]["schemas"].pop(name, None)
    return page


def _name_layer(operation: dict[str, Any], name: str) -> None:
    for parameter in operation.get("parameters", []):
        if parameter["name"] == "layer":
            parameter["example"] = name


def _attend_operation(examples_for: tuple[str, LayerSpec] | None) -> dict[str, Any]:
    examples = {} if examples_for is None else _examples(examples_for[1])
    body: dict[str, Any] = {"schema": {"$ref": _REF.format(model="AttendRequest")}}
    if examples:
        body["examples"] = examples
    problem = {"application/problem+json": {"schema": {"$ref": _REF.format(model="Problem")}}}
    answer = {"application/json": {"schema": {"$ref": _REF.format(model="AttendAnswer")}}}
    responses: dict[str, Any] = {"200": {"description": "the layer's answer", "content": answer}}
    for status in sorted({status for status in STATUS.values() if status != 405}):  # noqa: PLR2004
        codes = sorted(_leaf_codes(status))
        responses[str(status)] = {"description": ", ".join(f"`{code}`" for code in codes), "content": problem}
    return {
        "tags": ["layers"],
        "summary": "Attend: one sequence or a batch through a layer",
        "description": _DESCRIPTION,
        "operationId": "attend",
        "parameters": [{"name": "layer", "in": "path", "required": True, "schema": {"type": "string"}}],
        "requestBody": {"required": True, "content": {"application/json": body}},
        "responses": responses,
    }


def _leaf_codes(status: int) -> set[str]:
    """The codes that are answered with `status`: the table's classes and, for a branch, all below it."""
    codes: set[str] = set()
    for kind, value in STATUS.items():
        if value == status:
            below = kind.__subclasses__()
            codes |= {leaf.code for leaf in below} or {kind.code}
            if kind.code == "invalid":
                codes.add(kind.code)
    return codes


def _examples(spec: LayerSpec) -> dict[str, Any]:
    """Small bodies that this layer answers with 200 as they stand."""
    rows = _rows(3, spec.query_width)
    query: dict[str, Any] = {"query": rows}
    if spec.key_width != spec.query_width:
        query["key"] = _rows(3, spec.key_width)
    if spec.value_width != (spec.key_width if "key" in query else spec.query_width):
        query["value"] = _rows(3, spec.value_width)
    memory = {"key": _rows(4, spec.key_width), "value": _rows(4, spec.value_width)}
    bodies = {
        "self-attention": ("Three tokens attend to each other", query),
        "weights": ("The same, with the weights of head 0", {**query, "weights": {"form": "heads", "heads": [0]}}),
        "causal": ("No looking ahead", {**query, "masks": [{"kind": "causal"}]}),
        "cross-attention": (
            "Three queries over four keys, of which the last is padding; the two strongest keys of each row",
            {
                "query": rows,
                **memory,
                "masks": [{"kind": "lengths", "values": 3}],
                "weights": {"form": "top_k", "k": 2},
            },
        ),
    }
    return {name: {"summary": summary, "value": body} for name, (summary, body) in bodies.items()}


def _rows(count: int, width: int) -> list[list[float]]:
    """Plain numbers that differ from row to row."""
    return [[round(((7 * i + 3 * j) % 11 - 5) / 10, 1) for j in range(width)] for i in range(count)]
