"""Reconciler: keeps this process's layer registry in line with the desired state.

It makes the first load, and applies each desired state that the supervisor reports.
Must not know: HTTP, what a layer is, what decides the desired state.
Invariants: A state is acknowledged (`version`) only after the registry has applied as much of it as it can. While there is
no state (version 0), a process proposes what it found in the directory; then it serves what the state says, not what the
directory holds by then. A layer that could not be loaded is tried again after `retry_s`, because a missing file may return, and
not when another state arrives. After the first load, a state is no longer applied when another replaces it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from service.loop_time import Clock
from service.supervisor.status import DesiredState
from service.worker.control_channel import ControlChannel
from service.worker.layer_registry import LayerRegistry


class Reconciler:
    """Applies desired states to the registry, and calls `acknowledge` with the version of each."""

    def __init__(
        self,
        registry: LayerRegistry,
        channel: ControlChannel,
        clock: Clock,
        retry_s: float,
        acknowledge: Callable[[int], None],
    ) -> None:
        self._registry = registry
        self._channel = channel
        self._clock = clock
        self._retry_s = retry_s
        self._acknowledge = acknowledge
        self._checked = asyncio.Event()
        self.applied = DesiredState()  # version 0 before the first
        self._applying: tuple[DesiredState, asyncio.Task[None]] | None = None
        self._retry_at = 0.0

    def check(self) -> None:
        """Check for another state or a due retry; stop applying a state that was replaced."""
        self._checked.set()
        if self._applying is not None and self._channel.service.desired.version != self._applying[0].version:
            self._applying[1].cancel()

    async def load(self, *, strict: bool) -> None:
        """Load the first layers; raises LayerError if the directory cannot be served."""
        while not self._channel.has_heard:
            await self._check()
        if self._channel.service.desired.version == 0:
            self._channel.report(found=await self._registry.load_directory(strict=strict))
        while self._channel.service.desired.version == 0:
            await self._check()
        self._channel.report(found=None)
        await self._apply(self._channel.service.desired)

    async def run(self) -> None:
        """Apply every new state, until cancelled."""
        while True:
            await self._check()
            desired = self._channel.service.desired
            if desired.version != self.applied.version or (
                self._registry.fault and self._clock.now() >= self._retry_at
            ):
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
        is_retry, had_fault = desired.version == self.applied.version, self._registry.fault is not None
        await self._registry.apply(desired, is_retry=is_retry)
        self.applied = desired
        if is_retry or not had_fault:  # frequent changes of other layers must not put a retry off
            self._retry_at = self._clock.now() + self._retry_s
        self._acknowledge(desired.version)
