"""Run directory: makes, restores and removes the directory of files that the processes of one service share.

Independent of what is in the files.
Invariants: Every process of a service holds a shared lock (flock) on the directory. A directory without a lock belongs to a
service that has ended, in whatever pid namespace, or to one that has just made it and then makes another. Only such directories
of this user are removed, and only if they hold nothing else than metrics. Nothing is written through a link or into another
user's directory, because the parent may be writable by all.
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
from typing import Self

from service.supervisor.processes import StartError

IN_MEMORY = Path("/dev/shm")  # noqa: S108 (mkdtemp makes the name and keeps others out)
# Size of one process's metrics (`observability/shared_values.py`, whose import would cost the supervisor 12 MB).
METRICS_BYTES = 3 * 2**20
# The ending excludes the directories of earlier versions, which hold no lock.
_NAME = re.compile(r"attention-\d+-[a-z0-9_]{8}\.run")
# Each service that starts removes a directory that has no lock yet at most once.
_MAX_TRIES = 100


class RunDirectory:
    """`attention-<pid>-….run` with `metrics/`, as one process of the service knows it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / "metrics"
        self._lock_descriptor: int | None = None

    @classmethod
    def make(cls, parent: Path | None, workers: int) -> Self:
        """Make a new one for the supervisor of that many processes; raise StartError if it cannot be made.

        Without a `parent` it is in memory if Linux offers that, so that no disk delays the event loop. It removes the directories
        that killed services left there.
        """
        try:
            if parent is not None:
                parent.mkdir(parents=True, exist_ok=True)
            elif os.access(IN_MEMORY, os.W_OK):
                parent = IN_MEMORY
            with contextlib.suppress(OSError):  # the parent may be writable and not readable
                for path in list((parent or Path(tempfile.gettempdir())).iterdir()):
                    if _NAME.fullmatch(path.name):
                        _remove_unlocked(path)
            made = cls._make_locked(parent)
            try:
                made.restore()
                with tempfile.TemporaryFile(dir=made.metrics) as space:
                    os.posix_fallocate(space.fileno(), 0, workers * METRICS_BYTES)
            except OSError:
                made.close()
                raise
        except OSError as error:
            where = "the temporary directory" if parent is None else str(parent)
            raise StartError(f"cannot make a run directory in {where}: {error.strerror}") from None
        return made

    @classmethod
    def _make_locked(cls, parent: Path | None) -> Self:
        for _ in range(_MAX_TRIES):
            made = cls(Path(tempfile.mkdtemp(".run", f"attention-{os.getpid()}-", parent)))
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                made._lock()
                return made
        raise FileNotFoundError(errno.ENOENT, "services that start at the same time remove it")

    def restore(self) -> bool:
        """Make the missing parts and lock the directory; return whether a part was missing.

        Raise OSError if it cannot be made or written.
        """
        is_new = _make(self.path)
        self._lock()
        is_new |= _make(self.metrics)
        with tempfile.TemporaryFile(dir=self.metrics, buffering=0) as file:
            file.write(b"1")
        return is_new

    def close(self) -> None:
        """Release the lock; the last process removes the directory."""
        if self._lock_descriptor is not None:
            os.close(self._lock_descriptor)
            self._lock_descriptor = None
        _remove_unlocked(self.path)

    def clean_up(self, slot: int) -> None:
        """Remove a dead process's live metrics."""
        with contextlib.suppress(OSError):
            # The same as prometheus_client's mark_process_dead, whose import would cost the supervisor 12 MB.
            for file in self.metrics.glob(f"gauge_live*_{slot}.db"):
                file.unlink(missing_ok=True)
            self.restore()  # workers may have made it again and died since, so that this process holds no lock on it

    def _lock(self) -> None:
        """Lock the directory. Raise OSError, also if a starting service has removed it because it had no lock yet."""
        if self._lock_descriptor is not None and os.path.samestat(os.fstat(self._lock_descriptor), self.path.lstat()):
            return
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(descriptor), self.path.lstat()):
                raise FileNotFoundError(errno.ENOENT, "it was removed")
        except OSError:
            os.close(descriptor)
            raise
        before, self._lock_descriptor = self._lock_descriptor, descriptor
        if before is not None:
            os.close(before)


def _make(path: Path) -> bool:
    """Make a directory; return whether it was missing. Raise OSError if something else is in its place."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
        return True
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "something else is in its place")
    if found.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "it belongs to another user")
    return False


def _remove_unlocked(path: Path) -> None:
    """Remove a directory of this user that no process has locked and that has nothing else in it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_uid == os.geteuid() and {part.name for part in path.iterdir()} <= {"metrics"}:
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(descriptor)
