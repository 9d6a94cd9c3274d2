"""The planted faults: reads `faults.txt`, and replaces the text of one in its file."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
# The rooms in which every file should have a fault; what has no behaviour aside.
CORE = ("attention", "batching", "http", "layers", "wire")
WITHOUT_BEHAVIOUR = {"__init__.py", "asgi.py", "engine_protocol.py"}


class Fault(NamedTuple):
    """One mutation of one file: `before` occurs once in it and becomes `after`."""

    name: str
    path: str
    """Below `service/`, as that of `tests` is below `tests/`."""
    breaks: str
    tests: tuple[str, ...]
    before: str
    after: str

    def file(self, root: Path = ROOT) -> Path:
        return root / "service" / self.path

    def planted_in(self, text: str) -> str:
        """Return the file's text with the fault; raise ValueError unless `before` occurs exactly once."""
        if (count := text.count(self.before)) != 1:
            raise ValueError(f"{self.name}: its text occurs {count} times in service/{self.path}, expected once")
        return text.replace(self.before, self.after)


def _read(entry: str) -> Fault:
    head, breaks, tests, *change = entry.splitlines()
    name, path = head.split()
    before, after = ("\n".join(line[1:] for line in change if line[0] == sign) for sign in "-+")
    return Fault(name, path, breaks, tuple(tests.split()), before, after)


_, *_entries = (Path(__file__).parent / "faults.txt").read_text().strip().split("\n\n")
FAULTS = tuple(map(_read, _entries))


def files_without_fault() -> list[str]:
    """Return the files of the core in which no fault is planted."""
    paths = (path for room in CORE for path in sorted((ROOT / "service" / room).glob("*.py")))
    names = (f"{path.parent.name}/{path.name}" for path in paths if path.name not in WITHOUT_BEHAVIOUR)
    return [name for name in names if name not in {fault.path for fault in FAULTS}]
