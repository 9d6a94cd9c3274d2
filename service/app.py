"""ASGI application: joins one service, its routes, its pages and the outer middleware."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from operator import attrgetter
from pathlib import Path

import torch
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.routing import Route

from service import __version__
from service.api.attend_route import hot_endpoints
from service.api.auth.access import Access, CrossOrigin
from service.api.explore_pages import make_explore_router
from service.api.inference_routes import make_inference_router
from service.api.model_routes import make_models_router, model_endpoints
from service.api.openapi.pages import Root, make_docs_router
from service.api.outer_middleware import OuterMiddleware, raise_again
from service.api.routes import make_admin_router, make_layers_router, make_operations_router
from service.errors import printable
from service.http.asgi import Application
from service.limits import hosts, rate_limiter
from service.observability.logs import configure_logs
from service.observability.metrics import Metrics
from service.observability.telemetry import Telemetry
from service.observability.tracing import RequestSpans
from service.settings import listed, load_settings
from service.worker.local_channel import LocalChannel
from service.worker.service import Service


def create() -> Application:
    """Return the ASGI application of one process for another host, as `uvicorn --factory service.app:create`.

    The environment has its settings. The host needs the lifespan protocol; addresses, TLS, connections and the number of
    processes are its own. A fault ends the process with SIGTERM, so that the host replaces it.
    """
    channel = LocalChannel()

    def leave(_: int) -> None:
        if channel.status.start_error:
            sys.stderr.write(printable(channel.status.start_error) + "\n")
        signal.raise_signal(signal.SIGTERM)

    return build(unsupervised(channel, leave))


def unsupervised(channel: LocalChannel, leave: Callable[[int], None], layers_fixed: str = "") -> Service:
    """Return the service of a process that another host runs; its settings are the environment's, its metrics its own.

    If the channel has peers, the lifespan starts only when the layers are loaded. `leave` and `layers_fixed`: see `Service`.
    """
    settings = load_settings()
    configure_logs(settings.log_level, log_format=settings.log_format, worker=0)
    torch.set_num_threads(settings.compute_threads)
    telemetry = Telemetry(Metrics(Path(os.devnull), 0))
    service = Service(settings, telemetry, channel, leave, layers_fixed=layers_fixed)
    service.readiness.port_opened()
    return service


def build(service: Service) -> OuterMiddleware:
    """Return the ASGI application of a service; with a tracer, requests are spans."""
    settings, keys, app = service.settings, service.keys, _application(service)
    access = Access(
        None if keys is None else lambda: keys.ring,
        rate_limiter(settings),
        hosts(settings),
        is_metrics_open=settings.open_metrics,
        are_docs_open=settings.docs,
        is_explore_open=settings.explore,
        are_layers_fixed=bool(service.layers_fixed),
    )
    endpoints = hot_endpoints(service.shared) | model_endpoints(service.shared, service.models)
    hot = [Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()]  # called without FastAPI
    app.router.routes.extend(hot)
    service.telemetry.routes_known([route.path for route in hot])
    if settings.docs:
        app.include_router(make_docs_router(app, service.example_layer, access.needs_key, service.rendering))
        app.router.routes.append(Root("docs", is_for_browsers=False))
    if settings.explore:
        app.include_router(make_explore_router(service.rendering))
    if settings.explore or settings.docs:
        app.router.routes.append(Root("explore" if settings.explore else "docs", is_for_browsers=True))
    # FastAPI builds an included router's routes at its first match, 10 ms each. Match here, before requests wait.
    for route in app.router.routes:
        route.matches({"type": "http", "method": "GET", "path": "/", "root_path": "", "headers": []})
    origins, tracer = listed(settings.cors_origins), service.telemetry.tracer

    def around(inside: Application) -> Application:
        if origins:
            inside = CrossOrigin(inside, origins)
        return inside if tracer is None else RequestSpans(inside, tracer)

    return OuterMiddleware(app, app.router.routes, service.telemetry, time.monotonic, hot, access, around)


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
        generate_unique_id_function=attrgetter("name"),  # of its function; generated clients have it
        openapi_url=None,  # and so no pages of FastAPI's; `openapi/pages.py` has ours
        lifespan=lifespan,
        redirect_slashes=False,  # a redirect would be built from the caller's Host header
        exception_handlers={Exception: raise_again, HTTPException: raise_again},
        # `observability/tracing.py` makes the spans. FastAPI sees neither the hot routes nor what is refused before the routing.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    for make_router in (make_operations_router, make_layers_router, make_admin_router, make_inference_router):
        app.include_router(make_router(service))
    app.include_router(make_models_router(service.models))
    return app
