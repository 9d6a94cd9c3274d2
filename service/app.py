"""App: the only place that builds and wires; the running service from its first task to its last.

Laws: layers are loaded while the process listens already, unless others answer meanwhile; a layer is served only when the engine
has checked it with real forward passes; readiness follows what the layers answered lately, never a flag alone, and no process is
ready before it listens; shutdown settles everything that was accepted, and waits for no thread longer than it must.
Tasks beside the batcher's (the named exceptions of `docs/decisions.md`): one loads, then beats; one follows the roll; one looks
after the keys file where there is one.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import torch
from fastapi import FastAPI
from opentelemetry.trace import Tracer
from starlette.routing import Route

from service import __version__
from service.api.access import Access
from service.api.asgi import Application
from service.api.attend import ROUTE, Attend
from service.api.cors import cross_origin
from service.api.docs import make_docs_router
from service.api.edge import EXCEPTION_HANDLERS, Edge
from service.api.infer import ROUTES as INFER_ROUTES
from service.api.infer import Infer
from service.api.key_file import KeyFile
from service.api.layer_admin import make_admin_router
from service.api.models import make_models_router
from service.api.openapi import announce_keys, write_openapi
from service.api.rate import Limiter
from service.api.reception import Reception
from service.api.routes import LayerAnswer, LayerLimits, NumericsAnswer, make_router
from service.attention.call import Answer
from service.attention.engine import Engine, EngineOptions, pick_device
from service.attention.numerics import fingerprint
from service.attention.resident import Work
from service.attention.spec import LayerSpec
from service.batching.batcher import Batcher
from service.batching.clock import LoopClock
from service.changes import Changes
from service.errors import InvalidInput, NotReady, ServiceError
from service.events import Capacity, LayerTotals
from service.follower import Follower
from service.heartbeat import Board, State
from service.layers.catalog import Catalog
from service.layers.store import Store
from service.limits import batch_limits, cors_origins, exchange_limits, queue_limits, rate_limit
from service.memory import Memory
from service.probes import Probes
from service.roll import RollBook
from service.settings import Settings
from service.shelf import Shelf
from service.supervisor import EXIT_ENGINE_DOWN, EXIT_FAILED, EXIT_REFUSED
from service.telemetry import Telemetry
from service.tracing import BatchSpans, RequestSpans
from service.wire.decoding_thread import DecodingThread

# How long the end of a process waits for a forward pass that nobody waits for any more.
CLOSE_S = 1.0
LOADING = "layers are being loaded"
NOT_LISTENING = "the port is not open yet"


class Service:
    """One process's engine, waiting room and library; made inside the event loop it runs on."""

    def __init__(
        self,
        settings: Settings,
        telemetry: Telemetry,
        board: Board,
        leave: Callable[[int, str], None],
        engine: Callable[[EngineOptions], Engine] = Engine,
        tracer: Tracer | None = None,
    ) -> None:
        self._settings = settings
        self._telemetry = telemetry
        self._board = board
        self._leave = leave
        device = pick_device(settings.device)
        dtype: torch.dtype = getattr(torch, settings.dtype)
        self.engine = engine(EngineOptions(device, dtype, settings.compute_threads, exact=settings.exact))
        observer = telemetry if tracer is None else BatchSpans(tracer, telemetry)
        self.batcher: Batcher[Work, Answer] = Batcher(
            self.engine, batch_limits(settings), queue_limits(settings), LoopClock(), observer
        )
        self.decoding = DecodingThread()
        self.reception = Reception(
            lambda: self.catalog, self.batcher, self.decoding, exchange_limits(settings), time.monotonic
        )
        self._memory = Memory()
        self.numerics = fingerprint(device, dtype, settings.compute_threads)
        self.keys = None if settings.api_keys_file is None else KeyFile(settings.api_keys_file, telemetry)
        self._shelf = Shelf(Store(settings.layers_dir), self.engine, telemetry)
        book = RollBook(board.directory)
        self._follower = Follower(self._shelf, book, LoopClock(), settings.probe_s, self._acknowledge)
        self._changes = Changes(self._shelf, book, board, self._tell_all, settings.layer_change_s)
        self._probes = Probes(self.batcher, telemetry, settings.probe_s, 2 * settings.heartbeat_s)
        self._reason: str | None = LOADING
        self._tasks: list[asyncio.Task[None]] = []
        self._has_begun = asyncio.Event()  # loaded, or never will be
        self._is_listening = False
        self._is_over = False
        telemetry.built(self.numerics, Capacity(settings.queue_capacity, settings.queue_bytes, board.expected_workers))

    @property
    def catalog(self) -> Catalog:
        """The served layers; raises NotReady until all are loaded and checked."""
        if self._shelf.catalog is None:
            raise NotReady(self._reason or LOADING, retry_after_s=1)
        return self._shelf.catalog

    async def start(self) -> None:
        """Returns before the layers are loaded, but not before it is known who may ask."""
        if self.keys is not None:
            try:
                await self.keys.open()
            except ServiceError as error:
                # Nobody gets in meanwhile: there are no keys.
                self._leave(EXIT_REFUSED, error.message)
            self._begin(self.keys.watch(), "keys")
        self.batcher.start()
        self._board.bell.listen(self.look)
        self._begin(self._live(), "life")

    async def may_listen(self) -> None:
        """A process listens while it loads, unless others answer meanwhile: the kernel would send it what they could take."""
        if any(beat.state is State.READY for beat in self._board.fresh()):
            await self._has_begun.wait()

    def listens(self) -> None:
        """The port is open: who hears now that this process is ready can come to it."""
        self._is_listening = True
        self._beat()

    def look(self) -> None:
        """Something in the run directory may be new."""
        self._follower.look()
        self._changes.look()

    async def put_layer(self, name: str) -> bool:
        """Every process serves what the layer directory has under that name; whether it is new."""
        try:
            is_new = await self._changes.put(name)
        except InvalidInput as error:
            self._telemetry.layer_unfit(name, error)
            raise
        self._telemetry.layers_changed("put", name)
        return is_new

    async def drop_layer(self, name: str) -> None:
        """No process serves that layer any more."""
        await self._changes.drop(name)
        self._telemetry.layers_changed("drop", name)

    def begin_drain(self) -> None:
        """Readiness says no at once; requests are still served until the listener closes."""
        self._reason = "draining"
        self._has_begun.set()
        self._changes.close()
        self._beat()

    def is_over(self) -> bool:
        """Whether no thread works any more."""
        return self._is_over and not self._shelf.is_reading

    def stop_admitting(self) -> None:
        """The listener closes: what has come in goes on to its answer, nothing new is taken."""
        self.reception.close()

    def settle(self) -> None:
        """The grace is over: whoever still waits is told so now."""
        self.batcher.give_up()
        self.reception.settle()

    async def stop(self) -> None:
        """Ends the tasks and the compute thread; whoever still waits is told so."""
        self.begin_drain()
        await self.batcher.drain(self._settings.shutdown_grace_s)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self.batcher.stop()
        self._shelf.close()
        await asyncio.to_thread(self.decoding.close)
        self._is_over = await asyncio.to_thread(self.engine.close, CLOSE_S)

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
                table_bytes=settings.max_table_bytes,
                timeout_ms=settings.request_timeout_ms,
            ),
        )

    def example_layer(self) -> tuple[str, LayerSpec] | None:
        """A served layer for the page's examples to fit."""
        served = [] if self._shelf.catalog is None else [*self._shelf.catalog.layers.values()]
        return (served[0].name, served[0].spec) if served else None

    async def metrics_text(self) -> bytes:
        self._telemetry.tell_now()
        # In a thread: it reads the files of all processes.
        return await asyncio.to_thread(self._telemetry.render)

    @property
    def max_sequences(self) -> int:
        return self._settings.max_sequences

    async def layer_totals(self) -> dict[str, LayerTotals]:
        """What each layer has done, over all processes."""
        self._telemetry.tell_tally()
        self._telemetry.tell_now()  # else the thread may read the files before the turn ends
        return await asyncio.to_thread(self._telemetry.layer_totals)

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(work, name=name))
        self._tasks[-1].add_done_callback(self._life_ended)

    async def _live(self) -> None:
        try:
            await self._load()
        except ServiceError as error:
            self._reason = error.message
            self._has_begun.set()
            self._leave(EXIT_REFUSED, error.message)
        while self.batcher.is_alive:
            if self._shelf.catalog is not None:
                await self._probes.ask(self._shelf.catalog)
            self._beat()
            if not (self.batcher.num_queued or self.batcher.num_running or self.reception.intake.num_bytes):
                await asyncio.to_thread(self._memory.give_back)
            self.look()
            await self.batcher.ended_within(self._settings.heartbeat_s)
        # Nothing can be computed here any more: the supervisor replaces this process.
        self._beat()
        self._leave(EXIT_ENGINE_DOWN, "the engine is down")

    def _life_ended(self, task: asyncio.Task[None]) -> None:
        """A process that neither loads nor beats is of no use to anyone: it says so and leaves."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._reason = "an internal fault"
            self._has_begun.set()
            self._telemetry.life_ended(error)
            self._leave(EXIT_FAILED, "an internal fault; its trace is in the log")

    async def _load(self) -> None:
        self._beat()
        await self._follower.begin(strict=self._settings.strict_layers)
        self._begin(self._follower.follow(), "follower")
        # What is here now stays: a full collection over torch's objects would stop the loop for some 40 ms.
        gc.collect()
        gc.freeze()

    def _acknowledge(self) -> None:
        """Another roll has been followed: everybody may know."""
        if self._reason == LOADING:
            self._reason = None
        self._has_begun.set()
        self._beat()
        self._tell_all()

    def _tell_all(self) -> None:
        self.look()
        self._board.bell.ring()

    def _own_reason(self) -> str | None:
        if self._reason is not None:
            return self._reason
        if not self._is_listening:
            return NOT_LISTENING
        if not self.batcher.is_alive:
            return "the engine is down"
        if self.catalog.awaited:
            return self._shelf.trouble or "a layer is missing"
        return self._probes.why_not_ready(self.catalog)

    def _beat(self) -> None:
        reason = self._own_reason()
        if reason is None:
            state = State.READY
        elif reason == "draining" and self._shelf.catalog is not None:
            # Only a process that has served can drain: the supervisor starts those again, and not one that refused.
            state = State.DRAINING
        else:
            state = State.FAILED if self._shelf.catalog is not None and self._is_listening else State.STARTING
        try:
            self._board.write(state, reason, roll=self._follower.version, trouble=self._shelf.objection)
        except OSError as error:
            # A full or vanished run directory: late heartbeats make readiness say no, the next beat tries again.
            self._telemetry.beat_failed(error)
        self._telemetry.sample(self.engine)
        num_ready = sum(beat.state is State.READY for beat in self._board.fresh())
        self._telemetry.ready(is_ready=reason is None, num_ready=num_ready)


def build(
    settings: Settings,
    telemetry: Telemetry,
    board: Board,
    leave: Callable[[int, str], None],
    engine: Callable[[EngineOptions], Engine] = Engine,
    tracer: Tracer | None = None,
) -> tuple[Edge, Service]:
    """The ASGI application and the service behind it.

    `leave` ends the process with an exit code and a reason, `engine` makes the engine (a test's may hold or fail); with a
    `tracer` requests and batches are spans.
    """
    service = Service(settings, telemetry, board, leave, engine, tracer)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        await service.may_listen()
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
        # `tracing.py` sees every request and how it ended; FastAPI the fewest, and refusals only as exceptions.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.include_router(make_router(service))
    app.include_router(make_models_router(service))
    app.include_router(make_admin_router(service))
    attend, infer = Attend(service.reception), Infer(service.reception)
    hot = [Route(ROUTE, attend, methods=["POST"]), *(Route(path, infer, methods=["POST"]) for path in INFER_ROUTES)]
    app.router.routes.extend(hot)
    access = _access(settings, service)

    def document() -> dict[str, Any]:
        page = write_openapi(app, service.example_layer())
        return page if service.keys is None else announce_keys(page, access.needs_key)

    if settings.docs:
        app.include_router(make_docs_router(app.title, document))
    around = cross_origin(cors_origins(settings))
    spans = None if tracer is None else RequestSpans(tracer)

    def behind_the_count(inside: Application) -> Application:
        return around(inside) if spans is None else spans.around(around(inside))

    return Edge(app, lambda: app.router.routes, telemetry, time.monotonic, hot, access, behind_the_count), service


def _access(settings: Settings, service: Service) -> Access:
    keys, rate = service.keys, rate_limit(settings)
    return Access(
        None if keys is None else lambda: keys.ring,
        None if rate is None else Limiter(rate, time.monotonic),
        is_metrics_open=settings.open_metrics,
    )
