"""App: the only place that builds and wires; the running service from its first task to its last.

Laws: layers are loaded while the process listens already; a layer is served only when the engine has checked it with real forward
passes; readiness follows what the layers answered lately, never a flag alone; shutdown settles everything that was accepted.
One task beside the batcher's: it loads, then beats (the named exception of `docs/decisions.md`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import time
from collections.abc import AsyncIterator, Callable

import torch
from fastapi import FastAPI
from starlette.routing import Route

from service import __version__
from service.api.attend import ROUTE, Attend
from service.api.docs import make_docs_router
from service.api.edge import EXCEPTION_HANDLERS, Edge
from service.api.infer import ROUTES as INFER_ROUTES
from service.api.infer import Infer
from service.api.models import make_models_router
from service.api.openapi import write_openapi
from service.api.reception import Reception
from service.api.routes import LayerAnswer, LayerLimits, NumericsAnswer, make_router
from service.attention.call import Answer, Call
from service.attention.engine import Engine, EngineOptions, pick_device
from service.attention.numerics import fingerprint
from service.attention.resident import Work
from service.attention.spec import LayerSpec
from service.batching.batcher import Batcher
from service.batching.clock import LoopClock
from service.batching.job import Cost
from service.errors import LayerError, NotReady, ServiceError
from service.heartbeat import Board, State
from service.layers.catalog import Catalog, ServedLayer, load_all
from service.layers.store import Store
from service.limits import batch_limits, exchange_limits, queue_limits
from service.metrics import LayerTotals
from service.settings import Settings
from service.supervisor import EXIT_FAILED, EXIT_REFUSED
from service.telemetry import PROBE, Telemetry
from service.wire.decoding_thread import DecodingThread

# A layer whose probes have failed for this many probe intervals is no longer called ready.
STALE_INTERVALS = 3


class Service:
    """One process's engine, waiting room and library; made inside the event loop it runs on."""

    def __init__(
        self,
        settings: Settings,
        telemetry: Telemetry,
        board: Board,
        leave: Callable[[int, str], None],
        engine: Callable[[EngineOptions], Engine] = Engine,
    ) -> None:
        self._settings = settings
        self._telemetry = telemetry
        self._board = board
        self._leave = leave
        device = pick_device(settings.device)
        dtype: torch.dtype = getattr(torch, settings.dtype)
        self.engine = engine(EngineOptions(device, dtype, settings.compute_threads, exact=settings.exact))
        self.batcher: Batcher[Work, Answer] = Batcher(
            self.engine, batch_limits(settings), queue_limits(settings), LoopClock(), telemetry
        )
        self.decoding = DecodingThread()
        self.reception = Reception(
            lambda: self.catalog, self.batcher, self.decoding, exchange_limits(settings), time.monotonic
        )
        self.numerics = fingerprint(device, dtype, settings.compute_threads)
        self._catalog: Catalog | None = None
        self._reason: str | None = "layers are being loaded"
        self._life: asyncio.Task[None] | None = None
        telemetry.built(self.numerics)

    @property
    def catalog(self) -> Catalog:
        """The served layers; raises NotReady until all are loaded and checked."""
        if self._catalog is None:
            raise NotReady(self._reason or "layers are being loaded", retry_after_s=1)
        return self._catalog

    def start(self) -> None:
        self.batcher.start()
        self._life = asyncio.get_running_loop().create_task(self._live(), name="life")
        self._life.add_done_callback(self._life_ended)

    def begin_drain(self) -> None:
        """Readiness says no at once; requests are still served until the listener closes."""
        self._reason = "draining"
        self._beat()

    def stop_admitting(self) -> None:
        """The listener closes: what has come in goes on to its answer, nothing new is taken."""
        self.reception.close()

    def settle(self) -> None:
        """The grace is over: whoever still waits is told so now."""
        self.batcher.give_up()

    async def stop(self) -> None:
        """Ends the tasks and the compute thread; whoever still waits is told so."""
        self.begin_drain()
        await self.batcher.drain(self._settings.shutdown_grace_s)
        await self.batcher.stop()
        if self._life is not None:
            self._life.cancel()
            await asyncio.wait([self._life])
        await asyncio.to_thread(self.decoding.close)
        await asyncio.to_thread(self.engine.close)

    def why_not_ready(self) -> str | None:
        """This process's own reason first, then that of the others."""
        return self._own_reason() or self._board.why_not_ready()

    def describe(self, name: str) -> LayerAnswer:
        served = self.catalog.get(name)
        layer, spec, settings = served.stored, served.spec, self._settings
        return LayerAnswer(
            **{**spec.to_json(), "extra_keys": spec.extra_keys},
            name=layer.name,
            family=layer.family,
            source=layer.source,
            digest=layer.digest,
            stored_dtype=str(layer.dtype).removeprefix("torch."),
            batching="sequential" if served.resident.is_sequential else "packed",
            numerics=NumericsAnswer(**dataclasses.asdict(self.numerics)),
            limits=LayerLimits(
                body_bytes=settings.max_body_bytes,
                sequences=settings.max_sequences,
                tokens=settings.max_request_tokens,
                cells=settings.max_request_cells,
                weights_bytes=settings.max_weights_bytes,
                timeout_ms=settings.request_timeout_ms,
            ),
        )

    def example_layer(self) -> tuple[str, LayerSpec] | None:
        """A served layer for the page's examples to fit."""
        names = [] if self._catalog is None else self._catalog.names()
        return (names[0], self.catalog.get(names[0]).spec) if names else None

    async def metrics_text(self) -> bytes:
        # In a thread: it reads the files of all processes.
        return await asyncio.to_thread(self._telemetry.render)

    @property
    def max_sequences(self) -> int:
        return self._settings.max_sequences

    async def layer_totals(self) -> dict[str, LayerTotals]:
        """What each layer has done, over all processes."""
        self._telemetry.tell_tally()
        return await asyncio.to_thread(self._telemetry.layer_totals)

    async def _live(self) -> None:
        try:
            await self._load()
        except ServiceError as error:
            self._reason = error.message
            self._leave(EXIT_REFUSED, error.message)
        while self.batcher.is_alive:
            if self._catalog is not None:
                await self._probe(self._catalog)
            self._beat()
            await asyncio.sleep(self._settings.heartbeat_s)
        # Nothing can be computed here any more: the supervisor replaces this process.
        self._beat()
        self._leave(EXIT_FAILED, "the engine is down")

    def _life_ended(self, task: asyncio.Task[None]) -> None:
        """A process that neither loads nor beats is of no use to anyone: it says so and leaves."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._reason = "an internal fault"
            self._telemetry.life_ended(error)
            self._leave(EXIT_FAILED, "an internal fault; its trace is in the log")

    async def _load(self) -> None:
        self._beat()
        store, strict = Store(self._settings.layers_dir), self._settings.strict_layers
        found = await asyncio.to_thread(load_all, store, strict=strict)
        for name, error in found.failures.items():
            self._telemetry.layer_refused(name, error)
        if not found.layers:
            raise LayerError("the layer directory holds no layer that can be served; `layers import` puts one there")
        layers = {}
        for name, stored in found.layers.items():
            resident = await asyncio.wrap_future(self.engine.load(stored.spec, stored.tensors))
            layers[name] = ServedLayer(stored, resident)
            self._telemetry.layer_loaded(name, resident)
        catalog = self._catalog = Catalog(layers)
        self._reason = None if self._reason != "draining" else self._reason
        self._telemetry.serving(catalog.names())
        # What is here now stays: a full collection over torch's objects would stop the loop for some 40 ms.
        gc.collect()
        gc.freeze()

    async def _probe(self, catalog: Catalog) -> None:
        """A real forward pass for every layer that nobody has asked lately; its answer is what readiness follows."""
        for name in catalog.names():
            if self._telemetry.seconds_since_answer(name) < self._settings.probe_s:
                continue
            layer, spec = catalog.get(name), catalog.get(name).spec
            call = Call(
                name,
                torch.zeros(1, 1, spec.query_width),
                torch.zeros(1, 1, spec.key_width),
                torch.zeros(1, 1, spec.value_width),
            )
            cost = Cost(
                sequences=1, tokens=2, cells=spec.num_heads, weights_bytes=0, input_bytes=0, flops=spec.flops(1, 1, 1)
            )
            deadline = time.monotonic() + 2 * self._settings.heartbeat_s
            # Whatever goes wrong shows in the age of the layer's last answer.
            with contextlib.suppress(ServiceError):
                await self.batcher.submit(Work(layer.resident, call), (name, layer.digest, PROBE), cost, deadline)

    def _own_reason(self) -> str | None:
        if self._reason is not None:
            return self._reason
        if not self.batcher.is_alive:
            return "the engine is down"
        for name in self.catalog.names():
            age = self._telemetry.seconds_since_answer(name)
            if age > STALE_INTERVALS * self._settings.probe_s:
                return f'layer "{name}" has not answered for {age:.0f} s'
        return None

    def _beat(self) -> None:
        reason = self._own_reason()
        if reason is None:
            state = State.READY
        elif reason == "draining" and self._catalog is not None:
            # Only a process that has served can drain: the supervisor starts those again, and not one that refused.
            state = State.DRAINING
        else:
            state = State.STARTING if self._catalog is None else State.FAILED
        try:
            self._board.write(state, reason)
        except OSError as error:
            # A full or vanished run directory: late heartbeats make readiness say no, the next beat tries again.
            self._telemetry.beat_failed(error)
        self._telemetry.sample(self.engine)
        self._telemetry.ready(is_ready=reason is None)


def build(
    settings: Settings,
    telemetry: Telemetry,
    board: Board,
    leave: Callable[[int, str], None],
    engine: Callable[[EngineOptions], Engine] = Engine,
) -> tuple[Edge, Service]:
    """The ASGI application and the service behind it.

    `leave` ends the process with an exit code and a reason, `engine` makes the engine (a test's may hold or fail).
    """
    service = Service(settings, telemetry, board, leave, engine)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
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
        exception_handlers=EXCEPTION_HANDLERS,
    )
    app.include_router(make_router(service))
    app.include_router(make_models_router(service))
    attend, infer = Attend(service.reception), Infer(service.reception)
    hot = [Route(ROUTE, attend, methods=["POST"]), *(Route(path, infer, methods=["POST"]) for path in INFER_ROUTES)]
    app.router.routes.extend(hot)
    if settings.docs:
        app.include_router(make_docs_router(app.title, lambda: write_openapi(app, service.example_layer())))
    return Edge(app, lambda: app.router.routes, telemetry, time.monotonic, hot), service
