"""A shared file: a few bytes that one process writes and others read, whole or not at all.

Laws: who reads sees what stood there before or what stands there now, never a part; a write that fails (the disk is full)
leaves what was there, and nothing beside it that takes room from the next one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def read(path: Path, max_bytes: int) -> bytes | None:
    """None where there is nothing that can be read, or more than that."""
    try:
        with path.open("rb") as file:
            text = file.read(max_bytes + 1)
    except OSError:
        return None
    return text if len(text) <= max_bytes else None


def replace(path: Path, text: bytes) -> None:
    """Raises OSError where the directory is gone or full."""
    with _half(path, text) as half:
        half.replace(path)


def create(path: Path, text: bytes) -> bool:
    """False where somebody was quicker; raises OSError where the directory is gone or full."""
    with _half(path, text) as half:
        try:
            os.link(half, path)
        except FileExistsError:
            return False
    return True


def remove(path: Path, writer: int) -> None:
    """Also what its `writer`, a process that died, had only half written."""
    for name in (path, half_of(path, writer)):
        name.unlink(missing_ok=True)


def half_of(path: Path, writer: int) -> Path:
    return path.with_name(f".{path.name}.{writer}.tmp")


@contextlib.contextmanager
def _half(path: Path, text: bytes) -> Iterator[Path]:
    half = half_of(path, os.getpid())
    try:
        half.write_bytes(text)
        yield half
    finally:
        half.unlink(missing_ok=True)
