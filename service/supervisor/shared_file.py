"""Shared file: a few bytes that one process writes and others read, whole or not at all.

Invariants: A reader sees the old content or the new one, never a part. A write that fails (the disk is full) leaves the old
content, and nothing beside it that takes space from the next write.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def read(path: Path, max_bytes: int) -> bytes | None:
    """Return the content; None if it cannot be read or is larger than `max_bytes`."""
    try:
        with path.open("rb") as file:
            text = file.read(max_bytes + 1)
    except OSError:
        return None
    return text if len(text) <= max_bytes else None


def replace(path: Path, text: bytes) -> None:
    """Replace the content; raise OSError if the directory is gone or full."""
    with _temporary(path, text) as temporary:
        temporary.replace(path)


def create(path: Path, text: bytes) -> bool:
    """Create the file; return False if it exists. Raise OSError if the directory is gone or full."""
    with _temporary(path, text) as temporary:
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
    return True


def remove(path: Path, writer: int) -> None:
    """Remove the file, and the temporary file that its `writer`, a process that died, may have left."""
    for name in (path, temporary_of(path, writer)):
        name.unlink(missing_ok=True)


def temporary_of(path: Path, writer: int) -> Path:
    return path.with_name(f".{path.name}.{writer}.tmp")


@contextlib.contextmanager
def _temporary(path: Path, text: bytes) -> Iterator[Path]:
    temporary = temporary_of(path, os.getpid())
    try:
        temporary.write_bytes(text)
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)
