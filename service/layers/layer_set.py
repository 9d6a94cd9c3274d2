"""Layer set: the layers and models of a directory under one digest, by a manifest; published, fetched and kept.

A published set is a directory with `layer-set.json` and each file under its own SHA-256. A fetched one is a directory of a layer
directory, named by the hex of its digest, with the files under their names; `current` there leads to the set served last.
Invariants: A set's directory exists only whole, and every file in it had the manifest's size and SHA-256. Names match NAME, so no
path leaves the directory. The manifest is published last, and the files of the set before stay until the next one.

Digest: "sha256:" and the hex of SHA-256 over ASCII JSON without spaces: [[name, size, sha256, digest] by name].
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from service.errors import LayerError
from service.layers.directory import NAME, SDPA
from service.layers.safetensors_file import open_regular, parse_object
from service.layers.set_source import SetSource
from service.layers.store import DIGEST, FORMAT_VERSION, Store
from service.layers.wording import about, quoted

MANIFEST = "layer-set.json"
MAX_MANIFEST_BYTES = 2**20
MAX_FILES = 1000
_FILE = re.compile(rf"({NAME.pattern})(\.safetensors|\.model)")
_SHA256 = re.compile("[0-9a-f]{64}")
_OWN = re.compile(r"[0-9a-f]{64}|\.[0-9a-f]{64}\.partial")


@dataclasses.dataclass(frozen=True, slots=True)
class SetFile:
    """One file: its name, bytes, SHA-256 in hex, and the digest of its layer or model."""

    name: str
    size: int
    sha256: str
    digest: str


@dataclasses.dataclass(frozen=True, slots=True)
class LayerSet:
    """`files` are in the order of their names, with a layer at least; else raises LayerError."""

    files: tuple[SetFile, ...]

    def __post_init__(self) -> None:
        if not self.layers or len(self.files) > MAX_FILES:
            raise LayerError(f"a set has 1 to {MAX_FILES} files, and a layer among them")

    @property
    def digest(self) -> str:
        listing = json.dumps([dataclasses.astuple(file) for file in self.files], separators=(",", ":"))
        return f"sha256:{hashlib.sha256(listing.encode('ascii')).hexdigest()}"

    @property
    def layers(self) -> dict[str, str]:
        """The digest of each layer by its name."""
        layers = [file for file in self.files if file.name.endswith(Store.suffix)]
        return {file.name.removesuffix(Store.suffix): file.digest for file in layers}

    def manifest(self) -> bytes:
        files = [dataclasses.asdict(file) for file in self.files]
        text = json.dumps({"format_version": FORMAT_VERSION, "digest": self.digest, "files": files}, indent=1)
        return text.encode("ascii") + b"\n"

    @classmethod
    def parse(cls, raw: bytes, max_bytes: int) -> LayerSet:
        """Return the set of a manifest; raise LayerError, also if a file of it has more than `max_bytes`."""
        found = parse_object(raw, "the file", LayerError)
        version, entries = found.get("format_version"), found.get("files")
        if type(version) is not int or version != FORMAT_VERSION:
            raise LayerError(f"this release reads layer sets of format_version {FORMAT_VERSION} only")
        if not isinstance(entries, list):
            raise LayerError("files must be a list")
        files = sorted((_parse_file(entry, max_bytes) for entry in entries), key=lambda file: file.name)
        if len({file.name for file in files}) < len(files):
            raise LayerError("files has a name twice")
        layer_set = cls(tuple(files))
        if found.get("digest") != layer_set.digest:
            raise LayerError("its digest is not that of its files: it was changed after it was published")
        return layer_set


def _parse_file(entry: object, max_bytes: int) -> SetFile:
    fields = entry if isinstance(entry, dict) else {}
    name, size, sha256, digest = (fields.get(field.name) for field in dataclasses.fields(SetFile))
    texts = ((name, _FILE), (sha256, _SHA256), (digest, DIGEST))
    is_sound = all(isinstance(text, str) and pattern.fullmatch(text) for text, pattern in texts)
    if not is_sound or type(size) is not int or size < 0 or str(name).rpartition(".")[0] == SDPA:
        raise LayerError(
            "each of files needs the name of a layer's or model's file, its size in bytes, its sha256 (64 hex digits) and "
            "the digest of the layer or model"
        )
    if size > max_bytes:
        raise LayerError(f"{name} has {size} bytes, the limit is {max_bytes} (ATTENTION_MAX_LAYER_BYTES)")
    return SetFile(str(name), size, str(sha256), str(digest))


def publish(found: Mapping[Path, str], destination: Path) -> LayerSet:
    """Copy these files, each with the digest of its layer or model; then write the manifest.

    Files that neither it nor the one before names are removed.
    """
    destination.mkdir(parents=True, exist_ok=True)
    files, paths = [], {}
    for path in sorted(found, key=lambda path: path.name):
        with open_regular(path) as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            files.append(SetFile(path.name, file.tell(), sha256, found[path]))
        paths[sha256] = path
        if not _is_whole(destination / sha256, sha256):
            _write(destination / sha256, path)
    layer_set, manifest = LayerSet(tuple(files)), destination / MANIFEST
    before = manifest.read_text("ascii", "replace") if manifest.exists() else ""
    _write(manifest, layer_set.manifest())
    for path in destination.iterdir():
        if _SHA256.fullmatch(path.name) and path.name not in {*paths, *_SHA256.findall(before)}:
            path.unlink()
    return layer_set


def _write(path: Path, content: Path | bytes) -> None:
    """Write a file, or a copy of another, that appears whole."""
    temporary = path.with_name(f".{path.name}.tmp")
    if isinstance(content, bytes):
        temporary.write_bytes(content)
    else:
        shutil.copyfile(content, temporary)
    temporary.replace(path)


def _is_whole(path: Path, sha256: str) -> bool:
    with contextlib.suppress(OSError), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == sha256
    return False


class SetCache:
    """The fetched sets in a layer directory of one service. Its methods read and write files: call them in a thread."""

    def __init__(self, root: Path, source: SetSource, max_bytes: int) -> None:
        self.source = source
        self._root = root
        self._max_bytes = max_bytes
        self._lock: IO[bytes] | None = None

    def lead(self) -> bool:
        """Return whether this process is the one that fetches, from now until it ends: the kernel gives up a dead one's lock."""
        if self._lock is None:
            with _writing():
                self._root.mkdir(parents=True, exist_ok=True)
                lock = (self._root / ".lock").open("wb")
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    lock.close()
                    return False
            self._lock = lock
        return True

    def close(self) -> None:
        """Let another process lead."""
        if self._lock is not None:
            self._lock.close()

    def fetch(self, served: str) -> LayerSet:
        """Return the source's set, whole in its directory. Directories of other sets are removed, except that of `served`."""
        with about(MANIFEST):
            wanted = LayerSet.parse(b"".join(self.source.chunks(MANIFEST, MAX_MANIFEST_BYTES)), self._max_bytes)
        target, near = self._directory(wanted.digest), self._directory(served)
        partial = target.with_name(f".{target.name}.partial")
        with _writing():
            self._root.mkdir(parents=True, exist_ok=True)  # it may have been removed
            kept = {path.name for path in (target, partial, near, (self._root / "current").resolve())}
            for path in self._root.iterdir():
                if _OWN.fullmatch(path.name) and path.name not in kept:
                    shutil.rmtree(path, ignore_errors=True)
            if not target.is_dir():
                self._fill(partial, wanted, near)
                partial.rename(target)
        return wanted

    def keep(self, layer_set: str) -> None:
        """Remember the set as the one that was served last."""
        with _writing():
            link = self._root / ".current"
            link.unlink(missing_ok=True)
            link.symlink_to(self._directory(layer_set).name)
            link.replace(self._root / "current")

    def last_served(self) -> LayerSet | None:
        """Return the set that was served last, if it is here."""
        with contextlib.suppress(OSError, LayerError):
            return LayerSet.parse((self._root / "current" / MANIFEST).read_bytes(), self._max_bytes)
        return None

    def discard(self, layer_set: str) -> None:
        """Remove a set that no process could load: its files may have been damaged here."""
        shutil.rmtree(self._directory(layer_set), ignore_errors=True)

    def _directory(self, layer_set: str) -> Path:
        return Store(self._root).of_set(layer_set).directory

    def _fill(self, partial: Path, wanted: LayerSet, near: Path) -> None:
        """Complete a directory: a file that an earlier fetch or the set `near` it has is not fetched again."""
        partial.mkdir(exist_ok=True)
        for file in wanted.files:
            path = partial / file.name
            known = next((one for one in (path, near / file.name) if _is_whole(one, file.sha256)), None)
            if known is None:
                with about(quoted(file.name)):
                    self._copy(file, path)
            elif known != path:
                path.unlink(missing_ok=True)
                os.link(known, path)
        (partial / MANIFEST).write_bytes(wanted.manifest())

    def _copy(self, file: SetFile, path: Path) -> None:
        seen = hashlib.sha256()
        with path.open("wb") as copy:
            for chunk in self.source.chunks(file.sha256, file.size):
                seen.update(chunk)
                copy.write(chunk)
            if (copy.tell(), seen.hexdigest()) != (file.size, file.sha256):
                raise LayerError("the source has other bytes than the manifest's size and sha256")


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LayerError(f"the layer directory (ATTENTION_LAYERS_DIR) cannot be written: {error.strerror}") from None
