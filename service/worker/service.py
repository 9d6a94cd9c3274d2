"""Service: builds and joins one process's engine, batcher and layer registry, and starts and stops them.

Invariants: A layer is served only after the engine has checked it with real forward passes. Shutdown settles every accepted
request, and waits at most CLOSE_S for the threads.
Tasks besides the batcher's (the named exceptions of `docs/internals/decisions.md`): one loads layers, then sends heartbeats; one
applies the desired state; one watches the steps of loads; one watches the keys file, if there is one; one follows the source of
layers, if there is one.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor, ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any, NoReturn

import torch

from service.api.auth.key_ring import KeyFile
from service.api.outer_middleware import LayerTotals
from service.api.request_context import SharedState
from service.api.routes import Layer, LayerLimits, Numerics, ServedSet
from service.api.shared_work import Throttle
from service.attention.call import Answer
from service.attention.engine import Engine, EngineOptions, LayerCall, fingerprint, pick_device
from service.attention.heap import BUSY_GROWTH_BYTES, IDLE_GROWTH_BYTES, OVERLOAD_GROWTH_BYTES, Heap
from service.attention.spec import LayerSpec
from service.batching.batcher import Batcher
from service.batching.engine_protocol import STUCK_CHECKS
from service.errors import EngineDown, ServiceError
from service.layers.catalog import Catalog, ServedLayer
from service.layers.layer_set import SetCache
from service.layers.set_source import SetSource
from service.layers.store import Store
from service.limits import batch_limits, context_limits, queue_limits
from service.loop_time import LoopClock
from service.models.stored_model import ModelStore
from service.observability.telemetry import Telemetry
from service.settings import Settings
from service.supervisor.status import SourceStatus
from service.supervisor.supervisor import CLOSE_S, EXIT_ENGINE_DOWN, EXIT_FAILED, EXIT_REFUSED
from service.worker.control_channel import ControlChannel
from service.worker.layer_follower import FIXED, LayerFollower
from service.worker.layer_registry import LayerRegistry, Reconciler
from service.worker.layer_rollout import LayerRollout
from service.worker.model_registry import ModelRegistry
from service.worker.readiness import ENGINE_DOWN, Readiness

# How often an overloaded process looks at its heap between two heartbeats; with one look instead memory peaks 50 MiB higher.
NUM_LOOKS = 4


def _engine_options(settings: Settings) -> EngineOptions:
    """Return where and how the engine computes."""
    dtype: torch.dtype = getattr(torch, settings.dtype)
    return EngineOptions(pick_device(settings.device), dtype, settings.compute_threads, exact=settings.exact)


async def watch_loads(
    engine: Engine, stuck_s: float, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep
) -> NoReturn:
    """Raise EngineDown if a step of a load takes longer than a batch may; a load of many steps may take any time."""
    began, num_checks = None, 0
    while num_checks < STUCK_CHECKS:
        await sleep(stuck_s / STUCK_CHECKS)
        before, began = began, engine.load_step_began
        num_checks = num_checks + 1 if began is not None and began == before else 0
    raise EngineDown("the engine is stuck: a step of a load runs longer than any batch may")


class Service:
    """One process's engine, batcher and layer registry; made inside the event loop it runs on.

    `leave` ends the process with an exit code. `engine` makes the engine; a test's engine may hold or fail.
    `restore` makes the missing parts of the run directory again. `layers_fixed` says why no request may change the layers here.
    """

    def __init__(
        self,
        settings: Settings,
        telemetry: Telemetry,
        channel: ControlChannel,
        leave: Callable[[int], None],
        engine: Callable[[EngineOptions], Engine] = Engine,
        restore: Callable[[], bool] = lambda: False,
        layers_fixed: str = "",
    ) -> None:
        self.settings = settings
        self.layers_fixed = FIXED if settings.layers_source else layers_fixed
        self.telemetry = telemetry
        self._channel, self._leave = channel, leave
        options = _engine_options(settings)
        self.engine = engine(options)
        is_gpu = options.device.type != "cpu"
        batching, limits = batch_limits(settings, is_gpu=is_gpu), queue_limits(settings, is_gpu=is_gpu)
        self.batcher: Batcher[LayerCall, Answer] = Batcher(self.engine, batching, limits, LoopClock(), telemetry)
        store = Store(settings.layers_dir, settings.max_layer_bytes)
        self._registry = registry = LayerRegistry(store, self.engine, telemetry)
        self.models = ModelRegistry(ModelStore(settings.layers_dir, settings.max_layer_bytes), registry, telemetry)
        requests = context_limits(settings, is_gpu=is_gpu)
        self.shared = SharedState(registry, lambda: self.readiness.reason, self.batcher, requests, time.monotonic)
        self._heap = Heap()
        self.numerics = fingerprint(options)
        self.keys = None if settings.api_keys_file is None else KeyFile(settings.api_keys_file, telemetry)
        self._rollout = rollout = LayerRollout(registry, channel, telemetry, settings.layer_change_s, self.layers_fixed)
        self.put_layer, self.drop_layer = rollout.put, rollout.drop
        self.rendering: Executor = ThreadPoolExecutor(1, thread_name_prefix="rendering")
        self.metrics_text = Throttle(self._render, LoopClock()).get
        self.readiness = Readiness(
            channel, self.batcher, registry, self.models, telemetry, restore, settings.probe_s, settings.heartbeat_s
        )
        self.why_not_ready = self.readiness.why_not_ready
        self._reconciler = Reconciler(registry, channel, LoopClock(), settings.probe_s, self.readiness.state_applied)
        self._follower = self._make_follower() if settings.layers_source else None
        self._tasks: list[asyncio.Task[None]] = []
        self._is_over = False
        telemetry.built(self.numerics, settings.queue_capacity, settings.queue_bytes, settings.workers)

    def _make_follower(self) -> LayerFollower:
        settings, self._reconciler.proposes = self.settings, False
        cache = SetCache(settings.layers_dir, SetSource(settings.layers_source), settings.max_layer_bytes)
        poll_s = settings.layers_source_poll_s
        return LayerFollower(cache, self._registry, self._channel, self._rollout, self.telemetry, poll_s)

    @property
    def catalog(self) -> Catalog:
        """The served layers; raises NotReady until all are loaded and checked."""
        return self.shared.catalog

    async def start(self) -> None:
        """Start the tasks; return before the layers are loaded, but after the API keys are read."""
        heard = () if self._follower is None else (self._follower.heard.set,)
        self._channel.open(self.readiness.check, self._reconciler.check, self._rollout.check, *heard)
        if self.keys is not None:
            try:
                await self.keys.open()
            except ServiceError as error:
                # Until the process ends no caller is admitted, because there are no keys.
                self._refuse_to_start(error)
            self._start_task(self.keys.watch(), "keys")
        self.batcher.start()
        self._start_task(self._load_and_beat(), "heartbeat")
        self._start_task(watch_loads(self.engine, self.settings.stuck_s), "loads")
        if self._follower is not None:
            self._start_task(self._follower.run(), "layers-source")

    def begin_drain(self) -> None:
        """Turn readiness off at once and withdraw a change of layers; requests are still served until the listener closes."""
        self._rollout.close()
        self.readiness.drain()

    def is_over(self) -> bool:
        """Return whether the threads that compute and check bodies have ended and no thread reads a file."""
        is_reading_keys = self.keys is not None and self.keys.reading.locked()
        return self._is_over and not (self._registry.is_reading or is_reading_keys)

    def stop_admitting(self) -> None:
        """Refuse new requests, because the listener closes; accepted requests are still answered."""
        self.shared.close()

    def settle(self) -> None:
        """Refuse every request that still waits, because the grace is over."""
        self.batcher.give_up()
        self.shared.settle()

    async def stop(self) -> None:
        """Finish admitted jobs within `shutdown_grace_s` and fail the rest; then end the tasks, the threads and the engine."""
        self.begin_drain()
        await self.batcher.drain(self.settings.shutdown_grace_s)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._follower is not None:
            self._follower.close()
        await self.batcher.stop()
        self.telemetry.sample(self.engine)  # counts the work since the last heartbeat
        self.models.close()
        self._registry.close()
        self.rendering.shutdown(wait=False)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self.shared.end()
                self._is_over = await asyncio.to_thread(self.engine.close, CLOSE_S)

    def describe(self, served: ServedLayer) -> Layer:
        layer, spec, settings = served.stored, served.spec, self.settings
        rotary = spec.rotary and {**dataclasses.asdict(spec.rotary), "width": spec.rotary.width}
        return Layer(
            **{**dataclasses.asdict(spec), "rotary": rotary, "extra_keys": spec.extra_keys},
            name=layer.name,
            family=layer.family,
            source=layer.source,
            digest=layer.digest,
            stored_dtype=str(layer.dtype).removeprefix("torch."),
            batching="sequential" if served.loaded.is_sequential else "packed",
            numerics=Numerics(**dataclasses.asdict(self.numerics), least_rows=served.loaded.least_rows),
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

    def served_set(self, catalog: Catalog) -> ServedSet | None:
        """Return the set whose layers are served, and what is known of its source; None without a source."""
        if self._follower is None:
            return None
        found = self._channel.service.source or SourceStatus()
        since, checked = (datetime.fromtimestamp(at, UTC) if at else None for at in (found.since, found.checked))
        source = self._follower.cache.source.shown
        return ServedSet(
            digest=catalog.layer_set, source=source, since=since, checked=checked, fault=found.fault or None
        )

    def example_layer(self) -> tuple[str, LayerSpec] | None:
        """Return name and spec of a served layer, so that the examples of the API document fit it; None without layers."""
        served = [] if self._registry.catalog is None else [*self._registry.catalog.layers.values()]
        return (served[0].name, served[0].spec) if served else None

    async def _render(self) -> bytes:
        self.telemetry.sample(self.engine)
        # Run in a thread, because it reads the files of all processes.
        return await asyncio.get_running_loop().run_in_executor(self.rendering, self.telemetry.metrics.render)

    async def layer_totals(self) -> dict[str, LayerTotals]:
        """Return what each layer has done, over all processes."""
        self.telemetry.sample(self.engine)
        return await asyncio.get_running_loop().run_in_executor(self.rendering, self.telemetry.metrics.layer_totals)

    def _start_task(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(work, name=name))
        self._tasks[-1].add_done_callback(self._task_ended)

    async def _load_and_beat(self) -> None:
        self._heartbeat()
        try:
            await self._reconciler.load(strict=self.settings.strict_layers)
        except EngineDown:
            raise  # a refusal would end the whole service
        except ServiceError as error:
            self.readiness.give_up(error.message)
            self._refuse_to_start(error)
        else:
            self._start_task(self._reconciler.run(), "reconciler")
            # Exclude the objects that exist now from collections: a full one over torch's would stop the loop for about 40 ms.
            gc.collect()
            gc.freeze()
        while self.batcher.is_alive:
            await self.readiness.probe()
            self._heartbeat()
            is_busy = self.batcher.num_queued or self.batcher.num_running or self.shared.intake.num_bytes
            await asyncio.to_thread(self._heap.give_back, BUSY_GROWTH_BYTES if is_busy else IDLE_GROWTH_BYTES)
            self._reconciler.check()
            for _ in range(NUM_LOOKS):
                await self.batcher.ended_within(self.settings.heartbeat_s / NUM_LOOKS)
                if self.batcher.num_overloaded:
                    await asyncio.to_thread(self._heap.give_back, OVERLOAD_GROWTH_BYTES)
        raise EngineDown(ENGINE_DOWN)  # this process can compute nothing any more: the supervisor replaces it

    def _refuse_to_start(self, error: ServiceError) -> None:
        self._channel.report(start_error=error.message)
        self._leave(EXIT_REFUSED)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """End the process after a task failed: without loading or heartbeats it cannot serve."""
        error = None if task.cancelled() else task.exception()
        if isinstance(error, EngineDown):
            self.readiness.give_up(ENGINE_DOWN)
            self.batcher.fail(error)
            self._leave(EXIT_ENGINE_DOWN)
        elif error is not None:
            self.readiness.give_up("an internal fault")
            self.telemetry.task_failed(error)
            self._leave(EXIT_FAILED)

    def _heartbeat(self) -> None:
        self.telemetry.sample(self.engine)
        self.telemetry.overload_changed(is_overloaded=self.batcher.num_overloaded > 0)
        self.readiness.report()
