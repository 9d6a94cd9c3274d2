"""Docs: /openapi.json and a Swagger page whose script and style come from this process, so that it works offline.

Law: nothing on the page is fetched from anywhere else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from importlib import resources
from typing import Any

from fastapi import APIRouter, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse, JSONResponse, Response

from service.api.trace import trace_of
from service.errors import RouteNotFound

_ASSETS = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon.png": "image/png",
}


def make_docs_router(title: str, openapi: Callable[[], dict[str, Any]]) -> APIRouter:
    """`openapi` writes the document; it is asked at every request, since its examples follow the catalog."""
    router = APIRouter(include_in_schema=False)
    static = resources.files("fastapi_offline") / "static"

    @router.get("/openapi.json")
    async def document(request: Request) -> JSONResponse:
        trace_of(request.scope).route = "/openapi.json"
        return JSONResponse(openapi())

    @router.get("/docs")
    async def page(request: Request) -> HTMLResponse:
        trace_of(request.scope).route = "/docs"
        return get_swagger_ui_html(
            openapi_url="openapi.json",
            title=title,
            swagger_js_url="docs/swagger-ui-bundle.js",
            swagger_css_url="docs/swagger-ui.css",
            swagger_favicon_url="docs/favicon.png",
        )

    @router.get("/docs/{asset}")
    async def asset(request: Request, asset: str) -> Response:
        trace_of(request.scope).route = "/docs/{asset}"
        if asset not in _ASSETS:
            raise RouteNotFound("the page has no such part")
        content = await asyncio.to_thread((static / asset).read_bytes)
        return Response(content, media_type=_ASSETS[asset])

    return router
