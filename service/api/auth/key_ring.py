"""KeyRing: the API keys in force, from a file of digests that KeyFile reloads while the service runs.

    # comment
    5e884898da28047151d0e56f8dc6292773603d0d6aabbdd62a11ef721d1542d8 infer  # team a

Invariants: only the SHA-256 digest of a key is stored, never the key. A lookup takes the same time whether the key exists or
not. A file is taken whole or not at all. An error about a malformed line names its number and never repeats its text. No keys are
in force before the first reading, which must succeed. Later, a file that cannot be used changes nothing and is reported once.
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
import hmac
import re
import secrets
import stat
import threading
from pathlib import Path
from typing import NamedTuple, Protocol

from service.errors import ServiceError

VARIABLE = "ATTENTION_API_KEYS_FILE"
# Each request compares every entry: 4,096 entries cost the event loop half a millisecond.
MAX_KEYS = 4096
MAX_FILE_BYTES = 2**20
MAX_NAME_CHARS = 64
KEY_BYTES = 32
# A changed file is in force after two checks, if the second finds what the first found and it holds a key; else after MAX_CHECKS.
CHECK_S = 1.0
MAX_CHECKS = 10
_LINE = re.compile(rb"([0-9a-fA-F]{64})[ \t]+(infer|admin)")
_BOM = b"\xef\xbb\xbf"


class Role(enum.StrEnum):
    """`ADMIN` may do everything that `INFER` may."""

    INFER = "infer"
    ADMIN = "admin"


class Key(NamedTuple):
    """`name` is the comment of its line, else the first eight digits of its digest; log lines carry it."""

    digest: bytes
    role: Role
    name: str = ""


class KeysError(ServiceError, code="bad_keys"):
    """The keys file cannot be used."""

    def __init__(self, message: str) -> None:
        super().__init__(f"{VARIABLE}: {message}")


class KeysUnread(KeysError):
    """The file could not be read: no descriptor was free, or a file server was away. A later attempt may succeed."""


class KeyRing:
    """The keys of one reading of the file; without any key, no request is admitted."""

    def __init__(self, keys: tuple[Key, ...] = ()) -> None:
        self.keys = keys

    def find(self, secret: bytes) -> Key | None:
        digest = digest_of(secret)
        found = None
        for key in self.keys:
            if hmac.compare_digest(key.digest, digest):
                found = key  # no break: the time must not reveal its position
        return found

    def count(self, role: Role) -> int:
        return sum(key.role is role for key in self.keys)


def digest_of(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


def new_secret() -> str:
    return secrets.token_urlsafe(KEY_BYTES)


def line_for(secret: str, role: Role) -> str:
    """Return the line of the keys file that admits this key."""
    return f"{digest_of(secret.encode('ascii')).hex()} {role.value}"


def parse_keys(text: bytes) -> KeyRing:
    """Return the keys in `text`; raise KeysError. A repeated digest is one key, but an error if its roles differ."""
    keys: dict[bytes, Key] = {}
    for number, line in enumerate(text.removeprefix(_BOM).splitlines(), 1):
        entry, _, comment = (part.strip() for part in line.partition(b"#"))
        if not entry:
            continue
        parts = _LINE.fullmatch(entry)
        if parts is None:
            raise KeysError(f"line {number} is not a SHA-256 digest (64 hex digits) and a role (infer or admin)")
        digest, role = bytes.fromhex(parts[1].decode("ascii")), Role(parts[2].decode("ascii"))
        name = comment.decode("utf-8", "replace")[:MAX_NAME_CHARS] or digest.hex()[:8]
        if keys.setdefault(digest, Key(digest, role, name)).role is not role:
            raise KeysError(f"line {number} repeats a digest with another role")
        if len(keys) > MAX_KEYS:
            raise KeysError(f"line {number} exceeds the limit of {MAX_KEYS:,} keys")
    return KeyRing(tuple(keys.values()))


def read_keys(path: Path) -> KeyRing:
    """Read and parse the file, blocking; raise KeysError if it cannot be used."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would block, and be empty the second time
            raise KeysError("the file is not a regular file")
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise KeysUnread(f"the file cannot be read: {error.strerror}") from None
    if len(text) > MAX_FILE_BYTES:
        raise KeysError(f"the file has more than {MAX_FILE_BYTES:,} bytes")
    return parse_keys(text)


class KeyListener(Protocol):
    """Receives each change of the keys; `observability/telemetry.py` implements it."""

    def keys_taken(self, ring: KeyRing) -> None: ...
    def keys_refused(self, error: KeysError) -> None: ...


class KeyFile:
    """`ring` holds the keys in force. Threads read the file; the event loop only replaces one ring by another."""

    def __init__(self, path: Path, listener: KeyListener) -> None:
        self.ring = KeyRing()
        self._path = path
        self._listener = listener
        self._taken: tuple[int, ...] | None = None  # the stamp of the keys in force
        self._seen: tuple[int, ...] | None = None  # the stamp of the last check
        self._num_checks = 0  # since the file differs from what was taken
        self._reported: str | None = None
        # The thread that checks the file holds it; a file server that is away may keep it for any time.
        self.reading = threading.Lock()

    async def open(self) -> None:
        """Read the keys for the first time; raise KeysError if the file cannot be used."""
        # Take the stamp before the content, so that the next check sees a write in between.
        self._taken = self._seen = await asyncio.to_thread(_stamp, self._path)
        self.ring = await asyncio.to_thread(read_keys, self._path)
        self._listener.keys_taken(self.ring)

    async def watch(self) -> None:
        """Check the file every CHECK_S seconds until cancelled."""
        while True:
            await asyncio.sleep(CHECK_S)
            await self.check()

    async def check(self) -> None:
        found = await asyncio.to_thread(self._changed)
        if isinstance(found, KeyRing):
            self.ring = found
            self._listener.keys_taken(found)
        elif found is not None:
            self._listener.keys_refused(found)

    def _changed(self) -> KeyRing | KeysError | None:
        """Return the keys or the error that a change of the file leads to; None if there is nothing to report yet.

        A change is taken once two checks find the same: a file that is written in place is torn for a moment. It is empty until a
        slow command writes to it, so a file without keys is taken only after MAX_CHECKS, as one that never stays the same.
        """
        with self.reading:
            stamp, before = _stamp(self._path), self._seen
            self._seen = stamp
            self._num_checks = 0 if stamp == self._taken else self._num_checks + 1
            may_wait = self._num_checks < MAX_CHECKS
            if stamp == self._taken or (may_wait and stamp != before):
                return None
            try:
                found: KeyRing | KeysError = read_keys(self._path)
            except KeysError as error:
                found = error
            has_no_keys = isinstance(found, KeyRing) and not found.keys
            if may_wait and (has_no_keys or _stamp(self._path) != stamp):
                return None
            self._taken, self._num_checks = stamp, 0
            reported, self._reported = self._reported, None
            if isinstance(found, KeysUnread):
                self._taken, self._reported = None, found.message
                return None if found.message == reported else found
            return found


def _stamp(path: Path) -> tuple[int, ...] | None:
    """Return values that differ whenever the file does, None without a file. Follows links: mounted secrets swap those."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
