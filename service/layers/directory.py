"""Directory: reads and writes the files of one kind in a layer directory, `<name><suffix>` each.

Invariants: Names match `NAME`. Only the name becomes part of a path, and the path lies inside the directory. A file appears whole
or not at all (written under a temporary name, synced, renamed). A failure of a file is a LayerError that begins with its name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Self

from service.errors import LayerError, LayerMissing, LayerNotLoaded
from service.layers.safetensors_file import open_regular, opening_failed
from service.layers.wording import about, translated

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
# The name of attention without a layer, which no layer can have.
SDPA = "sdpa"


class LayerExists(LayerError):
    """The directory has a file of that name."""


@dataclasses.dataclass(frozen=True, slots=True)
class Directory:
    """A subclass says what its files are, in errors (`kind`); `max_bytes` is the largest file that is read, None: any."""

    kind: ClassVar[str]
    suffix: ClassVar[str]
    directory: Path
    max_bytes: int | None = None

    def of_set(self, layer_set: str) -> Self:
        """Return the files of the set of that digest (`layers/layer_set.py`), or these files if it is empty."""
        return dataclasses.replace(self, directory=self.directory / layer_set.removeprefix("sha256:"))

    def names(self) -> list[str]:
        """Return the sorted names. Files that no layer's name fits are left out, except `sdpa`, which `opened` reports."""
        try:
            entries = [entry.name for entry in self.directory.iterdir()]
        except FileNotFoundError as error:
            raise LayerError("the layer directory does not exist") from error
        except OSError as error:
            raise LayerError("the layer directory cannot be read") from error
        stems = (entry.removesuffix(self.suffix) for entry in entries if entry.endswith(self.suffix))
        return sorted(stem for stem in stems if NAME.fullmatch(stem))

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[io.BufferedReader]:
        """Yield the file; raise LayerMissing without one, LayerNotLoaded if reading fails, LayerError for a name that is none."""
        check_name(name)
        with (
            about(f'{self.kind} "{name}"'),
            translated("this process could not read the file", LayerNotLoaded),  # for a lack of memory or descriptors
            open_regular(self._path_within(name), follow_links=False) as file,
        ):
            size = os.fstat(file.fileno()).st_size
            if self.max_bytes is not None and size > self.max_bytes:
                raise LayerError(
                    f"the file has {size} bytes, the limit is {self.max_bytes} (ATTENTION_MAX_LAYER_BYTES)"
                )
            yield file

    def file(self, name: str) -> Path:
        """Return where `write` puts the file."""
        return self.directory / f"{name}{self.suffix}"

    def write(self, name: str, raw: bytes, *, replace: bool) -> Path:
        """Write or replace the file; a crash leaves the old file, or none.

        Without `replace` raise LayerExists if the name is taken; of several that are written at once, one is stored.
        """
        path = self.file(name)
        temporary = self.directory / f".{name}.{secrets.token_hex(8)}.tmp"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            try:
                with temporary.open("xb") as file:
                    file.write(raw)
                    file.flush()
                    os.fsync(file.fileno())
                with about(f'{self.kind} "{name}"'):
                    _place(temporary, path, replace=replace)
            finally:
                temporary.unlink(missing_ok=True)
            _sync_directory(self.directory)
        except OSError as error:
            raise LayerError(f'{self.kind} "{name}": the layer directory cannot be written') from error
        return path

    def _path_within(self, name: str) -> str:
        """Return the real path. Links may lead anywhere inside the directory (Kubernetes mounts do), never out of it."""
        try:
            root = os.path.realpath(self.directory, strict=True)
            path = os.path.realpath(f"{root}/{name}{self.suffix}", strict=True)
        except FileNotFoundError as error:
            raise LayerMissing("the layer directory has no file of that name") from error
        except OSError as error:  # a loop of links, a directory without permission
            raise opening_failed(error) from error
        if os.path.commonpath([root, path]) != root:
            raise LayerError("the file is a link to a place outside the layer directory")
        return path


def check_name(name: str) -> None:
    """Raise LayerError, without repeating the name, unless a layer may have it."""
    if NAME.fullmatch(name) is None:
        raise LayerError(
            "a layer's name is 1 to 64 of a-z, 0-9, dot, underscore and hyphen, and begins with a letter or a digit"
        )
    if name == SDPA:
        raise LayerError('the name "sdpa" is reserved for attention without a layer')


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
