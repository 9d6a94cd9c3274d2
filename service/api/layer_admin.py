"""Layer administration: the routes that load, replace and unload a layer at run time.

Invariants: a success means that every process serves the new state. If the caller disconnects before its answer, the change is
cancelled. The path names the layer; a request body is discarded, because the layer directory has the file. `auth/access.py`
checks the caller's role before these routes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from service.api.outer_middleware import record_of
from service.api.problems import announced
from service.api.routes import LayerAnswer
from service.http.asgi import ClientGone, Receive
from service.layers.catalog import Catalog, ServedLayer

R = TypeVar("R")

ROUTE = "/v1/layers/{layer}"
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
_WORDS = {
    403: "the key is no admin key, or there is no keys file with one",
    404: "the layer directory has no such file, or no layer of that name is served",
    409: "the file changed while the processes loaded it, or another change of the layer came first: nothing was changed",
    422: "the file is no valid layer; the detail gives the reason",
    503: "another change is under way, or a process could not load the layer: nothing was changed",
}


class AdminView(Protocol):
    """The part of the running service that these routes use; `worker/service.py` implements it."""

    async def put_layer(self, name: str) -> bool: ...

    async def drop_layer(self, name: str) -> None: ...

    @property
    def catalog(self) -> Catalog: ...

    def describe(self, layer: ServedLayer) -> LayerAnswer: ...


def make_admin_router(service: AdminView) -> APIRouter:
    router = APIRouter(tags=["admin"])

    @router.put(
        ROUTE,
        summary="Load a layer from the layer directory, or replace it",
        description=_PUT,
        response_model=LayerAnswer,
        responses={
            201: {"description": "the layer is new", "model": LayerAnswer},
            **announced(_WORDS, 403, 404, 409, 422, 503),
        },
    )
    async def put_layer(request: Request, layer: str) -> JSONResponse:
        record_of(request.scope).route = ROUTE
        is_new = await _stayed(request.receive, service.put_layer(layer))
        return JSONResponse(
            service.describe(service.catalog.get(layer)).model_dump(), status_code=201 if is_new else 200
        )

    @router.delete(
        ROUTE,
        summary="Unload a layer",
        description=_DELETE,
        status_code=204,
        response_class=Response,
        responses=announced(_WORDS, 403, 404, 503),
    )
    async def drop_layer(request: Request, layer: str) -> Response:
        record_of(request.scope).route = ROUTE
        await _stayed(request.receive, service.drop_layer(layer))
        return Response(status_code=204)

    return router


async def _stayed(receive: Receive, change: Coroutine[Any, Any, R]) -> R:
    """Return the result of the change; if the caller disconnects first, cancel the change and raise ClientGone."""
    changing = asyncio.ensure_future(change)
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({changing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not changing.done():
            leaving.result()
        return await changing
    finally:
        changing.cancel()
        leaving.cancel()
        await asyncio.gather(changing, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    """Raise ClientGone when the caller disconnects, or the error of a body that it sends meanwhile."""
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientGone
