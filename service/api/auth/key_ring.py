"""Keys: who may ask. The keys file as a value: SHA-256 digests with their roles, one a line.

    # comment
    5e884898da28047151d0e56f8dc6292773603d0d6aabbdd62a11ef721d1542d8 infer  # team a

Laws: a key itself is nowhere, only its digest; looking one up costs the same whether it is there or not (every entry is
compared, as bytes, in constant time); a file is taken whole or not at all, and what is said of a bad one names the line and
never repeats it.
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
# Every entry is compared at every request: 4,096 of them cost the loop half a millisecond.
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
    """The file could not be read; the next time it may be, though nothing of it has changed."""


class KeyRing:
    """The keys of one reading of the file; with none, nobody may."""

    def __init__(self, keys: tuple[Key, ...] = ()) -> None:
        self.keys = keys

    def find(self, secret: bytes) -> Key | None:
        digest = digest_of(secret)
        found = None
        for key in self.keys:
            if hmac.compare_digest(key.digest, digest):
                found = key  # and on to the end: the time says nothing about where it stands
        return found

    def count(self, role: Role) -> int:
        return sum(key.role is role for key in self.keys)


def digest_of(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


def new_secret() -> str:
    return secrets.token_urlsafe(KEY_BYTES)


def line_for(secret: str, role: Role) -> str:
    """The line of the file that lets this key in."""
    return f"{digest_of(secret.encode('ascii')).hex()} {role.value}"


def parse_keys(text: bytes) -> KeyRing:
    """Raises KeysError. A digest that stands there twice is one key, unless its roles differ."""
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
            raise KeysError(f"line {number} gives a digest another role than an earlier line does")
        if len(roles) > MAX_KEYS:
            raise KeysError(f"line {number} is one key too many: there may be {MAX_KEYS:,}")
    return KeyRing(tuple(Key(digest, role) for digest, role in roles.items()))


def read_keys(path: Path) -> KeyRing:
    """Blocks while it reads; raises KeysError."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for, and be empty the second time
            raise KeysError("it is not a regular file")
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise KeysUnread(f"it cannot be read: {error.strerror}") from None
    if len(text) > MAX_FILE_BYTES:
        raise KeysError(f"it is larger than {MAX_FILE_BYTES:,} bytes")
    return parse_keys(text)
