"""KeyRing: the content of the keys file: one SHA-256 digest with its role on each line.

    # comment
    5e884898da28047151d0e56f8dc6292773603d0d6aabbdd62a11ef721d1542d8 infer  # team a

Invariants: only the digest of a key is stored, never the key. A lookup takes the same time whether the key exists or not: it
compares every entry, as bytes, in constant time. A file is taken whole or not at all. The error about a bad file names the line
and never repeats it.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import re
import secrets
import stat
from pathlib import Path
from typing import NamedTuple

from service.errors import ServiceError

VARIABLE = "ATTENTION_API_KEYS_FILE"
# Each request compares every entry: 4,096 entries cost the event loop half a millisecond.
MAX_KEYS = 4096
MAX_FILE_BYTES = 2**20
KEY_BYTES = 32
_LINE = re.compile(rb"([0-9a-fA-F]{64})[ \t]+(infer|admin)")
_BOM = b"\xef\xbb\xbf"


class Role(enum.StrEnum):
    """`ADMIN` may do everything that `INFER` may."""

    INFER = "infer"
    ADMIN = "admin"


class Key(NamedTuple):
    digest: bytes
    role: Role


class KeysError(ServiceError):
    """The keys file cannot be used; the message is one line that names the setting."""

    code = "bad_keys"

    def __init__(self, message: str) -> None:
        super().__init__(f"{VARIABLE}: {message}")


class KeysUnread(KeysError):
    """The file could not be read; a later attempt may succeed although the file has not changed."""


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
    roles: dict[bytes, Role] = {}
    for number, line in enumerate(text.removeprefix(_BOM).splitlines(), 1):
        entry = line.partition(b"#")[0].strip()
        if not entry:
            continue
        parts = _LINE.fullmatch(entry)
        if parts is None:
            raise KeysError(f"line {number} is not a SHA-256 digest (64 hex digits) and a role (infer or admin)")
        digest, role = bytes.fromhex(parts[1].decode("ascii")), Role(parts[2].decode("ascii"))
        if roles.setdefault(digest, role) is not role:
            raise KeysError(f"line {number} repeats a digest with another role")
        if len(roles) > MAX_KEYS:
            raise KeysError(f"line {number} exceeds the limit of {MAX_KEYS:,} keys")
    return KeyRing(tuple(Key(digest, role) for digest, role in roles.items()))


def read_keys(path: Path) -> KeyRing:
    """Read and parse the file, blocking; raise KeysError if it cannot be used."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe blocks, and is empty the second time
            raise KeysError("the file is not a regular file")
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise KeysUnread(f"the file cannot be read: {error.strerror}") from None
    if len(text) > MAX_FILE_BYTES:
        raise KeysError(f"the file has more than {MAX_FILE_BYTES:,} bytes")
    return parse_keys(text)
