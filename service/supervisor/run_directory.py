"""Run directory: makes, keeps and removes the directory of files that the processes of one service share.

It is made again if it is lost. Independent of what is in the files.
Invariants: Every process of a service holds a shared lock (flock) on the directory. So one without a lock is left over from a
service that has ended, in whatever pid namespace. Only directories of this user with such a name, without a lock and with nothing
else in them are removed. Nothing is written through a link or into another user's directory, which may lie in a place that all
may write to.
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
# Size of one process's metrics (`observability/shared_values.py`, whose import would cost the supervisor 12 MB).
METRICS_BYTES = 3 * 2**20
# Versions that held no lock used names without this ending.
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
        """Make a new one for the supervisor of that many processes; raise StartError if it cannot be made.

        Without a `parent` it is in memory if Linux offers that: replacing a heartbeat takes 70 µs there, and 1.6 ms on ext4,
        which writes the new file out first. Directories that killed supervisors left behind there are removed.
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
        """Make what is missing of it and lock it; return whether anything was missing. Raise OSError if that fails."""
        is_new = _make(self.path)
        self._hold()
        return any([is_new, _make(self.metrics), _make(self.heartbeats)])

    def leave(self) -> None:
        """Give up the lock; the last process that leaves removes the directory."""
        if self._held is not None:
            os.close(self._held)
            self._held = None
        _remove_unheld(self.path)

    def bury(self, slot: int, pid: int) -> bool:
        """Remove a dead process's live metrics and heartbeat; return whether it had become ready."""
        from service.supervisor.worker_status import State, read_heartbeat, remove_heartbeat  # noqa: PLC0415

        last = read_heartbeat(self.heartbeats, pid)
        with contextlib.suppress(OSError):
            remove_heartbeat(self.heartbeats, pid)  # first: from now on the service is not ready
        with contextlib.suppress(OSError):
            # As prometheus_client's mark_process_dead does, whose import would cost the supervisor 12 MB.
            for file in self.metrics.glob(f"gauge_live*_{slot}.db"):
                file.unlink()
        with contextlib.suppress(OSError):
            self.keep()  # the workers may have made it again, and all of them may be dead by now
        return last is not None and last.state in {State.READY, State.DRAINING}

    def _hold(self) -> None:
        """Lock the directory. Raise OSError, also if another start removes it: before it was locked it looked left over."""
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
    """Make a directory; return whether it was missing. Raise OSError if something else is in its place."""
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
    """Remove what services left there whose processes have all ended, some of them killed."""
    with contextlib.suppress(OSError):  # the parent may be writable and not readable
        for path in list(parent.iterdir()):
            if _NAME.fullmatch(path.name):
                _remove_unheld(path)


def _remove_unheld(path: Path) -> None:
    """Remove a directory of this user that no process holds and that has nothing else in it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_uid == os.geteuid() and _PARTS.issuperset(part.name for part in path.iterdir()):
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(descriptor)
