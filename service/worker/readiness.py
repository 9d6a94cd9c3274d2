"""Readiness: decides whether this process is ready, and reports that to the other processes.

Invariants: Readiness follows the latest answers of the layers (`probes.py`), never a flag alone. No process is ready before it
listens. A process listens while it loads, unless other processes are ready.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from service.batching.batcher import Batcher
from service.supervisor.worker_status import State, WorkerStatus
from service.worker.layer_registry import LayerRegistry
from service.worker.probes import Probes
from service.worker.reconciler import Reconciler

LOADING = "layers are being loaded"
NOT_LISTENING = "the port is not open yet"
DRAINING = "draining"


class Log(Protocol):
    """Receives readiness changes besides the worker status (`observability/telemetry.py`)."""

    def readiness_changed(self, *, is_ready: bool, num_ready: int) -> None: ...

    def heartbeat_failed(self, reason: str) -> None: ...

    def heartbeat_recovered(self) -> None: ...

    def run_directory_recreated(self) -> None: ...


class Readiness:
    """One for each process; made inside the event loop it runs on."""

    def __init__(
        self,
        status: WorkerStatus,
        batcher: Batcher[Any, Any],
        registry: LayerRegistry,
        reconciler: Reconciler,
        probes: Probes,
        log: Log,
    ) -> None:
        self._status = status
        self._batcher = batcher
        self._registry = registry
        self._reconciler = reconciler
        self._probes = probes
        self._log = log
        self._reason: str | None = LOADING
        self._write_error: str | None = None  # why the last heartbeat was not written
        self._has_loaded = asyncio.Event()  # set when the layers are loaded, or never will be
        self._is_listening = False
        self._ready_before: set[int] = set()  # pids of processes that have been ready
        self._joined: Callable[[], object] | None = None

    @property
    def reason(self) -> str:
        """Why no layer can be served."""
        return self._reason or LOADING

    async def may_listen(self) -> None:
        """Return when the port may open. The kernel would give a loading process connections that others could serve."""
        if self._status.has_peers or any(heartbeat.state is State.READY for heartbeat in self._status.fresh()):
            await self._has_loaded.wait()

    def when_joined(self, joined: Callable[[], object]) -> None:
        """Have `joined` called when a new process becomes ready while others have been ready before."""
        self._joined = joined

    def port_opened(self) -> None:
        """Record that the port is open: a client can now reach this process once it reports ready."""
        self._is_listening = True
        self.report()

    def state_applied(self) -> None:
        """Record that the registry has applied the desired state."""
        if self._reason == LOADING:
            self._reason = None
        self._has_loaded.set()
        self.report()

    def drain(self) -> None:
        """Report this process as draining, from now on."""
        self.give_up(DRAINING)
        self.report()

    def give_up(self, reason: str) -> None:
        """Make this process not ready for good; the next heartbeat reports it."""
        self._reason = reason
        self._has_loaded.set()

    def why_not_ready(self) -> str | None:
        """Return this process's own reason first, then that of the others; None if all are ready."""
        return self._own_reason() or self._write_error or self._status.why_not_ready()

    def _own_reason(self) -> str | None:
        if self._reason is not None:
            return self._reason
        if not self._is_listening:
            return NOT_LISTENING
        if not self._batcher.is_alive:
            return "the engine is down"
        catalog = self._registry.catalog
        if catalog is None:
            return LOADING
        if catalog.awaited:
            return self._registry.fault or "a layer is missing"
        return self._probes.why_not_ready(catalog)

    def report(self) -> None:
        """Write one heartbeat, and report the current state to the log and the metrics."""
        reason = self._own_reason()
        before, self._write_error = self._write_error, self._write(reason)
        if self._write_error is not None and self._write_error != before:
            self._log.heartbeat_failed(self._write_error)
        elif self._write_error is None and before is not None:
            self._log.heartbeat_recovered()
        ready = {heartbeat.pid for heartbeat in self._status.fresh() if heartbeat.state is State.READY}
        self._log.readiness_changed(is_ready=reason is None and self._write_error is None, num_ready=len(ready))
        if self._joined is not None:
            # A process that starts late counts too: it looks like the replacement of one that died between two reports.
            has_joined = bool(self._ready_before) and not ready <= self._ready_before
            self._ready_before |= ready
            if has_joined:
                self._joined()

    def _write(self, reason: str | None) -> str | None:
        """Write the heartbeat, or return why that failed; the next one tries again."""
        try:
            if self._status.restore():
                self._log.run_directory_recreated()
            state = self._state(reason)
            refusal, file_changed = self._registry.refusal or (None, False)
            version = self._reconciler.version
            self._status.write(state, reason, desired=version, refusal=refusal, file_changed=file_changed)
        except OSError as error:
            return f"the run directory (ATTENTION_RUN_DIR) cannot be written: {error.strerror}"
        return None

    def _state(self, reason: str | None) -> State:
        has_served = self._registry.catalog is not None
        if reason is None:
            return State.READY
        # DRAINING tells the supervisor that the slot has served, so a process that refused to start must not report it.
        if reason == DRAINING and has_served:
            return State.DRAINING
        return State.FAILED if has_served and self._is_listening else State.STARTING
