"""LayerRegistry: the layers that this process has on its engine, and which of them it serves.

It loads layers from the directory at the start, and afterwards as the desired state says. Must not know: HTTP, other processes,
the author of the desired state.
Invariants: The served layers are exchanged in one synchronous step, so a response is of one version. A version leaves the
registry when the desired state drops it, and memory when the last request admitted with it ends. A failure to load a layer is a
LayerError of that layer; the others are served. A file may change at any time, so its digest is compared with the requested one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

from service.attention.engine import Engine, LoadedLayer
from service.errors import EngineDown, LayerError, LayerNotLoaded
from service.layers.catalog import Catalog, ServedAttention, ServedLayer, load_all
from service.layers.store import Store
from service.layers.stored_layer import StoredLayer
from service.worker.desired_state import DesiredState

P = ParamSpec("P")
R = TypeVar("R")


class Listener(Protocol):
    """Receives the registry's events, for metrics and logs (`observability/telemetry.py`)."""

    def layer_loaded(self, name: str, loaded: LoadedLayer) -> None: ...

    def layer_refused(self, name: str, error: LayerError) -> None: ...

    def layer_lacking(self, error: LayerError) -> None: ...

    def serving(self, names: list[str], num_layers: int) -> None: ...


class Objection(NamedTuple):
    """Why this process cannot make a change. `is_to_file`: the layer's file is no longer the version that the change names."""

    message: str
    is_to_file: bool


class LayerRegistry:
    """`catalog` is None until the first layers are loaded.

    `trouble` says why the last desired state cannot be served as it stands, `objection` why its change cannot be made. They
    differ: a layer that was missing before must not block a change of another layer, which may be the repair.
    """

    def __init__(self, store: Store, engine: Engine, listener: Listener) -> None:
        self.catalog: Catalog | None = None
        self.trouble: str | None = None
        self.objection: Objection | None = None
        self._store = store
        self._engine = engine
        self._listener = listener
        self._attention: ServedAttention | None = None
        self._held: dict[tuple[str, str], ServedLayer] = {}
        # A thread of its own, so that an admin's request does not delay a rollout in progress.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="library")
        self._enquiries = ThreadPoolExecutor(1, thread_name_prefix="enquiries")
        self._reads = set[Future[Any]]()

    @property
    def is_reading(self) -> bool:
        """Whether a thread still reads a file; a read cannot be cancelled."""
        return bool(self._reads)

    async def stock(self, *, strict: bool) -> dict[str, str]:
        """Load the directory's layers and return their digests; an empty directory has none.

        Raises LayerError if every layer fails or, if `strict`, if one fails.
        """
        found = await self._in(self._thread, load_all, self._store, strict=strict)
        for name, error in found.failures.items():
            self._listener.layer_refused(name, error)
        for name, stored in found.layers.items():
            try:
                self._keep(await self._loaded(stored))
            except LayerError as error:
                if strict:
                    raise
                self._listener.layer_refused(name, error)
        if not self._held and (found.layers or found.failures):
            raise LayerError("the layer directory holds no layer that can be served; `layers import` puts one there")
        return dict(self._held.keys())

    async def digest(self, name: str) -> str:
        """Return the digest of the layer that the directory has under that name now; raises LayerError and its subclasses."""
        return (await self._in(self._enquiries, self._store.load, name)).digest

    async def follow(self, desired: DesiredState) -> None:
        """Load the layers that the desired state holds, serve those that it serves, and release the rest."""
        if self._attention is None:
            self._attention = ServedAttention(await asyncio.wrap_future(self._engine.load(None, {})))
            self._listener.layer_loaded(self._attention.name, self._attention.loaded)
        troubles: dict[tuple[str, str], LayerError] = {}
        for name, digest in sorted(desired.held - self._held.keys()):
            try:
                self._keep(await self._loaded(await self._read_as(name, digest)))
            except LayerError as error:
                troubles[name, digest] = error
        self._put_out(desired)
        lacking = {
            name: troubles[name, digest] for name, digest in desired.layers.items() if (name, digest) in troubles
        }
        first = next(iter(lacking.values()), None)
        told, self.trouble = self.trouble, None if first is None else first.message
        self.objection = _objection(lacking.get(desired.about))
        if first is not None and self.trouble != told:  # report it once, not at every retry
            self._listener.layer_lacking(first)

    def close(self) -> None:
        for thread in (self._thread, self._enquiries):
            thread.shutdown(wait=False, cancel_futures=True)

    def _put_out(self, desired: DesiredState) -> None:
        held, before = desired.held, len(self._held)
        self._held = {key: layer for key, layer in self._held.items() if key in held}
        served = {key[0]: self._held[key] for key in sorted(desired.served.items()) if key in self._held}
        shown, self.catalog = (
            self.catalog,
            Catalog(served, frozenset(desired.served.keys() - served.keys()), self._attention),
        )
        if shown is None or shown.names() != self.catalog.names():
            self._listener.serving([model.name for model in self.catalog.models()], len(self.catalog.layers))
        if len(self._held) < before:
            del shown  # the last reference, unless a request was admitted with a released layer
            self._engine.release()

    def _keep(self, layer: ServedLayer) -> None:
        self._held[layer.name, layer.digest] = layer
        self._listener.layer_loaded(layer.name, layer.loaded)

    async def _read_as(self, name: str, digest: str) -> StoredLayer:
        """Read the version with that digest; raises LayerError if the directory no longer has it, or not yet."""
        stored = await self._in(self._thread, self._store.load, name)
        if stored.digest != digest:
            raise LayerError(f'layer "{name}": the file in the layer directory is not the version that is served')
        return stored

    async def _loaded(self, stored: StoredLayer) -> ServedLayer:
        """Load the layer on the engine, self-check included; raises LayerNotLoaded, or EngineDown."""
        try:
            loaded = await asyncio.wrap_future(self._engine.load(stored.spec, stored.tensors))
        except EngineDown:
            raise
        except Exception as error:
            reason = "there is no memory for it, or its first forward passes failed"
            raise LayerNotLoaded(f'layer "{stored.name}": {reason}') from error
        return ServedLayer(stored, loaded)

    async def _in(self, thread: ThreadPoolExecutor, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        future = thread.submit(work, *args, **kwargs)
        self._reads.add(future)
        future.add_done_callback(self._reads.discard)
        return await asyncio.wrap_future(future)


def _objection(error: LayerError | None) -> Objection | None:
    """Keep the message, not the error: the error's traceback holds the tensors."""
    return None if error is None else Objection(error.message, not isinstance(error, LayerNotLoaded))
