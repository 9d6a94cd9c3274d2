"""Results: the file that keeps what was measured, part by part, raw and summed up.

Laws: a part is replaced as a whole, by whole rounds, so that one file may hold parts of several days and each says its
own date, commit and machine; a cut leaves the last whole round; the summary is computed from the samples whenever the
file is written, never by hand.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.summary import ratios, rows
from benchmarks.targets import judged

LATEST = Path(__file__).parent / "results" / "latest.json"
VERSION = 1
Sample = dict[str, Any]


@dataclasses.dataclass(slots=True)
class Part:
    """One part's run; `settings` are those that decide the figures, `subjects` what each was started with."""

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

    def goes_on_from(self, other: Part) -> bool:
        """Whether this run is the rest of that one."""
        mine, others = (x.commit for x in (self, other))
        return (mine, self.settings, self.subjects) == (others, other.settings, other.subjects)


class Results:
    """The file's parts; `begin`, then `add` samples, then `end_round` writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.parts = load(path)
        self._running: dict[str, Part] = {}

    def begin(self, part: Part, *, resume: bool = False) -> int:
        """The first round to measure: 0, or where an unfinished run of the same stopped."""
        old = self.parts.get(part.name)
        if resume and old is not None and part.goes_on_from(old):
            part = old
        self._running[part.name] = part
        return part.rounds

    def add(self, name: str, sample: Sample) -> None:
        self._running[name].samples.append(sample)

    def end_round(self) -> None:
        """From here on the file has the new run in place of the old."""
        self.parts |= {name: part for name, part in self._running.items() if part.samples}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        half = self.path.with_suffix(".half")
        half.write_text(as_text(self.parts), encoding="utf-8")
        half.replace(self.path)

    def end(self) -> None:
        """No part is running any more."""
        self._running.clear()


def load(path: Path) -> dict[str, Part]:
    if not path.exists():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    if found["version"] != VERSION:
        raise SystemExit(f"{path} is of another version of this program: move it away")
    return {name: Part(name=name, **fields) for name, fields in found["parts"].items()}


def as_text(parts: Mapping[str, Part]) -> str:
    """The file: samples one a line, so that a difference between two runs can be read."""
    samples = {name: part.samples for name, part in parts.items()}
    document = {
        "version": VERSION,
        "parts": {
            name: {**{k: v for k, v in dataclasses.asdict(part).items() if k != "name"}, "samples": f"@{name}"}
            for name, part in parts.items()
        },
        "summary": {name: rows(found) for name, found in samples.items()},
        "ratios": ratios(samples),
        "targets": [dataclasses.asdict(row) for row in judged(samples)],
    }
    text = json.dumps(document, indent=1, ensure_ascii=False)
    for name, found in samples.items():
        lines = ",\n".join("    " + json.dumps(sample, ensure_ascii=False) for sample in found)
        text = text.replace(f'"@{name}"', f"[\n{lines}\n   ]" if found else "[]")
    return text + "\n"
