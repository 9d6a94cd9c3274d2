"""Readiness: decides whether this process is ready, and reports that to the other processes.

Invariants: Readiness follows the latest answers of the layers (`probes.py`), never a flag alone. No process is ready before it
listens. A process listens while it loads, unless other processes answer meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from service.supervisor.worker_status import State, WorkerStatus
from service.worker.layer_registry import LayerRegistry
from service.worker.probes import Probes
from service.worker.reconciler import Reconciler

LOADING = "layers are being loaded"
NOT_LISTENING = "the port is not open yet"
DRAINING = "draining"


class WaitingRoom(Protocol):
    """The part of the batcher that readiness depends on."""

    @property
    def is_alive(self) -> bool: ...


class Log(Protocol):
    """Receives readiness changes besides the worker status."""

    def ready(self, *, is_ready: bool, num_ready: int) -> None: ...

    def beats_failed(self, reason: str) -> None: ...

    def beats_again(self) -> None: ...

    def run_directory_made_again(self) -> None: ...


class Readiness:
    """One for each process; made inside the event loop it runs on."""

    def __init__(
        self,
        status: WorkerStatus,
        batcher: WaitingRoom,
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
        self._unwritten: str | None = None  # why the last heartbeat was not written
        self._has_begun = asyncio.Event()  # set when the layers are loaded, or never will be
        self._is_listening = False
        self._known: set[int] = set()  # processes that have been ready
        self._tell_joined: Callable[[], object] | None = None

    @property
    def reason(self) -> str:
        """Why no layer can be served."""
        return self._reason or LOADING

    async def may_listen(self) -> None:
        """Return when the port may open. The kernel would give a loading process connections that others could serve."""
        if self._status.has_peers or any(beat.state is State.READY for beat in self._status.fresh()):
            await self._has_begun.wait()

    def when_joined(self, tell: Callable[[], object]) -> None:
        """Have `tell` called when a new process becomes ready while others have been ready before."""
        self._tell_joined = tell

    def listens(self) -> None:
        """Record that the port is open: a client can now reach this process once it reports ready."""
        self._is_listening = True
        self.tell()

    def follows(self) -> None:
        """Record that the registry has applied the desired state."""
        if self._reason == LOADING:
            self._reason = None
        self._has_begun.set()
        self.tell()

    def drain(self) -> None:
        """Report this process as draining, from now on."""
        self.give_up(DRAINING)
        self.tell()

    def give_up(self, reason: str) -> None:
        """Make this process not ready for good; the next heartbeat reports it."""
        self._reason = reason
        self._has_begun.set()

    def why_not(self) -> str | None:
        """Return this process's own reason first, then that of the others; None if all are ready."""
        return self._own_reason() or self._unwritten or self._status.why_not_ready()

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
            return self._registry.trouble or "a layer is missing"
        return self._probes.why_not_ready(catalog)

    def tell(self) -> None:
        """Write one heartbeat: the worker status and the log get the current state."""
        reason = self._own_reason()
        before, self._unwritten = self._unwritten, self._why_not_written(reason)
        if self._unwritten is not None and self._unwritten != before:
            self._log.beats_failed(self._unwritten)
        elif self._unwritten is None and before is not None:
            self._log.beats_again()
        ready = [beat for beat in self._status.fresh() if beat.state is State.READY]
        self._log.ready(is_ready=reason is None and self._unwritten is None, num_ready=len(ready))
        if self._tell_joined is not None:
            self._look_for_joined({beat.pid for beat in ready}, self._tell_joined)

    def _why_not_written(self, reason: str | None) -> str | None:
        """Write the worker status, or return why that failed; the next heartbeat tries again."""
        try:
            if self._status.restore():
                self._log.run_directory_made_again()
            state = self._state(reason)
            trouble, file_changed = self._registry.objection or (None, False)
            self._status.write(
                state, reason, desired=self._reconciler.version, trouble=trouble, file_changed=file_changed
            )
        except OSError as error:
            return f"the run directory (ATTENTION_RUN_DIR) cannot be written: {error.strerror}"
        return None

    def _look_for_joined(self, ready: set[int], tell: Callable[[], object]) -> None:
        """Call `tell` if a process joined. A late start counts: it looks like the successor of one that died unseen."""
        has_joined = bool(self._known) and not ready <= self._known
        self._known |= ready
        if has_joined:
            tell()

    def _state(self, reason: str | None) -> State:
        has_served = self._registry.catalog is not None
        if reason is None:
            return State.READY
        # Only a process that has served can drain: the supervisor restarts those, not one that refused to start.
        if reason == DRAINING and has_served:
            return State.DRAINING
        return State.FAILED if has_served and self._is_listening else State.STARTING
