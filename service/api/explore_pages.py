"""Explorer pages: /explore and the modules, styles and pictures that it loads, under a Content-Security-Policy.

Invariants: the page fetches from its own origin alone and runs no inline script. Only files that the package holds when it is
imported are served, each read once. The browser never sends the address's fragment, which holds the state of the page.
"""

from __future__ import annotations

from concurrent.futures import Executor
from importlib import resources
from pathlib import PurePath

from fastapi import APIRouter, Request
from fastapi.responses import Response

from service.api.openapi.pages import Document
from service.api.shared_work import Memo
from service.errors import RouteNotFound

# No policy for HTML includes forms, frames and bases in `default-src`. Pictures that the page has drawn are data and blobs.
_POLICY = (
    "default-src 'self'; img-src 'self' blob: data:; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
_HEADERS = {"content-security-policy": _POLICY, "referrer-policy": "no-referrer"}
_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_PAGE = "index.html"
_FILES = {
    file.name: (file, _MEDIA_TYPES[PurePath(file.name).suffix])
    for file in (resources.files("service") / "explore").iterdir()
    if PurePath(file.name).suffix in _MEDIA_TYPES
}


def make_explore_router(thread: Executor) -> APIRouter:
    """Return the router; each file is read in `thread` when it is first asked for."""
    router = APIRouter(include_in_schema=False)
    documents: dict[str, Memo[Document]] = {name: Memo(thread) for name in _FILES}

    async def answer(request: Request, name: str) -> Response:
        file, media_type = _FILES[name]
        found = await documents[name].get(name, lambda: Document(file.read_bytes(), media_type, _HEADERS))
        return await found.answer(request)

    @router.get("/explore")
    async def explore(request: Request) -> Response:
        return await answer(request, _PAGE)

    @router.get("/explore/{file}")
    async def explore_file(request: Request, file: str) -> Response:
        if file not in _FILES or file == _PAGE:  # the page's addresses are relative to /explore
            raise RouteNotFound("the explorer has no file of that name")
        return await answer(request, file)

    return router
