"""Results: the file of what was measured, part by part, as raw samples.

Invariants: a part has one code, machine, settings and subjects; more rounds of the same are added, anything else replaces it. So
one file may hold parts of several days, processors and commits; each names its own, and `difference` tells them apart.
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

    @property
    def processor(self) -> str:
        """Return the model name, the instruction sets (which older results lack) and the cores."""
        sets = self.machine.get("isa")
        return f"{self.machine['cpu']}{f' ({sets})' if sets else ''}, {self.machine['cores']} cores"

    @property
    def origin(self) -> str:
        """Return processor, code and day, which every table and picture names."""
        return f"{self.processor}, code {self.commit}, {self.measured_at[:10]}"


def newest(parts: Mapping[str, Part]) -> Part:
    return max(parts.values(), key=lambda part: part.measured_at)


def difference(part: Part, parts: Mapping[str, Part]) -> str:
    """Return why the part may not be compared with the newest one: "older code", "another processor", both, or nothing."""
    last = newest(parts)
    ours, theirs = part.machine, last.machine
    is_same = all(ours.get(key, theirs.get(key)) == theirs.get(key) for key in ("cpu", "isa", "cores"))
    found = {"older code": part.commit != last.commit, "another processor": not is_same}
    return ", ".join(text for text, applies in found.items() if applies)


def pooled(earlier: Part | None, new: Part) -> Part:
    """Return the new part, behind the rounds of the earlier one if both measured the same. Its newest time is the first."""
    if earlier is None or _measured(earlier) != _measured(new) or new.commit.endswith("+"):
        return new
    first = 1 + max((x["round"] for x in earlier.samples), default=-1)
    added = [sample | {"round": first + sample["round"]} for sample in new.samples]
    load_before = max(part.machine["load_before"] for part in (earlier, new))
    return dataclasses.replace(
        new,
        measured_at=f"{new.measured_at}, {earlier.measured_at}",
        machine=new.machine | {"load_before": load_before},
        samples=[*earlier.samples, *added],
    )


def _measured(part: Part) -> tuple[object, ...]:
    return part.commit, part.machine | {"load_before": None}, part.settings, part.subjects


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
