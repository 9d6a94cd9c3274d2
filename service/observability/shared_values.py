"""Shared values: metric values that change in memory and are written to files, which all processes read, once a loop tick.

Implements what prometheus_client needs of a value, over the library's own files (`MmapedDict`). The library's class writes a file
at every change, and checks for a fork first: with ten changes per request, this took a tenth of the loop's time. Histogram
makes updates cheaper still.
Invariants: A slot's files have one writer, the event loop's thread. A value goes on where the slot's last process left it. What
has changed is in the files at the end of the tick, so a killed process loses at most one tick. Counting goes on if files are lost
or find no space: they are made again with what this process has counted.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import prometheus_client
from prometheus_client.mmap_dict import MmapedDict, mmap_key

from service.loop_time import LoopTick

# Kinds of files, as the library names them. Each file begins with space for the series of some fifty layers; `_File` adds more.
KINDS = ("counter", "histogram", "gauge_livesum", "gauge_livemin", "gauge_livemax", "gauge_max")
RESERVED_BYTES = 2**19
# The most bytes that an entry of a file takes besides its key.
_ENTRY_BYTES = 32


@dataclasses.dataclass(frozen=True, slots=True)
class Shared:
    """The directory that the processes of one service share, and this process's slot in it."""

    directory: Path
    slot: int

    def file(self, kind: str) -> Path:
        return self.directory / f"{kind}_{self.slot}.db"


class Histogram(prometheus_client.Histogram):
    """The library's histogram, and one call for many observations: its `observe` searches the buckets each time, 2 µs for 18."""

    def observe_all(self, amounts: Sequence[float]) -> None:
        """Add these amounts, in the series' unit; no exemplars."""
        self._sum.inc(sum(amounts))
        bounds = self._upper_bounds
        numbers: dict[int, int] = {}
        for amount in amounts:
            bucket = bisect.bisect_left(bounds, amount)
            numbers[bucket] = numbers.get(bucket, 0) + 1
        for bucket, number in numbers.items():
            self._buckets[bucket].inc(number)


class SharedValues:
    """The values of one process; the library calls it to make one for each sample. Without files only this process has them."""

    _multiprocess = True  # prometheus_client's flag for values in files

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._files: dict[str, MmapedDict] = {}
        self._file_ids: dict[Path, tuple[int, int] | None] = {}
        self._values: list[_Value] = []
        self._changed: list[_Value] = []
        self._tick = LoopTick(self.write)
        with contextlib.suppress(OSError):  # `restore` tries again and raises the error
            self._open()

    def __call__(
        self,
        typ: str,
        metric_name: str,
        name: str,
        labelnames: Sequence[str],
        labelvalues: Sequence[str],
        help_text: str,
        multiprocess_mode: str = "",
        **_: object,
    ) -> _Value:
        kind = f"{typ}_{multiprocess_mode}" if typ == "gauge" else typ
        assert kind in KINDS, f"{kind} has no file. This is a bug."
        value = _Value(self, kind, mmap_key(metric_name, name, list(labelnames), list(labelvalues), help_text))
        self._values.append(value)
        with contextlib.suppress(OSError):  # no space for another series: only this process has its value
            value.attach(self._files.get(kind))
        return value

    def changed(self, value: _Value) -> None:
        self._changed.append(value)
        self._tick.ask()

    def write(self) -> None:
        """Write what has changed to the files now."""
        changed, self._changed = self._changed, []
        for value in changed:
            value.write()

    @property
    def is_shared(self) -> bool:
        """Whether the files are in their place and whole; any thread may call it."""
        return bool(self._file_ids) and all(_file_id(path) == place for path, place in self._file_ids.items())

    def restore(self) -> bool:
        """Make the files again if one is lost, with all values; return whether one was. Raise OSError if there is no space."""
        if self.is_shared:
            return False
        self._close()
        self._remove()
        self._open()
        return True

    def close(self) -> None:
        """Write all changes and close the files at the end of the process."""
        self.write()
        self._close()

    def _open(self) -> None:
        """Reserve space for the files, open them and write all values; raise OSError if there is no space."""
        paths = {kind: self._shared.file(kind) for kind in KINDS}
        try:
            for path in paths.values():
                with path.open("ab") as file:
                    os.posix_fallocate(file.fileno(), 0, RESERVED_BYTES)
            for kind, path in paths.items():
                self._files[kind] = _File(str(path))  # type: ignore[no-untyped-call]
            for value in self._values:
                value.switch_to(self._files[value.kind])
        except OSError:  # remove the files, so that other processes have the space, and go on without files
            self._close()
            with contextlib.suppress(OSError):
                self._remove()
            raise
        self._file_ids = {path: _file_id(path) for path in paths.values()}

    def _close(self) -> None:
        files, self._files, self._file_ids = self._files, {}, {}
        for value in self._values:
            value.switch_to(None)
        for file in files.values():
            file.close()  # type: ignore[no-untyped-call]

    def _remove(self) -> None:
        for kind in KINDS:
            self._shared.file(kind).unlink(missing_ok=True)


class _File(MmapedDict):
    """The library's memory-mapped file: a write to a page without space is a SIGBUS, so space is reserved before it grows."""

    def _init_value(self, key: str) -> None:
        if self._used + len(key.encode()) + _ENTRY_BYTES > self._capacity:
            os.posix_fallocate(self._f.fileno(), 0, 2 * self._capacity)
        super()._init_value(key)  # type: ignore[no-untyped-call]


def _file_id(path: Path) -> tuple[int, int] | None:
    """Return a file's identity (device, inode); None if it is gone or cut."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino) if found.st_size >= RESERVED_BYTES else None


class _Value:
    """One sample. prometheus_client calls `inc`, `set` and `get`; like the library, it keeps no exemplars in files."""

    __slots__ = ("_file", "_is_changed", "_key", "_value", "_values", "kind")

    def __init__(self, values: SharedValues, kind: str, key: str) -> None:
        self.kind = kind
        self._values = values
        self._file: MmapedDict | None = None
        self._key = key
        self._value = 0.0
        self._is_changed = False

    def attach(self, file: MmapedDict | None) -> None:
        """Continue from what the slot's last process left in the file; raise OSError if there is no space."""
        if file is not None:
            self._value = file.read_value(self._key)[0]  # type: ignore[no-untyped-call]
        self._file = file

    def switch_to(self, file: MmapedDict | None) -> None:
        """Write this value to another file from now on, beginning with its current number; raise OSError if there is no space."""
        self._file = file
        self.write()

    def inc(self, amount: float) -> None:
        self.set(self._value + amount)

    def set(self, value: float, timestamp: float | None = None) -> None:  # noqa: ARG002 (the library's signature)
        self._value = value
        if not self._is_changed:
            self._is_changed = True
            self._values.changed(self)

    def get(self) -> float:
        return self._value

    def set_exemplar(self, exemplar: object) -> None:
        pass

    def get_exemplar(self) -> None:
        return None

    def write(self) -> None:
        self._is_changed = False
        if self._file is not None:
            self._file.write_value(self._key, self._value, 0.0)  # type: ignore[no-untyped-call]
