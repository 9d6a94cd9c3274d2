"""API pages: /openapi.json, the table of errors, and a Swagger page whose parts this process serves, so it works offline.

Invariants: the page fetches nothing from another host. Each document is made once, in a thread, and served from its bytes.
Documents are never compressed, so one entity tag identifies each.
"""

from __future__ import annotations

import hashlib
import html
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from importlib import resources

import orjson
from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import RedirectResponse, Response
from starlette.routing import Match, Route
from starlette.types import Scope

from service.api.openapi.document import write_openapi
from service.api.outer_middleware import record_of
from service.api.problems import ERRORS_PAGE, error_rows
from service.api.shared_work import Memo
from service.attention.spec import LayerSpec
from service.errors import RouteNotFound
from service.http.request_parser import fields_of

_ASSETS = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css", "favicon.png": "image/png"}
_TAG = re.compile(rb'"[^"]*"')


class Document:
    def __init__(self, content: bytes, media_type: str, headers: Mapping[str, str] | None = None) -> None:
        self._content, self._media_type = content, media_type
        self._etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        self._headers = {"etag": self._etag, **(headers or {})}

    async def answer(self, request: Request) -> Response:
        """Return the document, or a 304 if If-None-Match names its tag, weak or not, or `*` (RFC 9110, section 13.1.2)."""
        known = b",".join(fields_of(request.scope)[b"if-none-match"])
        record_of(request.scope).is_document = True
        if known.strip() == b"*" or self._etag.encode("ascii") in _TAG.findall(known):
            return Response(status_code=304, headers=self._headers)
        return Response(self._content, media_type=self._media_type, headers=self._headers)


def make_docs_router(
    app: FastAPI,
    example_layer: Callable[[], tuple[str, LayerSpec] | None],
    needs_key: Callable[[str], bool],
    thread: Executor,
) -> APIRouter:
    """Return the router; the document of `app` is written in `thread`, anew when the layer of its examples changes."""
    router = APIRouter(include_in_schema=False)
    static = resources.files("fastapi_offline") / "static"
    page = get_swagger_ui_html(
        openapi_url="openapi.json",
        title=app.title,
        swagger_js_url="docs/swagger-ui-bundle.js",
        swagger_css_url="docs/swagger-ui.css",
        swagger_favicon_url="docs/favicon.png",
    )
    router.add_api_route("/docs", Document(bytes(page.body), "text/html").answer)
    router.add_api_route(ERRORS_PAGE, Document(_errors_page().encode(), "text/html").answer)
    schema: Memo[Document] = Memo(thread)
    assets: dict[str, Memo[Document]] = {name: Memo(thread) for name in _ASSETS}

    @router.get("/openapi.json")
    async def openapi_json(request: Request) -> Response:
        layer = example_layer()
        # orjson holds the interpreter for 6 ms if a layer is 4,096 wide; Python's own C encoder would for 50.
        found = await schema.get(
            layer, lambda: Document(orjson.dumps(write_openapi(app, layer, needs_key)), "application/json")
        )
        return await found.answer(request)

    @router.get("/docs/{asset}")
    async def part(request: Request, asset: str) -> Response:
        if asset not in _ASSETS:
            raise RouteNotFound("the page has no file of that name")
        found = await assets[asset].get(asset, lambda: Document((static / asset).read_bytes(), _ASSETS[asset]))
        return await found.answer(request)

    return router


class Root(Route):
    """Leads clients from `/` to a page, relative to it: those that read HTML, or those that do not."""

    def __init__(self, page: str, *, is_for_browsers: bool) -> None:
        super().__init__("/", RedirectResponse(page, headers={"vary": "accept"}), methods=["GET"])
        self._is_for_browsers = is_for_browsers

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches(scope)
        is_taken = match is Match.FULL or scope["method"] == "OPTIONS"  # which the outer middleware answers
        is_browser = any(b"text/html" in value for value in fields_of(scope)[b"accept"])
        return (match, child) if is_taken and is_browser == self._is_for_browsers else (Match.NONE, {})


def _errors_page() -> str:
    """Return the table of errors; a problem's `type` leads to its row."""
    rows = [
        f'<tr id="{row.code}"><td><code>{row.code}</code><td>{row.status}<td>{row.inference_status}'
        f"<td>{html.escape(row.cause)}<td>{html.escape(row.remedy)}"
        for row in error_rows()
    ]
    style = "body{font:16px sans-serif;margin:2em}td,th{padding:.4em;text-align:left;vertical-align:top}:target{background:#ffa}"
    head = "<tr><th>code<th>status<th>under /v2<th>cause<th>remedy"
    return (
        f"<!doctype html><title>Errors</title><style>{style}</style><h1>Errors</h1><table>{head}{''.join(rows)}</table>"
    )
