"""Readiness: why this process is not ready, if it is not, and what it says of itself to the others.

Invariants: readiness follows the latest answers of the layers (`probes.py`), never a flag alone; no process is ready before it
listens; a process listens while it loads, unless other processes answer meanwhile.
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
    """What is asked of the batcher."""

    @property
    def is_alive(self) -> bool: ...


class Log(Protocol):
    """Who hears of it beside the board."""

    def ready(self, *, is_ready: bool, num_ready: int) -> None: ...

    def beats_failed(self, reason: str) -> None: ...

    def beats_again(self) -> None: ...

    def run_directory_made_again(self) -> None: ...


class Readiness:
    """One process's; made inside the event loop it runs on."""

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
        self._unwritten: str | None = None  # why the last beat did not reach the others
        self._has_begun = asyncio.Event()  # loaded, or never will be
        self._is_listening = False
        self._known: set[int] = set()  # processes that have been ready
        self._tell_joined: Callable[[], object] | None = None

    @property
    def reason(self) -> str:
        """Why no layer can be asked for."""
        return self._reason or LOADING

    async def may_listen(self) -> None:
        """Returns when the port may be opened: the kernel would send a process that loads what others could take."""
        if self._status.has_mates or any(beat.state is State.READY for beat in self._status.fresh()):
            await self._has_begun.wait()

    def when_joined(self, tell: Callable[[], object]) -> None:
        """Calls `tell` when a process has become ready that was not there before, while others were."""
        self._tell_joined = tell

    def listens(self) -> None:
        """The port is open: who hears now that this process is ready can come to it."""
        self._is_listening = True
        self.tell()

    def follows(self) -> None:
        """The layers are those of the roll."""
        if self._reason == LOADING:
            self._reason = None
        self._has_begun.set()
        self.tell()

    def drain(self) -> None:
        """No more from now on."""
        self.give_up(DRAINING)
        self.tell()

    def give_up(self, reason: str) -> None:
        """It will not be ready any more; the next beat tells."""
        self._reason = reason
        self._has_begun.set()

    def why_not(self) -> str | None:
        """This process's own reason first, then that of the others."""
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
        """One beat: the board and the log hear the state as it is now."""
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
        """Tries to tell the others; the next beat tries again."""
        try:
            if self._status.keep():
                self._log.run_directory_made_again()
            state = self._state(reason)
            trouble, file_changed = self._registry.objection or (None, False)
            self._status.write(state, reason, roll=self._reconciler.version, trouble=trouble, file_changed=file_changed)
        except OSError as error:
            return f"the run directory (ATTENTION_RUN_DIR) cannot be written: {error.strerror}"
        return None

    def _look_for_joined(self, ready: set[int], tell: Callable[[], object]) -> None:
        """A start is a joining as well: one that died before it was seen cannot be told from one that is late."""
        has_joined = bool(self._known) and not ready <= self._known
        self._known |= ready
        if has_joined:
            tell()

    def _state(self, reason: str | None) -> State:
        has_served = self._registry.catalog is not None
        if reason is None:
            return State.READY
        # Only a process that has served can drain: the supervisor starts those again, and not one that refused.
        if reason == DRAINING and has_served:
            return State.DRAINING
        return State.FAILED if has_served and self._is_listening else State.STARTING
