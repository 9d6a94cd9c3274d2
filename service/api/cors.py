"""CORS: which pages of other origins may read the answers, by Starlette's rules.

Invariants: this runs inside the outer middleware, which counts every request. An allowed preflight is answered without a key,
because browsers send none with it. Any other preflight is an ordinary OPTIONS request, so that every refusal has this service's
one form. Refusals carry the CORS headers too, or a page could not read them. Cookies play no part: keys come in headers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware

from service.http.asgi import Application, Receive, Scope, Send

METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE")
REQUEST_HEADERS = (
    "Accept",
    "Authorization",
    "Content-Encoding",
    "Content-Type",
    "Inference-Header-Content-Length",
    "X-API-Key",
    "X-Request-ID",
    "X-Request-Timeout-Ms",
    "traceparent",
    "tracestate",
)
EXPOSED = ("X-Request-ID", "Server-Timing", "Retry-After", "Inference-Header-Content-Length", "WWW-Authenticate")
MAX_AGE_S = 600


def cross_origin(origins: Sequence[str]) -> Callable[[Application], Application]:
    """Return a wrapper that adds CORS for these origins (`*`: any); without origins it leaves the application unchanged."""

    def wrap(application: Application) -> Application:
        return CrossOrigin(application, origins) if origins else application

    return wrap


class CrossOrigin:
    def __init__(self, application: Application, origins: Sequence[str]) -> None:
        self._application = application
        self._rules = CORSMiddleware(
            application,
            allow_origins=origins,
            allow_methods=METHODS,
            allow_headers=REQUEST_HEADERS,
            expose_headers=EXPOSED,
            max_age=MAX_AGE_S,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if scope["method"] == "OPTIONS" and "origin" in headers and "access-control-request-method" in headers:
            answer = self._rules.preflight_response(headers)
            if answer.status_code == HTTPStatus.OK:
                await answer(scope, receive, send)
            else:
                await self._application(scope, receive, send)
        else:
            await self._rules.simple_response(scope, receive, send, request_headers=headers)
