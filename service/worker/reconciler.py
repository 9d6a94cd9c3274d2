"""Reconciler: keeps this process's layer registry in line with the desired state.

It makes the first load, reads the desired state at every notification, and aborts a change whose author died.
Must not know: HTTP, what a layer is, the sender of a notification.
Invariants: A state is acknowledged (`version`) only after the registry has applied as much of it as it can. The first process
writes the first state; later processes serve what the state says, not what the directory holds by then. A lost state is written
again by a process that applied it; of several, by one that applied the latest. A layer that could not be loaded is tried again
after `retry_s`, because a missing file may return. The application of a state stops when another state replaces it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from service.errors import NotReady
from service.loop_time import Clock
from service.worker.desired_state import DesiredState, DesiredStateFile, Phase
from service.worker.layer_registry import LayerRegistry

# How long a process waits for the others to rewrite a lost state, which they do at their next heartbeat.
DESIRED_STATE_S = 10.0


class Reconciler:
    """`acknowledge` is called when a state has been applied. With `has_peers` the process serves what the others serve."""

    def __init__(
        self,
        registry: LayerRegistry,
        desired_file: DesiredStateFile,
        clock: Clock,
        retry_s: float,
        acknowledge: Callable[[], None],
        *,
        has_peers: bool = False,
    ) -> None:
        self._registry = registry
        self._desired_file = desired_file
        self._clock = clock
        self._retry_s = retry_s
        self._acknowledge = acknowledge
        self._has_peers = has_peers
        self._notified = asyncio.Event()
        self._applied: DesiredState | None = None
        self._applying: tuple[DesiredState, asyncio.Task[None]] | None = None
        self._retry_at = 0.0

    @property
    def version(self) -> int:
        """Version of the state that was applied last; 0 before the first."""
        return 0 if self._applied is None else self._applied.version

    def check(self) -> None:
        """Check for another state or a due retry; stop applying a state that was replaced."""
        self._notified.set()
        if self._applying is not None:
            desired, task = self._applying
            if (found := self._desired_file.read()) is not None and found.version != desired.version:
                task.cancel()

    async def load(self, *, strict: bool) -> None:
        """Load the first layers. Raises LayerError if the directory cannot be served, NotReady if the others have no state."""
        desired = await self._state_of_peers() if self._has_peers else self._desired_file.read()
        if desired is None:
            desired = self._create_state(await self._registry.load_directory(strict=strict))
        await self._apply(desired)

    async def run(self) -> None:
        """Apply every new state, until cancelled."""
        while True:
            await self._notified.wait()
            self._notified.clear()
            desired = self._desired_file.read()
            if desired is None or self._is_stale(desired):
                desired = self._rewrite()
            elif desired.phase is not Phase.SETTLED:
                desired = self._abort_if_abandoned(desired)
            if desired.version != self.version or (self._registry.fault and self._clock.now() >= self._retry_at):
                await self._apply_until_replaced(desired)

    async def _apply_until_replaced(self, desired: DesiredState) -> None:
        """Apply a state until another replaces it: loading for an aborted change may be slow, and the next must not wait."""
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
        await self._registry.apply(desired)
        self._applied = desired
        self._retry_at = self._clock.now() + self._retry_s
        self._acknowledge()

    async def _state_of_peers(self) -> DesiredState:
        try:
            async with asyncio.timeout(DESIRED_STATE_S):
                while (desired := self._desired_file.read()) is None:
                    await self._notified.wait()
                    self._notified.clear()
        except TimeoutError:
            raise NotReady(
                "the others serve layers, and the run directory does not say which", retry_after_s=5
            ) from None
        return desired

    def _is_stale(self, found: DesiredState) -> bool:
        """Return whether a process that did not know the applied state has written another."""
        return found.version <= self.version and found != self._applied

    def _rewrite(self) -> DesiredState:
        """Write the agreed state again after the run directory was emptied; this aborts a change in progress."""
        applied = self._applied
        assert applied is not None, "load() comes before run(). This is a bug."
        layers = applied.layers if applied.phase is Phase.SETTLED else applied.previous
        with self._desired_file.locked() as has_lock:
            found = self._desired_file.read()
            if found is not None and not self._is_stale(found):
                return found
            with contextlib.suppress(OSError):
                if has_lock:
                    again = DesiredState(applied.version + 1, Phase.SETTLED, layers)
                    self._desired_file.write(again)
                    return again
        return applied

    def _create_state(self, layers: Mapping[str, str]) -> DesiredState:
        try:
            return self._desired_file.create(layers)
        except OSError:  # without a run directory this process serves what it found, alone
            return DesiredState(max(1, self.version), Phase.SETTLED, layers)

    def _abort_if_abandoned(self, desired: DesiredState) -> DesiredState:
        """Return the state itself while its author holds the lock; else abort the change and return the result."""
        with self._desired_file.locked() as has_lock:
            if not has_lock:
                return desired
            found = self._desired_file.read() or desired
            if found.phase is not Phase.SETTLED:
                found = found.abort()
                with contextlib.suppress(OSError):
                    self._desired_file.write(found)
            return found
