"""GET routes: health, readiness, metrics and the descriptions of the served layers.

Invariants: health describes this process, readiness all processes. Neither waits for the queue, and neither is ever shed. The
answer about a layer contains everything that the bits of its results depend on.
"""

from __future__ import annotations

import weakref
from concurrent.futures import Executor
from typing import Protocol

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from service.api.outer_middleware import record_of
from service.api.problems import announced
from service.api.shared_work import Memo
from service.errors import NotReady
from service.layers.catalog import Catalog, ServedLayer


class LayerLimits(BaseModel):
    """What one request to this layer may have; `body_bytes` holds for the body as sent and decompressed."""

    body_bytes: int
    sequences: int
    tokens: int
    cells: int
    weights_bytes: int
    table_bytes: int
    timeout_ms: int


class NumericsAnswer(BaseModel):
    """Bits are promised on one such fingerprint, not across machines."""

    isa: str
    torch: str
    threads: int
    dtype: str
    device: str


class LayerAnswer(BaseModel):
    """One served layer; widths in features. `batching` is "packed", or "sequential" where the self-check asked for it."""

    name: str
    family: str
    source: str
    digest: str
    query_width: int
    key_width: int
    value_width: int
    out_width: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    value_head_width: int
    scale: float
    biases: list[str]
    has_output: bool
    extra_keys: int
    stored_dtype: str
    batching: str
    numerics: NumericsAnswer
    limits: LayerLimits


class LayersAnswer(BaseModel):
    layers: list[LayerAnswer]


class HealthAnswer(BaseModel):
    status: str


class ServiceView(Protocol):
    """The part of the running service that the GET routes use; `worker/service.py` implements it."""

    rendering: Executor

    @property
    def catalog(self) -> Catalog: ...

    def describe(self, layer: ServedLayer) -> LayerAnswer: ...

    def why_not_ready(self) -> str | None: ...

    async def metrics_text(self) -> bytes: ...


METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_WORDS = {404: "no such layer", 503: "not ready, draining or down"}


def make_router(service: ServiceView) -> APIRouter:
    router = APIRouter()
    _add_operations(router, service)
    _add_layers(router, service)
    return router


def _add_operations(router: APIRouter, service: ServiceView) -> None:
    @router.get("/healthz", summary="The process runs", response_model=HealthAnswer, tags=["operations"])
    async def healthz(request: Request) -> JSONResponse:
        record_of(request.scope).route = "/healthz"
        return JSONResponse({"status": "ok"})

    @router.get(
        "/readyz",
        summary="Every layer has answered a real forward pass lately, in every process",
        response_model=HealthAnswer,
        responses=announced(_WORDS, 503),
        tags=["operations"],
    )
    async def readyz(request: Request) -> JSONResponse:
        record_of(request.scope).route = "/readyz"
        if reason := service.why_not_ready():
            raise NotReady(reason)
        return JSONResponse({"status": "ready"})

    @router.get(
        "/metrics", summary="Prometheus metrics, summed over processes", response_class=Response, tags=["operations"]
    )
    async def metrics(request: Request) -> Response:
        record_of(request.scope).route = "/metrics"
        return Response(await service.metrics_text(), media_type=METRICS_TYPE)


def _add_layers(router: APIRouter, service: ServiceView) -> None:
    described: Memo[bytes] = Memo(service.rendering)

    def describe_all(catalog: Catalog) -> bytes:
        texts = (service.describe(layer).model_dump_json().encode() for layer in catalog.layers.values())
        return b'{"layers":[' + b",".join(texts) + b"]}"

    @router.get(
        "/v1/layers",
        summary="What is served",
        response_model=LayersAnswer,
        responses=announced(_WORDS, 503),
        tags=["layers"],
    )
    async def list_layers(request: Request) -> Response:
        record_of(request.scope).route = "/v1/layers"
        catalog = service.catalog
        # The reference is weak: a catalog kept here would keep the tensors of unloaded layers.
        content = await described.get(weakref.ref(catalog), lambda: describe_all(catalog))
        return Response(content, media_type="application/json")

    @router.get(
        "/v1/layers/{layer}",
        summary="One layer: widths, heads, digest, numerics, limits",
        response_model=LayerAnswer,
        responses=announced(_WORDS, 404, 503),
        tags=["layers"],
    )
    async def get_layer(request: Request, layer: str) -> JSONResponse:
        record_of(request.scope).route = "/v1/layers/{layer}"
        return JSONResponse(service.describe(service.catalog.get(layer)).model_dump())
