"""Shared values: the numbers behind the metrics, in memory while the loop's turn lasts and then in files that all processes read.

Lives here: what prometheus_client asks of a value, over its own files (`MmapedDict`). Its own class writes a file at every
change, and looks for a fork first: with ten changes a request that was a tenth of the loop's time.
Laws: one slot's files have one writer, the event loop's thread; a value goes on where the slot's last process left it; what
was changed is in the files at the end of the turn, so a process that is killed takes no more than a turn with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prometheus_client.mmap_dict import MmapedDict, mmap_key

from service.turn import Turn


class SharedValues:
    """The values of one process, in `directory`; makes one for each sample that the library asks for."""

    _multiprocess = True  # prometheus_client's word for values in files

    def __init__(self, directory: Path, slot: int) -> None:
        self._directory = directory
        self._slot = slot
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
            path = self._directory / f"{kind}_{self._slot}.db"
            file = self._files[kind] = MmapedDict(str(path))  # type: ignore[no-untyped-call]
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
