"""Desired state: which layers every process serves, in one file that all processes watch.

Must not know: layers, engines, HTTP, how processes are notified of a new state (`supervisor/notification.py`).
Invariants: A state names digests, so a file that has changed since does not match. Versions only grow. Only the holder of the
lock writes, and the lock ends with the holder's process. An unreadable file is no state, never an exception.

A change has three states: PREPARE (serve `before`, have `layers` ready), SERVE (serve `layers`, keep `before` ready), SETTLED
(serve `layers`, release everything else). The first two can be aborted, to SETTLED with `before`. If the author of a change
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
    """One version of the state. `layers` and `before` map names to digests; `about` names the layer that changes."""

    version: int
    phase: Phase
    layers: Mapping[str, str]
    before: Mapping[str, str] = dataclasses.field(default_factory=dict)
    about: str = ""

    @property
    def served(self) -> Mapping[str, str]:
        return self.before if self.phase is Phase.PREPARE else self.layers

    @property
    def held(self) -> set[tuple[str, str]]:
        """The names and digests that a process keeps on its engine in this state."""
        return {*self.layers.items(), *({} if self.phase is Phase.SETTLED else self.before).items()}

    def prepare(self, about: str, digest: str | None) -> DesiredState:
        """Return the state that begins a change of one layer: another digest, or None to unload it."""
        layers = {name: known for name, known in self.layers.items() if name != about}
        layers |= {} if digest is None else {about: digest}
        return DesiredState(self.version + 1, Phase.PREPARE, layers, self.layers, about)

    def serve(self) -> DesiredState:
        return DesiredState(self.version + 1, Phase.SERVE, self.layers, self.before, self.about)

    def settle(self) -> DesiredState:
        return DesiredState(self.version + 1, Phase.SETTLED, self.layers)

    def take_back(self) -> DesiredState:
        assert self.phase is not Phase.SETTLED, "nothing is under way. This is a bug."
        return DesiredState(self.version + 1, Phase.SETTLED, self.before)

    @classmethod
    def parse(cls, text: bytes) -> DesiredState | None:
        """Return the state in a file, or None if the file holds none."""
        try:
            fields = json.loads(text)
            version, layers, before, about = (fields[name] for name in ("version", "layers", "before", "about"))
            desired = cls(version, Phase(fields["phase"]), layers, before, about)
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        is_whole = type(version) is int and isinstance(about, str) and _is_table(layers) and _is_table(before)
        return desired if is_whole else None


class DesiredStateFile:
    """`<directory>/desired_state`, and the lock file beside it that serializes changes."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "desired_state"
        self._lock = directory / "desired_state.lock"
        self._held: int | None = None  # the lock's descriptor while this process holds it

    def read(self) -> DesiredState | None:
        """Return the state, or None. It takes 40 µs on tmpfs, so the event loop may call it."""
        text = shared_file.read(self._path, MAX_FILE_BYTES)
        return None if text is None else DesiredState.parse(text)

    def begin(self, layers: Mapping[str, str]) -> DesiredState:
        """Return the first state: this one, or that of a quicker process. Raises OSError without a run directory."""
        desired = DesiredState(1, Phase.SETTLED, layers)
        return desired if shared_file.create(self._path, _text(desired)) else self.read() or desired

    def write(self, desired: DesiredState) -> None:
        """Write a state; the caller holds the lock. Raises OSError if the run directory is full, or it or the lock is gone."""
        if self._held is not None and not os.path.samestat(os.fstat(self._held), self._lock.stat()):
            raise FileNotFoundError(errno.ENOENT, "the lock was removed, and another process may hold a new one")
        shared_file.replace(self._path, _text(desired))

    @contextlib.contextmanager
    def locked(self) -> Iterator[bool]:
        """Yield whether the lock was free. It is held until the block ends or its file is removed. It never waits."""
        if self._held is not None:  # also if its file was removed meanwhile: the holder is still at work
            yield False
            return
        try:
            descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            yield False
            return
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield False
                return
            self._held = descriptor
            try:
                yield True
            finally:
                self._held = None
        finally:
            os.close(descriptor)


def _text(desired: DesiredState) -> bytes:
    return json.dumps(dataclasses.asdict(desired)).encode("ascii")


def _is_table(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(digest, str) for digest in value.values())
