"""Run directory: the files that the processes of one service share, made again where they were lost.

Lives here: the directory itself: who makes it, keeps it and removes it. Must not know: what is in the files.
Laws: every process of a service holds a shared lock (flock) on the directory itself, so one without a lock is left over from a
service that has ended, in whatever pid namespace that was; only directories of this user with such a name, without a lock and
with nothing else in them are removed; nothing is written through a link or into the directory of another user, who may have
made it in a place that all may write to.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from service.supervisor.processes import StartError

IN_MEMORY = Path("/dev/shm")  # noqa: S108 (mkdtemp makes the name and keeps others out)
# What the metrics of one process take (`observability/shared_values.py`, which costs the supervisor 12 MB to import).
METRICS_BYTES = 3 * 2**20
# Versions that held no lock named theirs without an ending.
_NAME = re.compile(r"attention-\d+-[a-z0-9_]{8}\.run")
_PARTS = frozenset({"metrics", "heartbeats", "refusal"})


class RunDirectory:
    """`attention-<pid>-….run` with `metrics/` and `heartbeats/`, as one process of the service knows it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / "metrics"
        self.heartbeats = path / "heartbeats"
        self._held: int | None = None

    @classmethod
    def make(cls, parent: Path | None, workers: int) -> Self:
        """A new one, for the supervisor of so many processes; raises StartError where it has no place.

        Without a `parent` in memory where Linux offers that: replacing a heartbeat takes 70 µs there, and 1.6 ms on ext4,
        which writes the new file out first. Those that killed supervisors left behind there are removed.
        """
        try:
            if parent is not None:
                parent.mkdir(parents=True, exist_ok=True)
            elif os.access(IN_MEMORY, os.W_OK):
                parent = IN_MEMORY
            _remove_left_over(Path(tempfile.gettempdir()) if parent is None else parent)
            return cls._made(parent, workers)
        except OSError as error:
            where = "the temporary directory" if parent is None else str(parent)
            raise StartError(f"cannot make a run directory in {where}: {error.strerror}") from None

    @classmethod
    def _made(cls, parent: Path | None, workers: int) -> Self:
        made = cls(Path(tempfile.mkdtemp(".run", f"attention-{os.getpid()}-", parent)))
        try:
            made.keep()
            with tempfile.TemporaryFile(dir=made.metrics) as space:
                os.posix_fallocate(space.fileno(), 0, workers * METRICS_BYTES)
        except OSError:
            made.leave()
            raise
        return made

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def keep(self) -> bool:
        """Makes what is missing of it and holds it; whether anything was missing. Raises OSError where that cannot be."""
        is_new = _make(self.path)
        self._hold()
        return any([is_new, _make(self.metrics), _make(self.heartbeats)])

    def leave(self) -> None:
        """The last process that leaves removes it."""
        if self._held is not None:
            os.close(self._held)
            self._held = None
        _remove_unheld(self.path)

    def bury(self, slot: int, pid: int) -> bool:
        """Forgets a dead process, in metrics and heartbeats; says whether it had become ready."""
        from service.supervisor.worker_status import State, read_heartbeat, remove_heartbeat  # noqa: PLC0415

        last = read_heartbeat(self.heartbeats, pid)
        with contextlib.suppress(OSError):
            remove_heartbeat(self.heartbeats, pid)  # first: from here on readiness says no
        with contextlib.suppress(OSError):
            # As prometheus_client's mark_process_dead does, which costs the supervisor 12 MB.
            for file in self.metrics.glob(f"gauge_live*_{slot}.db"):
                file.unlink()
        with contextlib.suppress(OSError):
            self.keep()  # also where the workers made it again: all of them may be dead by now
        return last is not None and last.state in {State.READY, State.DRAINING}

    def _hold(self) -> None:
        """Raises OSError, also where another start removes it: before it was held it looked left over."""
        if self._held is not None and os.path.samestat(os.fstat(self._held), self.path.lstat()):
            return
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(descriptor), self.path.lstat()):
                raise FileNotFoundError(errno.ENOENT, "it was removed")
        except OSError:
            os.close(descriptor)
            raise
        before, self._held = self._held, descriptor
        if before is not None:
            os.close(before)


def _make(path: Path) -> bool:
    """Whether it was missing; raises OSError where something else is in its place."""
    is_new = False
    if not os.path.lexists(path):
        with contextlib.suppress(FileExistsError):  # another process was quicker
            path.mkdir(mode=0o700, parents=True)
            is_new = True
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "something else is in its place")
    if found.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "it belongs to another user")
    return is_new


def _remove_left_over(parent: Path) -> None:
    """What services left there whose processes have all ended, some by force."""
    with contextlib.suppress(OSError):  # a place that may be written to and not looked at
        for path in list(parent.iterdir()):
            if _NAME.fullmatch(path.name):
                _remove_unheld(path)


def _remove_unheld(path: Path) -> None:
    """Where it is one of this user's and no process holds it, and there is nothing else in it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_uid == os.geteuid() and _PARTS.issuperset(part.name for part in path.iterdir()):
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(descriptor)
