"""ASGI application: joins one service, its routes, the API documents and the outer middleware."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import FastAPI
from opentelemetry.trace import Tracer
from starlette.routing import Route

from service import __version__
from service.api.attend_route import hot_endpoints
from service.api.auth.access import Access, CrossOrigin
from service.api.model_routes import make_models_router
from service.api.openapi.document import write_openapi
from service.api.openapi.pages import RootForBrowsers, make_docs_router
from service.api.outer_middleware import OuterMiddleware, raise_again
from service.api.routes import make_router
from service.attention.engine import Engine, EngineOptions
from service.attention.spec import LayerSpec
from service.http.asgi import Application
from service.limits import cors_origins, hosts, rate_limiter
from service.observability.telemetry import Telemetry
from service.observability.tracing import RequestSpans
from service.settings import Settings
from service.worker.control_channel import ControlChannel
from service.worker.service import Service


def build(
    settings: Settings,
    telemetry: Telemetry,
    channel: ControlChannel,
    leave: Callable[[int, str], None],
    engine: Callable[[EngineOptions], Engine] = Engine,
    tracer: Tracer | None = None,
    restore: Callable[[], bool] = lambda: False,
) -> tuple[OuterMiddleware, Service]:
    """Return the ASGI application and the service behind it.

    `leave` ends the process with an exit code and a reason. `engine` makes the engine; a test's engine may hold or fail.
    With a `tracer`, requests and batches are spans. `restore` makes the missing parts of the run directory again.
    """
    service = Service(settings, telemetry, channel, leave, engine, tracer, restore)
    app, access = _application(service), _access(settings, service)
    endpoints = hot_endpoints(service.layer_requests)
    hot = [Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()]  # called without FastAPI
    app.router.routes.extend(hot)
    telemetry.routes_known([route.path for route in hot])

    def document(examples_for: tuple[str, LayerSpec] | None) -> dict[str, Any]:
        return write_openapi(app, examples_for, access.needs_key)

    if settings.docs:
        app.include_router(make_docs_router(app.title, service.example_layer, document, service.rendering))
        app.router.routes.append(RootForBrowsers())
    # FastAPI builds an included router's routes at its first match, 10 ms each. Match here, before requests wait.
    for route in app.router.routes:
        route.matches({"type": "http", "method": "GET", "path": "/", "root_path": "", "headers": []})
    origins = cors_origins(settings)

    def around(inside: Application) -> Application:
        if origins:
            inside = CrossOrigin(inside, origins)
        return inside if tracer is None else RequestSpans(tracer).around(inside)

    return OuterMiddleware(app, app.router.routes, telemetry, time.monotonic, hot, access, around), service


def _application(service: Service) -> FastAPI:
    """Return FastAPI's application with the routes that `build` does not add; its lifespan starts and stops the service."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        await service.readiness.may_listen()
        yield
        await service.stop()

    app = FastAPI(
        title="attention-service",
        version=__version__,
        summary="Multi-head attention layers of real models: batched, exact, with optional weights",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        lifespan=lifespan,
        redirect_slashes=False,  # a redirect would be built from the caller's Host header
        exception_handlers={Exception: raise_again},
        # `observability/tracing.py` makes the spans. FastAPI sees neither the hot routes nor what is refused before the routing.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.include_router(make_router(service))
    app.include_router(make_models_router(service))
    return app


def _access(settings: Settings, service: Service) -> Access:
    keys = service.keys
    return Access(
        None if keys is None else lambda: keys.ring,
        rate_limiter(settings),
        hosts(settings),
        is_metrics_open=settings.open_metrics,
        are_docs_open=settings.docs,
    )
