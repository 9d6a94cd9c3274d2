"""Shared values: metric values that change in memory and are written, once a loop tick, to files that all processes read.

Implements what prometheus_client needs of a value, over the library's own files (`MmapedDict`). The library's class writes a file
at every change, and checks for a fork first: with ten changes per request, this took a tenth of the loop's time.
Invariants: A slot's files have one writer, the event loop's thread. A value goes on where the slot's last process left it. What
has changed is in the files at the end of the tick, so a killed process loses at most one tick. Counting goes on if files are lost
or find no space: they are made again with what this process has counted.
"""

from __future__ import annotations

import bisect
import contextlib
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import prometheus_client
from prometheus_client.metrics_core import Metric
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.multiprocess import MultiProcessCollector

from service.loop_time import LoopTick

# Kinds of files, as the library names them. Each file begins with space for the series of some fifty layers; `_File` adds more.
KINDS = ("counter", "histogram", "gauge_livesum", "gauge_livemin", "gauge_livemax", "gauge_max")
RESERVED_BYTES = 2**19
# The most bytes that an entry of a file takes besides its key.
_ENTRY_BYTES = 32


class Histogram(prometheus_client.Histogram):
    """The library's histogram, whose own search of the buckets takes 2 µs for 18; it takes no exemplars."""

    def observe(self, amount: float, _: object = None) -> None:
        self._sum.inc(amount)
        self._buckets[bisect.bisect_left(self._upper_bounds, amount)].inc(1)


class SharedValues:
    """The values of the process that has this `slot`; the library calls it to make one for each sample.

    Without files only this process has them.
    """

    def __init__(self, directory: Path, slot: int) -> None:
        self._directory = directory
        self._paths = {kind: directory / f"{kind}_{slot}.db" for kind in KINDS}
        self.is_replacement = self._paths["counter"].exists()  # of another process that had the slot
        self.left = _left_in([path for path in self._paths.values() if path.exists()])
        """What that process counted, by sample, over all labels."""
        self._files: dict[str, _File] = {}
        self._values: list[Value] = []
        self._changed: list[Value] = []
        self._tick = LoopTick(self.write)
        with contextlib.suppress(OSError):  # `restore` tries again and raises the error
            self._open()

    def __call__(self, typ: str, *key: Any, multiprocess_mode: str = "", **_: object) -> Value:
        """Return a value; `key` is what the library's key of a sample is made of: names, labels and help."""
        kind = f"{typ}_{multiprocess_mode}" if typ == "gauge" else typ
        assert kind in KINDS, f"{kind} has no file. This is a bug."
        value = Value(self, kind, mmap_key(*key))
        self._values.append(value)
        if (file := self._files.get(kind)) is not None:
            with contextlib.suppress(OSError):  # no space for another series: only this process has its value
                value.amount = file.read_value(value.key)[0]  # type: ignore[no-untyped-call]
                value.file = file
        return value

    def changed(self, value: Value) -> None:
        self._changed.append(value)
        self._tick.ask()

    def write(self) -> None:
        changed, self._changed = self._changed, []
        for value in changed:
            value.write()

    def of_all_processes(self) -> Iterable[Metric] | None:
        """Return all series of all processes; None if this one's files are lost, or files change faster than they are read."""
        if not self.is_shared:
            return None
        files = [*self._directory.glob("*.db")]
        found = _merged(files)
        if found is None:  # a file was removed, cut or overwritten meanwhile: show the others
            found = _merged([file for file in files if _merged([file]) is not None])
        return found

    @property
    def is_shared(self) -> bool:
        """Whether the files are in their place and whole; any thread may call it."""
        files = self._files
        return bool(files) and all(file.is_whole for file in files.values())

    def restore(self) -> bool:
        """Make the files again if one is lost, with all values; return whether one was. Raise OSError if there is no space."""
        if self.is_shared:
            return False
        self._close(self._files)
        self._remove()
        self._open()
        return True

    def close(self) -> None:
        """Write all changes and close the files at the end of the process."""
        self.write()
        self._close(self._files)

    def _open(self) -> None:
        """Make or open the files and write all values; raise OSError if there is no space."""
        files: dict[str, _File] = {}
        try:
            for kind, path in self._paths.items():
                files[kind] = _File(path)
            for value in self._values:
                value.file = files[value.kind]
                value.write()
        except OSError:  # remove the files, so that other processes have the space, and go on without files
            self._close(files)
            with contextlib.suppress(OSError):
                self._remove()
            raise
        self._files = files

    def _close(self, files: dict[str, _File]) -> None:
        self._files = {}
        for value in self._values:
            value.file = None
        for file in files.values():
            file.close()  # type: ignore[no-untyped-call]

    def _remove(self) -> None:
        for path in self._paths.values():
            path.unlink(missing_ok=True)


class _File(MmapedDict):
    """The library's memory-mapped file: a write to a page without space is a SIGBUS, so space is reserved before it grows."""

    def __init__(self, path: Path) -> None:
        with path.open("ab") as file:
            os.posix_fallocate(file.fileno(), 0, RESERVED_BYTES)
            self._opened = os.fstat(file.fileno())
        self._path = path
        super().__init__(str(path))  # type: ignore[no-untyped-call]

    @property
    def is_whole(self) -> bool:
        """Whether the file is in its place and not cut."""
        with contextlib.suppress(OSError):
            found = self._path.stat()
            return os.path.samestat(found, self._opened) and found.st_size >= RESERVED_BYTES
        return False

    def _init_value(self, key: str) -> None:
        if self._used + len(key.encode()) + _ENTRY_BYTES > self._capacity:
            os.posix_fallocate(self._f.fileno(), 0, 2 * self._capacity)
        super()._init_value(key)  # type: ignore[no-untyped-call]


class Value:
    """One sample. prometheus_client calls `inc`, `set` and `get`; like the library, it keeps no exemplars in files."""

    __slots__ = ("_is_changed", "_values", "amount", "file", "key", "kind")

    def __init__(self, values: SharedValues, kind: str, key: str) -> None:
        self.kind = kind
        self.key = key
        self.file: MmapedDict | None = None
        self.amount = 0.0
        self._values = values
        self._is_changed = False

    def inc(self, amount: float = 1) -> None:
        self.amount += amount
        if not self._is_changed:
            self._is_changed = True
            self._values.changed(self)

    def set(self, value: float) -> None:
        self.amount = value
        if not self._is_changed:
            self._is_changed = True
            self._values.changed(self)

    def get(self) -> float:
        return self.amount

    def get_exemplar(self) -> None:
        return None

    def write(self) -> None:
        """Write the value to its file; raise OSError if there is no space."""
        self._is_changed = False
        if self.file is not None:
            self.file.write_value(self.key, self.amount, 0.0)  # type: ignore[no-untyped-call]


def _merged(files: Iterable[Path]) -> Iterable[Metric] | None:
    """Return the series of these files, added up; None if one is lost or damaged."""
    try:
        merged: Iterable[Metric] = MultiProcessCollector.merge(list(map(str, files)))  # type: ignore[no-untyped-call]
    except Exception:  # noqa: BLE001 (a page half written by a killed process may raise anything)
        return None
    return merged


def _left_in(files: Sequence[Path]) -> defaultdict[str, float]:
    """Return the sums of the samples in these files over all labels; remove the files if they cannot be read."""
    families = _merged(files)
    sums = defaultdict[str, float](float)
    for family in families or ():
        for sample in family.samples:
            sums[sample.name] += sample.value
    if families is None or not all(map(math.isfinite, sums.values())):
        sums.clear()
        for file in files:
            with contextlib.suppress(OSError):
                file.unlink()
    return sums
