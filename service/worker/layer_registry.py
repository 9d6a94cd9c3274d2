"""Layer registry: the layers that this process has and which it serves; Reconciler keeps it in line with the desired state.

Must not know: HTTP, other processes, what decides the desired state.
Invariants: The served layers are exchanged in one synchronous step, so a response is of one version. A version leaves the
registry when the desired state drops it, and memory when the last request admitted with it ends. A layer that fails to load has
a LayerError of its own; the others are served. A file may change at any time, so its digest is compared with the requested one.
A state is acknowledged only after the registry has applied as much of it as it can. After the first load, a state is no longer
applied when another replaces it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch

from service.attention.engine import Build, Engine, LoadedLayer
from service.attention.layer import Layer
from service.attention.scaled_dot_product import ScaledDotProduct
from service.errors import EngineDown, LayerError, LayerNotLoaded
from service.layers.catalog import Catalog, ServedAttention, ServedLayer
from service.layers.store import Store
from service.loop_time import Clock
from service.observability.telemetry import Telemetry
from service.supervisor.status import DesiredState
from service.worker.control_channel import ControlChannel

P = ParamSpec("P")
R = TypeVar("R")


class LayerRegistry:
    """`catalog` is None until the first layers are loaded, `applied` (the last desired state) has version 0 until then.

    `fault` is the first error of the last desired state: a layer of it is not served. `refusal` is that of a layer that this
    state changes, and only it blocks the change: a layer that failed earlier must not block the change that may repair it.
    A `refusal` of another class than LayerNotLoaded says that the file is not the version that the state names.
    """

    def __init__(self, store: Store, engine: Engine, telemetry: Telemetry) -> None:
        self.catalog: Catalog | None = None
        self.applied = DesiredState()
        self.fault: str | None = None
        self.refusal: LayerError | None = None
        self._store = store
        self._engine = engine
        self._telemetry = telemetry
        self._attention: ServedAttention | None = None
        self._loaded: dict[tuple[str, str], ServedLayer] = {}  # by name and digest
        self._refusals: dict[tuple[str, str], LayerError] = {}  # layers of the state applied last, by name and digest
        self._load_thread = ThreadPoolExecutor(1, thread_name_prefix="loading")
        # A second thread, so that another admin request does not delay the loading of a rollout in progress.
        self._digest_thread = ThreadPoolExecutor(1, thread_name_prefix="digests")
        self._reads = set[Future[Any]]()

    @property
    def is_reading(self) -> bool:
        """Whether a thread still reads a file; a read cannot be cancelled."""
        return bool(self._reads)

    @property
    def least_rows(self) -> dict[str, int]:
        """By digest, the least rows of the products of each loaded layer, 0 if it is sequential (by its self-check)."""
        loaded = [(digest, layer.loaded) for (_, digest), layer in self._loaded.items()]
        return {digest: 0 if layer.is_sequential else layer.least_rows for digest, layer in loaded}

    async def load_directory(self, *, strict: bool) -> dict[str, str]:
        """Load the directory's layers and return their digests; an empty directory gives an empty dict.

        Raises LayerError if every layer fails or, if `strict`, if one fails.
        """
        names = await self.read(self._load_thread, self._store.names)
        for name in names:
            try:
                await self._load(name)
            except LayerError as error:
                if strict:
                    raise
                self._telemetry.layer_refused(name, error)
        if names and not self._loaded:
            raise LayerError("the layer directory holds no layer that can be served; `layers import` puts one there")
        return dict(self._loaded.keys())

    async def load_set(self, layer_set: str, layers: Mapping[str, str]) -> None:
        """Load the layers of a set; raises LayerError if one fails."""
        for name, digest in layers.items():
            await self._load(name, digest, layer_set)

    async def digest(self, name: str) -> str:
        """Return the digest of the layer that the directory has under that name now; raises LayerError and its subclasses."""
        return (await self.read(self._digest_thread, self._store.load, name)).digest

    async def apply(self, desired: DesiredState) -> None:
        """Load the layers of the desired state, serve those that it serves, and release the rest.

        A layer that failed before is tried again if the same state is applied again, or if the state changes that layer: its file
        may be slow, and a change of another layer must not wait for it.
        """
        if self._attention is None:
            loaded = await self.load_on_engine("attention without a layer", ScaledDotProduct, dtype=torch.float32)
            self._attention = ServedAttention(loaded)
            self._telemetry.layer_loaded(self._attention.name, self._attention.loaded)
        is_retry = desired.version == self.applied.version
        refusals: dict[tuple[str, str], LayerError] = {}
        for key in sorted(desired.loaded - self._loaded.keys()):
            if key in self._refusals and not is_retry and key[0] not in desired.changed:
                refusals[key] = self._refusals[key]
                continue
            try:
                await self._load(*key, desired.set_of(key))
            except LayerError as error:
                refusals[key] = type(error)(error.message)  # without its traceback, which holds the tensors
        self._refusals, self.applied = refusals, desired
        self._serve(desired)
        first = next((refusals[key] for key in desired.layers.items() if key in refusals), None)
        before, self.fault = self.fault, None if first is None else first.message
        changed = ((name, desired.layers.get(name, "")) for name in desired.changed)
        self.refusal = next((refusals[key] for key in changed if key in refusals), None)
        if first is not None and self.fault != before:  # report it once, not at every retry
            self._telemetry.layer_not_loaded(first.message, first.code)

    def release_memory(self) -> None:
        """Give back the memory of what nothing holds any more."""
        with contextlib.suppress(EngineDown):  # it is closed
            self._engine.release()

    def close(self) -> None:
        for thread in (self._load_thread, self._digest_thread):
            thread.shutdown(wait=False, cancel_futures=True)

    def _serve(self, desired: DesiredState) -> None:
        """Exchange the catalog and release the layers that the desired state does not name."""
        num_before = len(self._loaded)
        self._loaded = {key: layer for key, layer in self._loaded.items() if key in desired.loaded}
        served = {key[0]: self._loaded[key] for key in sorted(desired.served.items()) if key in self._loaded}
        awaited = frozenset(desired.served.keys() - served.keys())
        before, self.catalog = self.catalog, Catalog(served, awaited, self._attention, desired.served_set)
        if before is None or (before.names(), before.layer_set) != (self.catalog.names(), self.catalog.layer_set):
            names = [model.name for model in self.catalog.models()]
            self._telemetry.serving(names, len(self.catalog.layers), self.catalog.layer_set)
        if len(self._loaded) < num_before:
            del before  # the last reference, unless a request was admitted with a released layer
            self.release_memory()

    async def _load(self, name: str, digest: str | None = None, layer_set: str = "") -> None:
        """Load a layer, with that digest if one is given; raises LayerError if the directory has none (any more, or yet)."""
        stored = await self.read(self._load_thread, self._store.of_set(layer_set).load, name)
        if digest not in (None, stored.digest):
            raise LayerError(f'layer "{name}": the file in the layer directory is not the version that is served')
        loaded = await self.load_on_engine(f'layer "{stored.name}"', partial(Layer, stored.spec, stored.tensors))
        self._loaded[stored.name, stored.digest] = ServedLayer(stored, loaded)
        self._telemetry.layer_loaded(stored.name, loaded)

    async def load_on_engine(self, what: str, build: Build, **options: Any) -> LoadedLayer:
        """Load on the engine, self-check included; raises LayerNotLoaded, or EngineDown."""
        try:
            return await asyncio.wrap_future(self._engine.load(build, **options))
        except EngineDown:
            raise
        except Exception as error:
            why = "there is no memory for it, or its first forward passes failed"
            raise LayerNotLoaded(f"{what}: {error.message if isinstance(error, LayerError) else why}") from error

    async def read(self, thread: ThreadPoolExecutor, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        future = thread.submit(work, *args, **kwargs)
        self._reads.add(future)
        future.add_done_callback(self._reads.discard)
        try:
            return await asyncio.wrap_future(future)
        finally:
            del future  # it holds the error, whose traceback holds this frame and the layer's tensors


@dataclasses.dataclass(eq=False, repr=False)
class Reconciler:
    """Applies desired states to the registry, and calls `acknowledge` after each.

    While there is no state (version 0), a process that `proposes` proposes what it found in the directory. Then it serves what
    the state says, not what the directory holds by then. A layer that could not be loaded is tried again after `retry_s`, because
    a missing file may return, and not when another state arrives.
    """

    registry: LayerRegistry
    channel: ControlChannel
    clock: Clock
    retry_s: float
    acknowledge: Callable[[], object]
    proposes: bool = True
    _checked: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    _applying: tuple[DesiredState, asyncio.Task[None]] | None = None
    _retry_at: float = 0.0

    def check(self) -> None:
        """Check for another state or a due retry; stop applying a state that was replaced."""
        self._checked.set()
        if self._applying is not None and self.channel.service.desired.version != self._applying[0].version:
            self._applying[1].cancel()

    async def load(self, *, strict: bool) -> None:
        """Load the first layers; raises LayerError if the directory cannot be served."""
        while not self.channel.has_heard:
            await self._check()
        if self.proposes and self.channel.service.desired.version == 0:
            self.channel.report(found=await self.registry.load_directory(strict=strict))
        while self.channel.service.desired.version == 0:
            await self._check()
        self.channel.report(found=None, found_set="")
        await self._apply(self.channel.service.desired)

    async def run(self) -> None:
        """Apply every new state, until cancelled."""
        while True:
            await self._check()
            desired = self.channel.service.desired
            is_retry_due = self.registry.fault is not None and self.clock.now() >= self._retry_at
            if desired.version != self.registry.applied.version or is_retry_due:
                await self._apply_until_replaced(desired)

    async def _check(self) -> None:
        await self._checked.wait()
        self._checked.clear()

    async def _apply_until_replaced(self, desired: DesiredState) -> None:
        """Apply a state until another replaces it: slow loading for an aborted change must not delay the next state."""
        task = asyncio.ensure_future(self._apply(desired))
        self._applying = desired, task
        try:
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()
        finally:
            self._applying = None
            task.cancel()

    async def _apply(self, desired: DesiredState) -> None:
        is_retry, had_fault = desired.version == self.registry.applied.version, self.registry.fault is not None
        await self.registry.apply(desired)
        if is_retry or not had_fault:  # frequent changes of other layers must not put a retry off
            self._retry_at = self.clock.now() + self.retry_s
        self.acknowledge()
