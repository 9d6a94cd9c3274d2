"""Directory: reads and writes the files of one kind in a layer directory, `<name><suffix>` each.

Invariants: Only the name becomes part of a path, and the path lies inside the directory. A file appears whole or not at all
(written under a temporary name, synced, renamed).
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import secrets
from pathlib import Path

from service.errors import LayerError, LayerMissing
from service.layers.safetensors_file import open_regular, opening_failed


class LayerExists(LayerError):
    """The directory has a file of that name."""


@dataclasses.dataclass(frozen=True, slots=True)
class Directory:
    """Names are checked by the caller; `max_bytes` is the largest file that is read, None: any."""

    path: Path
    suffix: str
    max_bytes: int | None = None

    def names(self) -> list[str]:
        """Return the sorted names of the files with the suffix."""
        try:
            entries = [entry.name for entry in self.path.iterdir()]
        except FileNotFoundError as error:
            raise LayerError("the layer directory does not exist") from error
        except OSError as error:
            raise LayerError("the layer directory cannot be read") from error
        return sorted(entry.removesuffix(self.suffix) for entry in entries if entry.endswith(self.suffix))

    def open(self, name: str) -> io.BufferedReader:
        """Open the file; raise LayerMissing without one."""
        file = open_regular(self._path_within(name), follow_links=False)
        size = os.fstat(file.fileno()).st_size
        if self.max_bytes is not None and size > self.max_bytes:
            file.close()
            raise LayerError(f"the file has {size} bytes, the limit is {self.max_bytes} (ATTENTION_MAX_LAYER_BYTES)")
        return file

    def write(self, name: str, raw: bytes, *, replace: bool) -> Path:
        """Write or replace the file; a crash leaves the old file, or none.

        Without `replace` raise LayerExists if the name is taken; of several that are written at once, one is stored.
        """
        path = self.path / f"{name}{self.suffix}"
        temporary = self.path / f".{name}.{secrets.token_hex(8)}.tmp"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                with temporary.open("xb") as file:
                    file.write(raw)
                    file.flush()
                    os.fsync(file.fileno())
                _place(temporary, path, replace=replace)
            finally:
                temporary.unlink(missing_ok=True)
            _sync_directory(self.path)
        except OSError as error:
            raise LayerError("the layer directory cannot be written") from error
        return path

    def _path_within(self, name: str) -> str:
        """Return the real path. Links may lead anywhere inside the directory (Kubernetes mounts do), never out of it."""
        try:
            root = os.path.realpath(self.path, strict=True)
            path = os.path.realpath(f"{root}/{name}{self.suffix}", strict=True)
        except FileNotFoundError as error:
            raise LayerMissing("the layer directory has no file of that name") from error
        except OSError as error:  # a loop of links, a directory without permission
            raise opening_failed(error) from error
        if os.path.commonpath([root, path]) != root:
            raise LayerError("the file is a link to a place outside the layer directory")
        return path


def _place(temporary: Path, path: Path, *, replace: bool) -> None:
    """Give the file its final name; without `replace` only if that is free, which the file system decides."""
    if replace:
        temporary.replace(path)
        return
    try:
        try:
            os.link(temporary, path)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links: for a moment the name belongs to an empty file
            path.open("xb").close()
            temporary.replace(path)
    except FileExistsError as error:
        raise LayerExists("a file has this name") from error


def _sync_directory(directory: Path) -> None:
    """Make the rename durable, if the directory can be read and its file system can sync it; the file is whole in any case."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
