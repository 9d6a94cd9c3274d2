"""Model registry: the models that this process has read, each at its first use, over the layers that it serves.

Invariants: One load serves all requests that wait for the model, and goes on if their deadlines pass. A model is used as long as
its layers are served; then it is released, and the next request reads it again. What fails concerns that model alone. Files are
read in a thread; a process that is never asked for a model reads none. `GET` reads headers only.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
from concurrent.futures import ThreadPoolExecutor

import torch

from service.attention.self_check import Variant
from service.errors import Draining, EngineDown, LayerError, LayerMissing, ModelNotFound, NotReady, ServiceError
from service.layers import wording
from service.layers.catalog import Catalog, ServedLayer, hint
from service.layers.directory import NAME, SDPA
from service.models.encoder import Encoder
from service.models.served_model import ModelState, ServedModel, find_layers
from service.models.stored_model import ModelAbout, ModelStore, StoredModel
from service.models.tokenizer import Tokenizer
from service.observability.telemetry import Telemetry
from service.worker.layer_registry import LayerRegistry

RETRY_S = 5
NO_MODEL = "no model of that name is in the layer directory; GET /v1/models lists them"


class ModelRegistry:
    def __init__(self, store: ModelStore, layers: LayerRegistry, telemetry: Telemetry) -> None:
        self._store = store
        self._layers = layers
        self._telemetry = telemetry
        self._used: dict[str, ServedModel] = {}
        self._loads: dict[str, asyncio.Task[ServedModel | ServiceError]] = {}
        self._faults: dict[str, tuple[object, str]] = {}  # why the last load failed, and of which file
        self._load_thread = ThreadPoolExecutor(1, thread_name_prefix="loading-models")
        # A second thread, so that a list of models does not wait for a load.
        self._header_thread = ThreadPoolExecutor(1, thread_name_prefix="model-headers")

    def find(self, name: str) -> ServedModel | None:
        """Return the model if it can be used as it is; raise ModelNotFound for a name that no model can have."""
        if NAME.fullmatch(name) is None or name == SDPA:
            raise ModelNotFound(NO_MODEL)
        model, catalog = self._used.get(name), self._layers.catalog
        return model if model is not None and catalog is not None and model.fits(catalog) else None

    async def get(self, name: str) -> ServedModel:
        """Return the model, which is read at its first use; raise ModelNotFound, or NotReady with the reason."""
        if (model := self.find(name)) is not None:
            return model
        if (load := self._loads.get(name)) is None:
            load = self._loads[name] = asyncio.ensure_future(self._load(name))
            load.add_done_callback(lambda done: (self._loads.pop(name), done.cancelled() or done.exception()))
        found = await asyncio.shield(load)
        if isinstance(found, ServiceError):
            raise copy.copy(found)  # each request raises its own
        return found

    @property
    def _files(self) -> ModelStore:
        catalog = self._layers.catalog
        return self._store if catalog is None else self._store.of_set(catalog.layer_set)

    def in_use(self) -> list[ServedModel]:
        """Return the models that are used; release those whose layers are no longer served."""
        for name in list(self._used):
            if self.find(name) is None:
                self.release(name)
        return [*self._used.values()]

    def release(self, name: str) -> None:
        """Use the model no more; it leaves the memory when the last request that was admitted with it ends."""
        if self._used.pop(name, None) is not None:
            self._layers.release_memory()

    async def states(self) -> list[ModelState]:
        """Return all models of the directory, by name."""
        states = [await self._state(name) for name in await self._names()]
        return [state for state in states if state is not None]

    async def state(self, name: str) -> ModelState:
        """Return one model; raise ModelNotFound, or NotReady if it cannot be used."""
        if (state := await self._state(name)) is None:
            raise await self._unknown(name)
        if state.fault is not None:
            raise NotReady(state.fault, retry_after_s=RETRY_S)
        return state

    def close(self) -> None:
        """End the loads."""
        for load in self._loads.values():
            load.cancel()
        for thread in (self._load_thread, self._header_thread):
            thread.shutdown(wait=False, cancel_futures=True)

    async def _state(self, name: str) -> ModelState | None:
        """Return what is known of a model; None if it has no file."""
        if (model := self.find(name)) is not None:
            return ModelState(name, model.about, model.layers, None)
        if (catalog := self._layers.catalog) is None:
            raise NotReady("layers are being loaded")
        about = None
        try:
            about = await self._layers.read(self._header_thread, self._files.about, name)
            layers = find_layers(about, catalog)
            stamp = await self._stamp(name)
        except LayerMissing:
            return None
        except LayerError as error:
            return ModelState(name, about, [], error.message)
        failed, fault = self._faults.get(name, (None, None))
        return ModelState(name, about, layers, fault if failed == stamp else None)

    async def _stamp(self, name: str) -> tuple[int, ...] | None:
        """Return what changes if the file is replaced; None without one."""
        try:
            found = await self._layers.read(self._header_thread, self._files.file(name).stat)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    async def _load(self, name: str) -> ServedModel | ServiceError:
        """Return the model, or the error of the requests that wait for it: no traceback of it holds the tensors."""
        self.release(name)
        try:
            self._used[name] = model = await self._read(name)
        except LayerMissing:
            return await self._unknown(name)
        except LayerError as error:
            before, self._faults[name] = self._faults.get(name), (await self._stamp(name), error.message)
            if self._faults[name] != before:  # report it once, not at every request
                self._telemetry.layer_not_loaded(error.message, error.code)
            return NotReady(error.message, retry_after_s=RETRY_S)
        except EngineDown as error:
            return EngineDown(error.message)
        except asyncio.CancelledError:
            return Draining("the service is shutting down, and the model is not read")
        self._faults.pop(name, None)
        self._telemetry.layer_loaded(model.name, model.loaded)
        return model

    async def _read(self, name: str) -> ServedModel:
        catalog = self._layers.catalog
        assert catalog is not None, "a request for a model was admitted without layers. This is a bug."
        parts = await self._layers.read(self._load_thread, _parts, self._files, name, catalog)
        about, layers, tokenizer, stored = parts

        def build(*, dtype: torch.dtype, device: torch.device) -> Variant:  # noqa: ARG001 (a model has one)
            return Encoder(stored.pop(), [layer.loaded for layer in layers], device=device)

        loaded = await self._layers.load_on_engine(f'model "{name}"', build, may_block=False)
        return ServedModel(about, tokenizer, layers, loaded, catalog.layer_set)

    async def _names(self) -> list[str]:
        try:
            names = await self._layers.read(self._header_thread, self._files.names)
        except LayerError as error:
            raise NotReady(error.message, retry_after_s=RETRY_S) from None
        return [name for name in names if name != SDPA]

    async def _unknown(self, name: str) -> ModelNotFound:
        """Return the error for a name without a file, with the nearest name."""
        names = await self._names()
        return ModelNotFound(NO_MODEL + hint(name, (near for near in names if near != name)))


def _parts(
    store: ModelStore, name: str, catalog: Catalog
) -> tuple[ModelAbout, list[ServedLayer], Tokenizer, list[StoredModel]]:
    """Return what the file has. The whole model is in a list, from which its one reader takes it, so that nothing keeps it."""
    find_layers(store.about(name), catalog)  # before the tensors are read
    stored = store.load(name)
    about = ModelAbout(**{field.name: getattr(stored, field.name) for field in dataclasses.fields(ModelAbout)})
    with wording.about(f'model "{name}"'):
        tokenizer = Tokenizer(stored.tokenizer, about.options.vocabulary)
    return about, find_layers(about, catalog), tokenizer, [stored]
