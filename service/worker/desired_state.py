"""The roll: which layers every process of the service is to serve, in one file that all of them watch.

Lives here: the roll as a value, and the book that it is read from and written to.
Must not know: layers, engines, HTTP, how the processes are told that there is something to read (`supervisor/notification.py`).
Laws: a roll names digests, so that a file which has changed since is not what is meant; versions only grow; only who holds
the lock writes, and the lock goes with its holder's life; what cannot be read is no roll, never an exception.

A change has three rolls: PREPARE (serve `before`, have `layers` ready), SERVE (serve `layers`, keep `before` ready), SETTLED
(serve `layers`, let everything else go). From the first two there is a way back, SETTLED with `before`; one whose author died
is taken back by whoever sees that the lock is free.
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
    """`layers` and `before` give each name its digest; `about` is the layer that a change is about."""

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
        """The names and digests that a process has on its engine while this roll holds."""
        return {*self.layers.items(), *({} if self.phase is Phase.SETTLED else self.before).items()}

    def prepare(self, about: str, digest: str | None) -> DesiredState:
        """A change of one layer: another digest, or None for none."""
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
        """The roll in a file, or None where it is not one."""
        try:
            fields = json.loads(text)
            version, layers, before, about = (fields[name] for name in ("version", "layers", "before", "about"))
            roll = cls(version, Phase(fields["phase"]), layers, before, about)
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        is_whole = type(version) is int and isinstance(about, str) and _is_table(layers) and _is_table(before)
        return roll if is_whole else None


class DesiredStateFile:
    """`<directory>/roll`, and the lock beside it that makes changes come one after another."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "roll"
        self._lock = directory / "roll.lock"
        self._held: int | None = None  # the lock's descriptor while it is ours

    def read(self) -> DesiredState | None:
        """40 µs on tmpfs, so it is read on the event loop."""
        text = shared_file.read(self._path, MAX_FILE_BYTES)
        return None if text is None else DesiredState.parse(text)

    def begin(self, layers: Mapping[str, str]) -> DesiredState:
        """The first roll: ours, or that of the process which was quicker; raises OSError without a run directory."""
        roll = DesiredState(1, Phase.SETTLED, layers)
        return roll if shared_file.create(self._path, _text(roll)) else self.read() or roll

    def write(self, roll: DesiredState) -> None:
        """For the holder of the lock; raises OSError where the run directory is gone or full, or the lock with it."""
        if self._held is not None and not os.path.samestat(os.fstat(self._held), self._lock.stat()):
            raise FileNotFoundError(errno.ENOENT, "the lock was removed, and another process may hold a new one")
        shared_file.replace(self._path, _text(roll))

    @contextlib.contextmanager
    def locked(self) -> Iterator[bool]:
        """Whether the lock was free; it is held until the end of the block, or until its file is removed. It never waits."""
        if self._held is not None:  # also where its file was removed meanwhile: the holder is still at work
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


def _text(roll: DesiredState) -> bytes:
    return json.dumps(dataclasses.asdict(roll)).encode("ascii")


def _is_table(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(digest, str) for digest in value.values())
