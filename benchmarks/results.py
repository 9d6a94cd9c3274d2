"""Results: the file of what was measured, part by part, as raw samples.

Invariants: a part is replaced as a whole, so one file may hold parts of several days; each part names its own date, commit and
machine.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LATEST = Path(__file__).parent / "results" / "latest.json"
VERSION = 1
Sample = dict[str, Any]


@dataclasses.dataclass(slots=True)
class Part:
    """One measurement over several rounds; `settings` decide its figures, `subjects` names version and settings of each."""

    name: str
    measured_at: str
    commit: str
    machine: dict[str, Any]
    settings: dict[str, Any]
    subjects: dict[str, dict[str, Any]]
    samples: list[Sample] = dataclasses.field(default_factory=list)

    @property
    def rounds(self) -> int:
        return len({sample["round"] for sample in self.samples})


def load(path: Path) -> dict[str, Part]:
    """Return the parts of a file by name; none if there is no file."""
    if not path.exists():
        return {}
    parts = json.loads(path.read_text(encoding="utf-8"))["parts"]
    return {name: Part(name=name, **fields) for name, fields in parts.items()}


def save(path: Path, parts: Mapping[str, Part]) -> None:
    """Replace the file in one step, so that an interrupted run leaves the last whole round."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".new")
    temporary.write_text(as_text(parts), encoding="utf-8")
    temporary.replace(path)


def as_text(parts: Mapping[str, Part]) -> str:
    """Return the file's text, one sample a line, so that a diff of two runs is readable."""
    fields = {name: dataclasses.asdict(part) | {"samples": f"@{name}"} for name, part in parts.items()}
    without_names = {name: {key: x for key, x in found.items() if key != "name"} for name, found in fields.items()}
    text = json.dumps({"version": VERSION, "parts": without_names}, indent=1, ensure_ascii=False)
    for name, part in parts.items():
        found = part.samples
        lines = ",\n".join("    " + json.dumps(sample, ensure_ascii=False) for sample in found)
        text = text.replace(f'"@{name}"', f"[\n{lines}\n   ]" if found else "[]")
    return text + "\n"
