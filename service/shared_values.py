"""Shared values: the numbers behind the metrics, in memory while the loop's turn lasts and then in files that all processes read.

Lives here: what prometheus_client asks of a value, over its own files (`MmapedDict`). Its own class writes a file at every
change, and looks for a fork first: with ten changes a request that was a tenth of the loop's time.
Laws: one slot's files have one writer, the event loop's thread; a value goes on where the slot's last process left it; what
was changed is in the files at the end of the turn, so a process that is killed takes no more than a turn with it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from prometheus_client.mmap_dict import MmapedDict, mmap_key

from service.errors import ServiceError
from service.turn import Turn

# What the library names a process's files after, and space in each for the series of some hundred layers.
KINDS = ("counter", "histogram", "gauge_livesum", "gauge_livemin", "gauge_livemax", "gauge_max")
RESERVED_BYTES = 2**19


class MetricsError(ServiceError):
    """The metrics of this process have no place; the message is one line."""

    code = "no_metrics"


@dataclasses.dataclass(frozen=True, slots=True)
class Shared:
    """The directory that the processes of one service share and this process's place in it."""

    directory: Path
    slot: int

    @property
    def counters(self) -> Path:
        """There already where another process had the slot before."""
        return self.file("counter")

    def file(self, kind: str) -> Path:
        return self.directory / f"{kind}_{self.slot}.db"


class SharedValues:
    """The values of one process; makes one for each sample that the library asks for. Raises MetricsError."""

    _multiprocess = True  # prometheus_client's word for values in files

    def __init__(self, shared: Shared) -> None:
        _reserve(shared)
        self._shared = shared
        self._files: dict[str, MmapedDict] = {}
        self._changed: list[_Value] = []
        self._turn = Turn(self.write)

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
        file = self._files.get(kind)
        if file is None:
            file = self._files[kind] = MmapedDict(str(self._shared.file(kind)))  # type: ignore[no-untyped-call]
        return _Value(self, file, mmap_key(metric_name, name, list(labelnames), list(labelvalues), help_text))

    def changed(self, value: _Value) -> None:
        self._changed.append(value)
        self._turn.ask()

    def write(self) -> None:
        """What has changed goes to the files now."""
        changed, self._changed = self._changed, []
        for value in changed:
            value.write()

    def close(self) -> None:
        """The end of the process: nothing that was told is lost."""
        self.write()
        for file in self._files.values():
            file.close()  # type: ignore[no-untyped-call]


def _reserve(shared: Shared) -> None:
    """Space for this process's files, which it writes to as to its memory; raises MetricsError where there is none.

    A page of a file that finds no space when it is first written to is a SIGBUS, which ends the process at any request.
    """
    try:
        for kind in KINDS:
            with shared.file(kind).open("ab") as file:
                os.posix_fallocate(file.fileno(), 0, RESERVED_BYTES)
    except OSError as error:
        raise MetricsError(f"the run directory (ATTENTION_RUN_DIR) cannot be written: {error.strerror}") from None


class _Value:
    """One sample. prometheus_client calls `inc`, `set` and `get`; exemplars it does not keep in files either."""

    __slots__ = ("_file", "_is_changed", "_key", "_value", "_values")

    def __init__(self, values: SharedValues, file: MmapedDict, key: str) -> None:
        self._values = values
        self._file = file
        self._key = key
        self._value: float = file.read_value(key)[0]  # type: ignore[no-untyped-call]
        self._is_changed = False

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
        self._file.write_value(self._key, self._value, 0.0)  # type: ignore[no-untyped-call]
