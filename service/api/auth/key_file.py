"""Key file: the keys in force, looked at again while the service runs, so that keys come and go without a restart.

Laws: nothing of it happens on the event loop but the exchange of one ring for another; a file that cannot be used changes
nothing and is told once; no keys are in force before the first reading, which must succeed.

A change is taken one look after it was seen, since a file that is written in place is empty or torn for a moment. So it is
in force after two looks at most.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Protocol

from service.api.auth.key_ring import KeyRing, KeysError, KeysUnread, read_keys

LOOK_S = 1.0

Stamp = tuple[int, ...]


class KeyListener(Protocol):
    """Who hears of a change (`observability/telemetry.py`)."""

    def keys_taken(self, ring: KeyRing) -> None: ...

    def keys_refused(self, error: KeysError) -> None: ...


class KeyFile:
    """`ring` is what is in force; `open` reads it first, `watch` keeps it as the file is."""

    def __init__(self, path: Path, listener: KeyListener) -> None:
        self.ring = KeyRing()
        self._path = path
        self._listener = listener
        self._taken: Stamp | None = None
        self._is_settling = False
        self._told: str | None = None

    async def open(self) -> None:
        """Raises KeysError."""
        self.ring = await asyncio.to_thread(self._first)
        self._listener.keys_taken(self.ring)

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        found = await asyncio.to_thread(self._changed)
        if isinstance(found, KeyRing):
            self.ring = found
            self._listener.keys_taken(found)
        elif found is not None:
            self._listener.keys_refused(found)

    def _first(self) -> KeyRing:
        # The stamp before the content: what is written in between shows at the next look.
        self._taken = _stamp(self._path)
        return read_keys(self._path)

    def _changed(self) -> KeyRing | KeysError | None:
        """What a change of the file came to; None where there is none to be taken yet."""
        stamp = _stamp(self._path)
        self._is_settling = stamp != self._taken and not self._is_settling
        if stamp == self._taken or self._is_settling:
            return None
        self._taken = stamp
        told, self._told = self._told, None
        try:
            return read_keys(self._path)
        except KeysUnread as error:
            # Tried again (no descriptor was free, a file server was away), and told once.
            self._taken, self._told = None, error.message
            return None if error.message == told else error
        except KeysError as error:
            return error


def _stamp(path: Path) -> Stamp | None:
    """What differs whenever the file does; None where there is none. Links are followed, for mounted secrets swap those."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
