"""KeyFile: the keys in force, reloaded while the service runs, so that keys change without a restart.

Invariants: the file is read in a thread; the event loop only replaces one ring by another. A file that cannot be used changes
nothing and is reported once. No keys are in force before the first reading, which must succeed.

A change is taken one check after it is seen, because a file that is written in place is empty or torn for a moment. So it is
in force after at most two checks.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Protocol

from service.api.auth.key_ring import KeyRing, KeysError, KeysUnread, read_keys

CHECK_S = 1.0

Stamp = tuple[int, ...]


class KeyListener(Protocol):
    """Receives each change of the keys (`observability/telemetry.py`)."""

    def keys_taken(self, ring: KeyRing) -> None: ...

    def keys_refused(self, error: KeysError) -> None: ...


class KeyFile:
    """`ring` holds the keys in force; `open` reads them first, `watch` reloads them when the file changes."""

    def __init__(self, path: Path, listener: KeyListener) -> None:
        self.ring = KeyRing()
        self._path = path
        self._listener = listener
        self._taken: Stamp | None = None
        self._is_settling = False
        self._reported: str | None = None

    async def open(self) -> None:
        """Read the keys for the first time; raise KeysError if the file cannot be used."""
        self.ring = await asyncio.to_thread(self._first)
        self._listener.keys_taken(self.ring)

    async def watch(self) -> None:
        """Check the file every CHECK_S seconds until cancelled."""
        while True:
            await asyncio.sleep(CHECK_S)
            await self.look()

    async def look(self) -> None:
        found = await asyncio.to_thread(self._changed)
        if isinstance(found, KeyRing):
            self.ring = found
            self._listener.keys_taken(found)
        elif found is not None:
            self._listener.keys_refused(found)

    def _first(self) -> KeyRing:
        # The stamp is taken before the content: the next check sees a write in between.
        self._taken = _stamp(self._path)
        return read_keys(self._path)

    def _changed(self) -> KeyRing | KeysError | None:
        """Return the keys or the error that a change of the file leads to; None if there is nothing to report yet."""
        stamp = _stamp(self._path)
        self._is_settling = stamp != self._taken and not self._is_settling
        if stamp == self._taken or self._is_settling:
            return None
        self._taken = stamp
        reported, self._reported = self._reported, None
        try:
            return read_keys(self._path)
        except KeysUnread as error:
            # The next check tries again (no descriptor was free, a file server was away); the error is reported once.
            self._taken, self._reported = None, error.message
            return None if error.message == reported else error
        except KeysError as error:
            return error


def _stamp(path: Path) -> Stamp | None:
    """Return values that differ whenever the file does; None without a file. Follows links: mounted secrets swap those."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
