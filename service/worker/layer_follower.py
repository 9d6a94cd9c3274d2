"""Layer follower: looks at ATTENTION_LAYERS_SOURCE, and has every process serve its set once all of it is here.

Must not know: HTTP, how a process applies a desired state.
Invariants: One process of a service follows the source: the one that has the lock of the layer directory. A fault changes nothing
that is served; it is reported in the status, and logged when it begins. A service starts with the set that it served last.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from service.errors import Draining, LayerChanged, LayerError, LayerNotLoaded, NotReady
from service.layers.layer_set import LayerSet, SetCache
from service.observability.telemetry import Telemetry
from service.supervisor.status import DesiredState, Phase, SourceStatus
from service.worker.control_channel import ControlChannel
from service.worker.layer_registry import LayerRegistry
from service.worker.layer_rollout import LayerRollout

JITTER = 0.25
# How often a read that may hang is checked.
CHECK_S = 1.0
# A set that could not be served is tried again after so many looks: to load layers costs time and memory.
RETRY_LOOKS = 6
FIXED = "the layers here are those of ATTENTION_LAYERS_SOURCE; publish another set there with `layers publish`"
HANGS = "the source does not answer"
NO_LEADER = "another process follows the source; if it is of another service, set an ATTENTION_LAYERS_DIR for each"


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
    # The set that could not be served: its digest, why, and until when it is not tried again.
    _refused: tuple[str, str, float] = ("", "", 0.0)
    _thread: ThreadPoolExecutor = dataclasses.field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="layers-source")
    )

    async def run(self) -> None:
        """Look at the source again and again, until cancelled."""
        await self.heard.wait()
        while True:
            if self._desired.phase is Phase.SETTLED:
                await self.look()
            await asyncio.sleep(self.poll_s * random.uniform(1 - JITTER, 1 + JITTER))  # noqa: S311 (spreads the replicas)

    async def look(self) -> None:
        """Look once; raises EngineDown only."""
        try:
            if not await self.registry.read(self._thread, self.cache.lead):
                if self._desired.version == 0:
                    self.registry.fault = NO_LEADER if self.channel.service.source is None else None
                return
            if self._desired.version == 0 and (last := await self.registry.read(self._thread, self.cache.last_served)):
                with contextlib.suppress(LayerError):  # the set of the source may do
                    await self._propose(last)
                    return
            wanted = await self._fetched()
            if wanted.digest != self._desired.layer_set:
                await self._serve(wanted)
        except (LayerError, LayerChanged, NotReady) as error:
            self._fail(error.message)
        except Draining:
            return
        else:
            self.telemetry.source_checked(is_recovered=bool(self._status.fault))
            self._report(fault="", checked=time.time())

    def close(self) -> None:
        """Let another process follow the source, once a read in progress has ended."""
        self._thread.submit(self.cache.close)
        self._thread.shutdown(wait=False)

    @property
    def _desired(self) -> DesiredState:
        return self.channel.service.desired

    @property
    def _status(self) -> SourceStatus:
        return self.channel.status.source or self.channel.service.source or SourceStatus()

    def _report(self, **fields: Any) -> None:
        self.channel.report(source=dataclasses.replace(self._status, **fields))

    def _fail(self, reason: str) -> None:
        if reason != self._status.fault:
            self.telemetry.source_failed(reason)
        self._report(fault=reason)

    async def _fetched(self) -> LayerSet:
        """Return the source's set, which is here; a read that may hang is watched."""
        task = asyncio.ensure_future(self.registry.read(self._thread, self.cache.fetch, self._desired.layer_set))
        try:
            while not (await asyncio.wait({task}, timeout=CHECK_S))[0]:
                if time.monotonic() > self.cache.source.late_at:
                    self._fail(HANGS)
            return task.result()
        finally:
            task.cancel()

    async def _serve(self, wanted: LayerSet) -> None:
        """Have every process serve the set; raises ServiceError if they do not."""
        digest, reason, until = self._refused
        if wanted.digest == digest and time.monotonic() < until:
            raise LayerError(reason)
        try:
            if self._desired.version == 0:
                await self._propose(wanted)
            else:
                await self.rollout.put_set(wanted.digest, wanted.layers)
                self._report(since=time.time())
        except (LayerError, LayerChanged, NotReady) as error:
            self._refused = (wanted.digest, error.message, time.monotonic() + RETRY_LOOKS * self.poll_s)
            if not isinstance(error, LayerNotLoaded | NotReady):  # its files may have been damaged here
                await self.registry.read(self._thread, self.cache.discard, wanted.digest)
            raise
        await self.registry.read(self._thread, self.cache.keep, wanted.digest)

    async def _propose(self, layer_set: LayerSet) -> None:
        """Load the first set and propose it as the desired state; raises LayerError or EngineDown."""
        await self.registry.load_set(layer_set.digest, layer_set.layers)
        self._report(since=time.time())
        self.channel.report(found=layer_set.layers, found_set=layer_set.digest)
