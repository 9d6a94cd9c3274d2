"""Layer follower: looks at ATTENTION_LAYERS_SOURCE, and has every process serve its set once all of it is here.

Must not know: HTTP, how a process applies a desired state.
Invariants: One process of a service follows the source: the one that has the lock of the layer directory. A fault changes nothing
that is served; it is reported in the status, and logged when it begins. Before the first set is served, the set that was served
last takes its place if the source is away. A set that could not be served is tried again after a time that doubles.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from service.errors import Draining, EngineDown, LayerChanged, LayerError, ServiceError
from service.layers.layer_set import LayerSet, SetCache
from service.observability.telemetry import Telemetry
from service.supervisor.status import DesiredState, Phase, SourceStatus
from service.worker.control_channel import ControlChannel
from service.worker.layer_registry import LayerRegistry
from service.worker.layer_rollout import LayerRollout

JITTER = 0.25
# How often a read that may hang is checked.
CHECK_S = 1.0
MAX_RETRY_S = 600.0
FIXED = "the layers here are those of ATTENTION_LAYERS_SOURCE; publish another set there with `layers publish`"


HANGS = "the source does not answer"
NO_LEADER = "another process follows the source; if it is of another service, set an ATTENTION_LAYERS_DIR for each"


@dataclasses.dataclass(slots=True)
class Refused:
    """The set that could not be served last: why, how often in a row, and when it is tried again, `is_damaged` fetched anew."""

    digest: str = ""
    reason: str = ""
    count: int = 0
    retry_at: float = 0.0
    is_damaged: bool = False


@dataclasses.dataclass(eq=False, repr=False)
class LayerFollower:
    """`heard` is set once the desired state is known."""

    cache: SetCache
    registry: LayerRegistry
    channel: ControlChannel
    rollout: LayerRollout
    telemetry: Telemetry
    poll_s: float
    heard: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    _refused: Refused = dataclasses.field(default_factory=Refused)
    # A second thread, because a read of the source may hang while the set that was served last is looked up.
    _threads: ThreadPoolExecutor = dataclasses.field(
        default_factory=lambda: ThreadPoolExecutor(2, thread_name_prefix="layers-source")
    )

    async def run(self) -> None:
        """Look at the source again and again, until cancelled."""
        await self.heard.wait()
        while True:
            await self.look()
            await asyncio.sleep(self.poll_s * random.uniform(1 - JITTER, 1 + JITTER))  # noqa: S311 (spreads the replicas)

    async def look(self) -> None:
        """Look once; raises EngineDown only."""
        if self._desired.phase is not Phase.SETTLED:
            return
        try:
            if not await self.registry.read(self._threads, self.cache.lead):
                if self._desired.version == 0:
                    self.registry.fault = NO_LEADER if self.channel.service.source is None else None
                return
            self._report()
            wanted = await self._fetched()
            if wanted.digest != self._desired.layer_set:
                await self._serve(wanted)
        except EngineDown:
            raise
        except Draining:
            return
        except ServiceError as error:
            await self._fail(error.message)
        else:
            self.telemetry.source_checked(is_recovered=bool(self._status.fault))
            self._report(fault="", checked=time.time())

    def stop(self) -> None:
        """Stop a fetch in progress at its next bytes."""
        self.cache.is_stopped = True

    def close(self) -> None:
        self.cache.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def _desired(self) -> DesiredState:
        return self.channel.service.desired

    @property
    def _status(self) -> SourceStatus:
        return self.channel.status.source or self.channel.service.source or SourceStatus()

    def _report(self, **fields: Any) -> None:
        self.channel.report(source=dataclasses.replace(self._status, **fields))

    async def _fail(self, reason: str) -> None:
        """Report a fault. If nothing is served yet, serve the set that was served last."""
        self.telemetry.source_failed(reason, is_new=reason != self._status.fault)
        self._report(fault=reason)
        if self._desired.version == 0:
            last = await self.registry.read(self._threads, self.cache.last_served)
            if last is not None and last.digest != self._refused.digest:
                with contextlib.suppress(LayerError):  # the first reason is reported
                    await self._propose(last)

    async def _fetched(self) -> LayerSet:
        """Return the source's set, which is here; a read that may hang is watched."""
        task = asyncio.ensure_future(self.registry.read(self._threads, self._fetch, self._desired.layer_set))
        try:
            while not (await asyncio.wait({task}, timeout=CHECK_S))[0]:
                if time.monotonic() > self.cache.source.late_at and self._status.fault != HANGS:
                    await self._fail(HANGS)
            return task.result()
        finally:
            task.cancel()

    def _fetch(self, served: str) -> LayerSet:
        if self._refused.is_damaged and time.monotonic() >= self._refused.retry_at:
            self.cache.discard(self._refused.digest)
        return self.cache.fetch(served)

    async def _serve(self, wanted: LayerSet) -> None:
        """Have every process serve the set; raises ServiceError if they do not."""
        refused = self._refused if wanted.digest == self._refused.digest else Refused(wanted.digest)
        if time.monotonic() < refused.retry_at:
            raise LayerError(refused.reason)
        try:
            if self._desired.version == 0:
                await self._propose(wanted)
            else:
                await self.rollout.put_set(wanted.digest, wanted.layers)
                self._report(since=time.time())
        except (EngineDown, Draining):
            raise
        except ServiceError as error:
            retry_at = time.monotonic() + min(self.poll_s * 2 ** min(refused.count, 10), MAX_RETRY_S)
            is_damaged = isinstance(error, LayerError | LayerChanged)
            self._refused = Refused(wanted.digest, error.message, refused.count + 1, retry_at, is_damaged)
            raise
        self._refused = Refused()
        await self.registry.read(self._threads, self.cache.keep, wanted.digest)

    async def _propose(self, layer_set: LayerSet) -> None:
        """Load the first set and propose it as the desired state; raises LayerError or EngineDown."""
        await self.registry.load_set(layer_set.digest, layer_set.layers)
        self._report(since=time.time())
        self.channel.report(found=layer_set.layers, found_set=layer_set.digest)
