"""Routes of the service and its layers: health, readiness, metrics; describing, loading and unloading layers.

Invariants: health describes this process, readiness all processes. Neither waits for the queue, and neither is ever shed. The
answer about a layer contains everything that the bits of its results depend on. A loaded or unloaded layer is a success only
when every process serves the new state; if the client disconnects earlier, the change is withdrawn.
`auth/access.py` has checked the client's role before a route runs.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Coroutine
from concurrent.futures import Executor
from datetime import datetime
from typing import Any, NoReturn, Protocol, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field

from service.api.outer_middleware import LayerTotals
from service.api.problems import problem_responses
from service.api.shared_work import Memo
from service.errors import NotReady
from service.http.asgi import ClientGone, Receive
from service.layers.catalog import Catalog, ServedLayer

R = TypeVar("R")


class LayerLimits(BaseModel):
    """What one request to this layer may have; `body_bytes` holds for the body as sent and decompressed."""

    body_bytes: int = Field(description="bytes of a body")
    sequences: int = Field(description="sequences")
    tokens: int = Field(description="query and key rows")
    cells: int = Field(description="attention scores: B x H x L x S")
    weights_bytes: int = Field(description="bytes of returned weights, scores, lse and entropy")
    table_bytes: int = Field(description="bytes of the tables for masks and weights")
    timeout_ms: int = Field(description="the longest deadline")


class Numerics(BaseModel):
    """Bits are promised on one such fingerprint, not across machines; `least_rows` is of the layer, by its self-check."""

    isa: str = Field(description="widest instruction set that products use, or the GPU")
    torch: str = Field(description="its version")
    threads: int = Field(description="threads of a pass")
    dtype: str = Field(description="that it computes in")
    device: str = Field(description="cpu or cuda")
    least_rows: int = Field(description="of a matrix product: fewer are filled up with zeros")


class Layer(BaseModel):
    """One served layer; widths in features. `batching` is "packed", or "sequential" where the self-check asked for it."""

    name: str = Field(description="as in the path")
    family: str = Field(description="kind of checkpoint that it comes from")
    source: str = Field(description="where it was imported from")
    digest: str = Field(description="sha256 of the tensors and the spec")
    query_width: int = Field(description="features of a query row")
    key_width: int = Field(description="features of a key row")
    value_width: int = Field(description="features of a value row")
    out_width: int = Field(description="features of an output row")
    num_heads: int = Field(description="query heads")
    num_kv_heads: int = Field(description="key and value heads")
    head_width: int = Field(description="features of a head's queries and keys")
    value_head_width: int = Field(description="features of a head's values")
    scale: float = Field(description="factor of query·key")
    biases: list[str] = Field(description="projections with a bias")
    has_output: bool = Field(description="whether it has an output projection")
    extra_keys: int = Field(description="columns that it appends to the keys")
    rotary: dict[str, Any] | None = Field(
        description="rotary positions: layout, width, inverse_frequencies and attention_factor; null: none"
    )
    norm: dict[str, Any] | None = Field(
        description="of query and key: kind, over, eps, plus_one, has_bias and has_head_weights; null: none"
    )
    relative_bias: dict[str, Any] | None = Field(
        description="by distance: buckets, max_distance and is_bidirectional; null: none"
    )
    window: dict[str, Any] | None = Field(
        description="its own mask: the keys to the left and right of a position that it sees; null: all"
    )
    softcap: float | None = Field(description="c: a score s becomes c·tanh(s/c); null: none")
    has_sinks: bool = Field(description="whether each head has a logit in the softmax's denominator only")
    stored_dtype: str = Field(description="of its file")
    batching: str = Field(description="how its batches are computed")
    numerics: Numerics = Field(description="what the bits depend on")
    limits: LayerLimits = Field(description="what one request may have")


class ServedSet(BaseModel):
    """The set whose layers are served, where the service follows ATTENTION_LAYERS_SOURCE; null: not yet, or none."""

    digest: str = Field(description="of the set, as its manifest says")
    source: str = Field(description="address without credentials")
    since: datetime | None = Field(description="when this service began to serve it")
    checked: datetime | None = Field(description="when the source was read last without a fault")
    fault: str | None = Field(description="why the last look at the source changed nothing")


class LayerList(BaseModel):
    layers: list[Layer] = Field(description="by name")
    layer_set: ServedSet | None = Field(None, description="only where the service follows a source of layers")


class Health(BaseModel):
    status: str = Field(description="ok, or ready")


class ServiceView(Protocol):
    """The part of the running service that routes use; `worker/service.py` implements it."""

    rendering: Executor

    @property
    def catalog(self) -> Catalog: ...
    def describe(self, layer: ServedLayer) -> Layer: ...
    def served_set(self, catalog: Catalog) -> ServedSet | None: ...
    def why_not_ready(self) -> str | None: ...
    async def metrics_text(self) -> bytes: ...
    async def layer_totals(self) -> dict[str, LayerTotals]: ...
    async def put_layer(self, name: str) -> tuple[ServedLayer, bool]: ...
    async def drop_layer(self, name: str) -> None: ...


METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_NOT_READY = problem_responses({503: "not ready, draining or down"})
_NO_LAYER = problem_responses({404: "no such layer"}) | _NOT_READY
_PUT = (
    "Loads `<layer>.safetensors` from the layer directory, or replaces the served layer if the file has changed. The layer "
    "is checked with real forward passes before it is served, and the answer is sent when every process serves it: 201 "
    "if it is new, 200 if it was replaced or is served already. Requests that were admitted before are answered by the "
    "version that they were admitted with. If a process cannot load it, none serves it: 503; if the file changed "
    "meanwhile, or another change of the layer came first: 409; the layers served before stay. "
    "One change runs at a time; a second one gets 503 with Retry-After. The request has no body."
)
_DELETE = (
    "Unloads the layer in every process. Requests that were admitted before are answered, later ones get a 404. The file stays "
    "in the layer directory: PUT or a restart of the service loads it again."
)
_NOT_UNLOADED = problem_responses(
    {
        403: "the key is no admin key, or there is no keys file with one",
        409: "no request changes the layers here, because they come from elsewhere",
        404: "the layer directory has no such file, or no layer of that name is served",
        503: "another change is under way, or a process cannot make this one in time: nothing was changed",
    }
)
_NOT_LOADED = _NOT_UNLOADED | problem_responses(
    {
        409: "the file changed while the processes loaded it, another change of the layer came first, or no request changes "
        "the layers here: nothing was changed",
        422: "the file is no valid layer; the detail gives the reason",
    }
)


def check_ready(service: ServiceView) -> None:
    if reason := service.why_not_ready():
        raise NotReady(reason)


def make_operations_router(service: ServiceView) -> APIRouter:
    router = APIRouter(tags=["operations"])

    @router.get("/healthz", summary="The process runs")
    async def healthz() -> Health:
        return Health(status="ok")

    @router.get(
        "/readyz", summary="Every layer has answered a real forward pass lately, in every process", responses=_NOT_READY
    )
    async def readyz() -> Health:
        check_ready(service)
        return Health(status="ready")

    @router.get("/metrics", summary="Prometheus metrics, summed over processes", response_class=Response)
    async def metrics() -> Response:
        return Response(await service.metrics_text(), media_type=METRICS_TYPE)

    return router


def make_layers_router(service: ServiceView) -> APIRouter:
    router = APIRouter(tags=["layers"])
    described: Memo[bytes] = Memo(service.rendering)

    def describe_all(catalog: Catalog) -> bytes:
        texts = (service.describe(layer).model_dump_json().encode() for layer in catalog.layers.values())
        return b'{"layers":[' + b",".join(texts) + b"]}"

    @router.get("/v1/layers", summary="What is served", response_model=LayerList, responses=_NOT_READY)
    async def list_layers() -> Response:
        catalog = service.catalog
        # The reference is weak: a catalog kept here would keep the tensors of unloaded layers.
        content = await described.get(weakref.ref(catalog), lambda: describe_all(catalog))
        if served_set := service.served_set(catalog):  # it changes without the catalog, so it is not kept with it
            content = content[:-1] + b',"layer_set":' + served_set.model_dump_json().encode() + b"}"
        return Response(content, media_type="application/json")

    @router.get("/v1/layers/{layer}", summary="One layer: widths, heads, digest, numerics, limits", responses=_NO_LAYER)
    async def get_layer(layer: str) -> Layer:
        return service.describe(service.catalog.get(layer))

    return router


def make_admin_router(service: ServiceView) -> APIRouter:
    router = APIRouter(tags=["admin"])

    @router.put(
        "/v1/layers/{layer}",
        summary="Load a layer from the layer directory, or replace it",
        description=_PUT,
        responses={201: {"description": "the layer is new", "model": Layer}, **_NOT_LOADED},
    )
    async def put_layer(request: Request, response: Response, layer: str) -> Layer:
        served, is_new = await _unless_disconnected(request.receive, service.put_layer(layer))
        response.status_code = 201 if is_new else 200
        return service.describe(served)

    @router.delete(
        "/v1/layers/{layer}",
        summary="Unload a layer",
        description=_DELETE,
        status_code=204,
        response_class=Response,
        responses=_NOT_UNLOADED,
    )
    async def delete_layer(request: Request, layer: str) -> Response:
        await _unless_disconnected(request.receive, service.drop_layer(layer))
        return Response(status_code=204)

    return router


async def _unless_disconnected(receive: Receive, change: Coroutine[Any, Any, R]) -> R:
    """Return the result of the change; if the client disconnects first, cancel the change and raise ClientGone."""
    task = asyncio.ensure_future(change)
    disconnect = asyncio.ensure_future(_raise_at_disconnect(receive))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        return await (task if task.done() else disconnect)
    finally:
        task.cancel()
        disconnect.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)


async def _raise_at_disconnect(receive: Receive) -> NoReturn:
    """Discard the body; raise ClientGone when the client disconnects, or the error of a malformed body."""
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientGone
