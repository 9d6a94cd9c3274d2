"""LayerRollout: loads, replaces or unloads a layer at run time, or exchanges the set, in all processes or in none.

It reads the layer's digest and asks the coordinator (`supervisor/coordinator.py`) for the rollout. Must not know: HTTP, how a
process applies a desired state (`worker/layer_registry.py`).
Invariants: The caller gets success only when every process serves the change. On any other outcome (a refusal, a crash, a
timeout, a disconnect) it is withdrawn or was rolled back. A process that drains, or gets no message from the supervisor, cannot
tell whether the change was complete. The layer's name decides which file is read; nothing else of the request reaches the file
system.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping

from service.errors import (
    Draining,
    InvalidInput,
    LayerChanged,
    LayerError,
    LayerMissing,
    LayerNotFound,
    LayerNotLoaded,
    LayersFixed,
    NotReady,
)
from service.layers.catalog import NOT_SERVED, Catalog, ServedLayer
from service.layers.directory import NAME
from service.observability.telemetry import Telemetry
from service.supervisor.status import Change, DesiredState, Phase, RolloutOutcome
from service.worker.control_channel import ControlChannel
from service.worker.layer_registry import LayerRegistry

# The coordinator aborts a change after `timeout_s`. If no answer has arrived this much later, the change is withdrawn.
REPLY_S = 10.0


@dataclasses.dataclass(eq=False, repr=False)
class LayerRollout:
    """Changes layers, one at a time; `timeout_s` limits the wait for the file, and then the wait for all processes.

    `fixed` says why no request may change the layers, and what does; empty: a request may.
    """

    registry: LayerRegistry
    channel: ControlChannel
    telemetry: Telemetry
    timeout_s: float
    fixed: str = ""
    _number: int = 0
    # Set while a change is in progress.
    _ended: asyncio.Future[tuple[RolloutOutcome, Catalog | None]] | None = None
    _is_closed: bool = False

    def check(self) -> None:
        """Check whether the outcome has arrived. Another change may follow at once, so keep the present catalog with it."""
        outcome, ended = self.channel.service.outcome, self._ended
        if ended is not None and outcome is not None and outcome.number == self._number and not ended.done():
            ended.set_result((outcome, self.registry.catalog))

    def close(self) -> None:
        """Withdraw a change in progress and begin no other, because the process drains."""
        self._is_closed = True
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(
                Draining("the service is shutting down; the change was withdrawn unless it was complete")
            )

    async def put(self, name: str) -> tuple[ServedLayer, bool]:
        """Make every process serve the layer's current file; return the layer and whether its name is new."""
        seen, reason = self._settled(name).layers, None
        try:
            # Read before the change begins: a file may be slow to read, and most often there is nothing to change.
            async with asyncio.timeout(self.timeout_s):
                digest = await self.registry.digest(name)
        except TimeoutError:
            raise NotReady("the file could not be read in time; nothing was changed", retry_after_s=5) from None
        except LayerMissing:
            raise LayerNotFound("ATTENTION_LAYERS_DIR of this service has no file of that name") from None
        except LayerError as error:
            self.telemetry.layer_refused(name, error)
            reason, is_invalid = error.message, not isinstance(error, LayerNotLoaded)
        # Raised outside the handler: the traceback of the caught error would keep the layer's tensors.
        if reason is not None:
            raise InvalidInput(reason) if is_invalid else NotReady(f"{reason}; nothing was changed", retry_after_s=5)
        catalog, is_new = await self._roll_out({name: digest}, seen)
        assert catalog is not None, "the change succeeded, but this process has no catalog. This is a bug."
        self.telemetry.layers_changed("put", name)
        return catalog.get(name), is_new

    async def drop(self, name: str) -> None:
        """Make every process stop serving the layer."""
        if name not in self._settled(name).layers:
            raise LayerNotFound(NOT_SERVED)
        await self._roll_out({name: None}, {})
        self.telemetry.layers_changed("drop", name)

    async def put_set(self, layer_set: str, layers: Mapping[str, str]) -> None:
        """Make every process serve these layers, of the set of that digest, and no other layer."""
        before = self._unchanging().layers
        await self._roll_out({**dict.fromkeys(before), **layers}, before, layer_set)

    def _settled(self, name: str) -> DesiredState:
        """Return the current state; raise LayersFixed, LayerNotFound for a name that no layer can have, Draining and NotReady."""
        if self.fixed:
            raise LayersFixed(self.fixed)
        if NAME.fullmatch(name) is None:
            raise LayerNotFound(NOT_SERVED)
        return self._unchanging()

    def _unchanging(self) -> DesiredState:
        """Return the current state; raise Draining after `close`, NotReady while layers are loaded or changed."""
        desired = self.channel.service.desired
        if self._is_closed:
            raise Draining("the service is shutting down and changes no layers")
        if desired.version == 0:
            raise NotReady("layers are being loaded", retry_after_s=1)
        if desired.phase is not Phase.SETTLED or self._ended is not None:
            raise NotReady("another change of layers is under way", retry_after_s=1)
        return desired

    async def _roll_out(
        self, layers: Mapping[str, str | None], before: Mapping[str, str], layer_set: str = ""
    ) -> tuple[Catalog | None, bool]:
        desired = self._unchanging()
        num_loads = sum(desired.layers.get(name) != digest for name, digest in layers.items())
        timeout_s = self.timeout_s * max(1, num_loads)
        seen = {name: before[name] for name in layers if name in before}
        self._number += 1
        self._ended = asyncio.get_running_loop().create_future()
        self.channel.report(change=Change(self._number, layers, seen, timeout_s, layer_set))
        try:
            async with asyncio.timeout(timeout_s + REPLY_S):
                outcome, catalog = await self._ended
        except TimeoutError:
            raise NotReady(
                "the supervisor does not answer; the change was withdrawn unless it was complete", retry_after_s=5
            ) from None
        finally:
            self._ended = None
            self.channel.report(change=None)
        if outcome.code:
            refused = LayerChanged if outcome.code == LayerChanged.code else NotReady
            raise refused(outcome.message, retry_after_s=int(outcome.retry_after_s or 1))
        return catalog, outcome.is_new
