"""Desired state: which layers every process serves, in one file that all processes watch.

Must not know: layers, engines, HTTP, how processes are notified of a new state (`supervisor/notification.py`).
Invariants: A state names digests, so a file that has changed since does not match. Versions only grow. Only the holder of the
lock writes, and the lock ends with the holder's process. An unreadable file counts as no state, never as an exception.

A change has three states: PREPARE (serve `previous`, have `layers` ready), SERVE (serve `layers`, keep `previous` ready), SETTLED
(serve `layers`, release everything else). The first two can be aborted, to SETTLED with `previous`. If the author of a change
dies, the first process that finds the lock free aborts the change.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import errno
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from service.supervisor import shared_file

MAX_FILE_BYTES = 2**24


class Phase(enum.StrEnum):
    PREPARE = "prepare"
    SERVE = "serve"
    SETTLED = "settled"


@dataclasses.dataclass(frozen=True, slots=True)
class DesiredState:
    """One version of the state. `layers` and `previous` map names to digests; `changed_layer` is the name of one layer."""

    version: int
    phase: Phase
    layers: Mapping[str, str]
    previous: Mapping[str, str] = dataclasses.field(default_factory=dict)
    changed_layer: str = ""

    @property
    def served(self) -> Mapping[str, str]:
        return self.previous if self.phase is Phase.PREPARE else self.layers

    @property
    def loaded(self) -> set[tuple[str, str]]:
        """The names and digests that a process keeps on its engine in this state."""
        return {*self.layers.items(), *({} if self.phase is Phase.SETTLED else self.previous).items()}

    def prepare(self, name: str, digest: str | None) -> DesiredState:
        """Return the state that begins a change of one layer: another digest, or None to unload it."""
        layers = {other: known for other, known in self.layers.items() if other != name}
        layers |= {} if digest is None else {name: digest}
        return DesiredState(self.version + 1, Phase.PREPARE, layers, self.layers, name)

    def serve(self) -> DesiredState:
        return DesiredState(self.version + 1, Phase.SERVE, self.layers, self.previous, self.changed_layer)

    def settle(self) -> DesiredState:
        return DesiredState(self.version + 1, Phase.SETTLED, self.layers)

    def abort(self) -> DesiredState:
        assert self.phase is not Phase.SETTLED, "no change is in progress. This is a bug."
        return DesiredState(self.version + 1, Phase.SETTLED, self.previous)

    @classmethod
    def parse(cls, text: bytes) -> DesiredState | None:
        """Return the state in a file, or None if it is malformed."""
        try:
            fields = json.loads(text)
            found = cls(**{**fields, "phase": Phase(fields["phase"])})
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        is_whole = type(found.version) is int and isinstance(found.changed_layer, str)
        return found if is_whole and _is_table(found.layers) and _is_table(found.previous) else None


class DesiredStateFile:
    """`<directory>/desired_state`, and the lock file beside it that serializes changes."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "desired_state"
        self._lock = directory / "desired_state.lock"
        self._lock_descriptor: int | None = None  # set while this process holds the lock

    def read(self) -> DesiredState | None:
        """Return the state, or None. It takes 40 µs on tmpfs, so the event loop may call it."""
        text = shared_file.read(self._path, MAX_FILE_BYTES)
        return None if text is None else DesiredState.parse(text)

    def create(self, layers: Mapping[str, str]) -> DesiredState:
        """Write the first state, and return it or that of a quicker process; raise OSError without a run directory."""
        desired = DesiredState(1, Phase.SETTLED, layers)
        return desired if shared_file.create(self._path, _text(desired)) else self.read() or desired

    def write(self, desired: DesiredState) -> None:
        """Write a state; the caller holds the lock. Raise OSError if the run directory is full, or it or the lock is gone."""
        lock = self._lock_descriptor
        if lock is not None and not os.path.samestat(os.fstat(lock), self._lock.stat()):
            raise FileNotFoundError(errno.ENOENT, "the lock was removed, and another process may hold a new one")
        shared_file.replace(self._path, _text(desired))

    @contextlib.contextmanager
    def locked(self) -> Iterator[bool]:
        """Yield whether the lock was free. It is held until the block ends or its file is removed. It never waits."""
        descriptor = self._try_lock()
        if descriptor is None:
            yield False
            return
        self._lock_descriptor = descriptor
        try:
            yield True
        finally:
            self._lock_descriptor = None
            os.close(descriptor)

    def _try_lock(self) -> int | None:
        if self._lock_descriptor is not None:  # also if its file was removed meanwhile: the change is still in progress
            return None
        try:
            descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return None
        return descriptor


def _text(desired: DesiredState) -> bytes:
    return json.dumps(dataclasses.asdict(desired)).encode("ascii")


def _is_table(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(digest, str) for digest in value.values())
