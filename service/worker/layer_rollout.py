"""LayerRollout: loads, replaces or unloads a layer at run time, in all processes or in none.

It runs in the process that received the request. Must not know: HTTP, how a process applies a desired state
(`worker/layer_registry.py`), how the others are notified (a callable).
Invariants: All processes together make one change at a time. No process serves the new layers before every process has them
ready. The caller gets success only when every process serves them. On any other outcome (a refusal, a crash, a timeout, a
disconnect) the change is rolled back; until then some processes may serve the new layer. The layer's name decides which file
is read; nothing else of the request reaches the file system.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol

from service.errors import Draining, InvalidInput, LayerChanged, LayerError, LayerMissing, LayerNotFound, NotReady
from service.layers.stored_layer import NAME
from service.supervisor.worker_status import State, WorkerStatus
from service.worker.desired_state import DesiredState, DesiredStateFile, Phase

ABORT_S = 2.0


class DigestReader(Protocol):
    """Reads digests from the layer directory (`worker/layer_registry.py`)."""

    async def digest(self, name: str) -> str: ...


class LayerRollout:
    """`notify` makes every process read the desired state. `timeout_s` limits each wait for the file or acknowledgements."""

    def __init__(
        self,
        directory: DigestReader,
        desired_file: DesiredStateFile,
        status: WorkerStatus,
        notify: Callable[[], None],
        timeout_s: float,
    ) -> None:
        self._directory = directory
        self._desired_file = desired_file
        self._status = status
        self._notify = notify
        self._timeout_s = timeout_s
        self._notified = asyncio.Event()
        self._is_closed = False

    def check(self) -> None:
        """Check the heartbeats again: a process may have acknowledged, or died."""
        self._notified.set()

    def close(self) -> None:
        """Abort a change in progress and begin no other, because the process drains."""
        self._is_closed = True
        self._notified.set()

    async def put(self, name: str) -> bool:
        """Make every process serve the layer's current file. Return True if the name is new."""
        _check_name(name)
        seen = self._settled_state().layers.get(name)
        # Read without the lock: a file may be slow to read, and most often there is nothing to change.
        digest = await self._digest(name)
        if self._is_served(name, digest):
            return False
        with self._locked_state() as desired:
            current = desired.layers.get(name)
            if current not in (seen, digest):
                raise LayerChanged("another change of this layer came first; nothing was changed")
            await self._roll_out(desired, name, digest)
            return current is None

    async def drop(self, name: str) -> None:
        """Make every process stop serving the layer."""
        _check_name(name)
        with self._locked_state() as desired:
            if name not in desired.layers:
                raise _not_served()
            await self._roll_out(desired, name, None)

    def _read_state(self) -> DesiredState:
        if self._is_closed:
            raise Draining("the service is shutting down and changes no layers")
        desired = self._desired_file.read()
        if desired is None:
            raise NotReady("layers are being loaded", retry_after_s=1)
        return desired

    def _settled_state(self) -> DesiredState:
        """Return the current state; raise NotReady while a change is in progress."""
        desired = self._read_state()
        if desired.phase is Phase.SETTLED:
            return desired
        with self._locked_state() as desired:
            return desired

    @contextlib.contextmanager
    def _locked_state(self) -> Iterator[DesiredState]:
        """Yield the current state under the lock, after aborting an abandoned change; raise NotReady if the lock is held."""
        with self._desired_file.locked() as has_lock:
            if not has_lock:
                raise NotReady("another change of layers is under way", retry_after_s=1)
            desired = self._read_state()
            yield desired if desired.phase is Phase.SETTLED else self._write(desired.abort())

    async def _digest(self, name: str) -> str:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._directory.digest(name)
        except TimeoutError:
            raise NotReady("the file could not be read in time; nothing was changed", retry_after_s=5) from None
        except LayerMissing:
            raise LayerNotFound("the layer directory has no file of that name") from None
        except LayerError as error:
            raise InvalidInput(error.message) from error

    async def _roll_out(self, desired: DesiredState, name: str, digest: str | None) -> None:
        pids = self._pids_of_all()
        # Outside the `try`: before this write there is nothing to abort.
        desired = self._write(desired.prepare(name, digest))
        try:
            await self._acknowledged(desired, self._timeout_s, pids)
            desired = self._write(desired.serve())
            await self._acknowledged(desired, self._timeout_s)
        except BaseException as error:
            aborted = self._write(desired.abort())
            if isinstance(error, NotReady | LayerChanged):
                with contextlib.suppress(NotReady, Draining):
                    await self._acknowledged(aborted, ABORT_S)
            raise
        self._write(desired.settle())

    def _write(self, desired: DesiredState) -> DesiredState:
        try:
            self._desired_file.write(desired)
        except OSError:
            raise NotReady("the run directory cannot be written", retry_after_s=5) from None
        self._notify()
        return desired

    async def _acknowledged(self, desired: DesiredState, timeout_s: float, pids: frozenset[int] = frozenset()) -> None:
        """Wait until every process has acknowledged the state. If one of `pids` ends, raise NotReady at once."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._have_all_acknowledged(desired, pids):
                    self._notified.clear()
                    await self._notified.wait()
        except TimeoutError:
            raise NotReady(
                "a process did not acknowledge the change in time; it was rolled back", retry_after_s=5
            ) from None

    def _have_all_acknowledged(self, desired: DesiredState, pids: frozenset[int]) -> bool:
        heartbeats = self._status.fresh()
        acknowledged = [heartbeat for heartbeat in heartbeats if heartbeat.desired == desired.version]
        if self._is_closed:
            raise Draining("the service is shutting down; the change was rolled back")
        for refusal in (heartbeat for heartbeat in acknowledged if heartbeat.refusal):
            if refusal.file_changed:
                raise LayerChanged("the layer's file changed while the processes loaded it; nothing was changed")
            raise NotReady(
                f"a process could not load the layer; the change was rolled back: {refusal.refusal}", retry_after_s=5
            )
        if pids - {heartbeat.pid for heartbeat in heartbeats}:
            raise NotReady("a process ended during the change; it was rolled back", retry_after_s=5)
        return len(acknowledged) >= self._status.expected_workers

    def _pids_of_all(self) -> frozenset[int]:
        """Return the pids of all processes; raise NotReady unless every process is up."""
        up = (State.READY, State.FAILED)
        pids = frozenset(
            heartbeat.pid for heartbeat in self._status.fresh() if heartbeat.state in up and heartbeat.desired
        )
        if len(pids) < self._status.expected_workers:
            raise NotReady(f"{len(pids)} of {self._status.expected_workers} processes are up", retry_after_s=5)
        return pids

    def _is_served(self, name: str, digest: str) -> bool:
        """Return whether every process serves this version and no change is in progress."""
        desired = self._read_state()
        if desired.phase is not Phase.SETTLED or desired.layers.get(name) != digest:
            return False
        ready = [heartbeat for heartbeat in self._status.fresh() if heartbeat.state is State.READY]
        return sum(heartbeat.desired == desired.version for heartbeat in ready) >= self._status.expected_workers


def _check_name(name: str) -> None:
    if NAME.fullmatch(name) is None:
        raise _not_served()


def _not_served() -> LayerNotFound:
    return LayerNotFound("no layer of that name is served; GET /v1/layers lists them")
