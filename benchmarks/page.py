"""Page: one part that is measured by a program of its own, and its tables in a page of docs/.

Invariants: the name is that of the part, of its results file, of its page with the section's markers, and of `make bench-NAME`.
The section is written from the results alone: a row for each set-up, a table for each of the workloads W2 and W1.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.__main__ import Group, environment, run
from benchmarks.bench import WARM_S, Bench
from benchmarks.comparison import CONCURRENCY
from benchmarks.machine import ROOT, commit
from benchmarks.report import with_section
from benchmarks.results import LATEST, Part, Sample, load
from benchmarks.summary import rows
from benchmarks.tables import number, table

FAILED = "failed"
HEADS = {"rps": "requests/s", "p50_ms": "p50 ms", "p99_ms": "p99 ms"}
_TITLES = {"w2": "16 tokens", "w1": "8 to 256 tokens"}

Row = Mapping[str, Any]
"""The medians of one set-up and workload, each with its spread; empty if it was not measured."""


@dataclasses.dataclass(frozen=True, slots=True)
class Page:
    """`heads` has the columns of a row's own figures; `last` is one more, from the row of a set-up and workload of `found`."""

    name: str
    setups: Sequence[str]
    heads: Mapping[str, str]
    last: tuple[str, Callable[[Mapping[tuple[str, str], Row], str, str], str]]

    @property
    def results(self) -> Path:
        return LATEST.with_name(f"{self.name}.json")

    @property
    def path(self) -> Path:
        return ROOT / "docs" / f"{self.name}.md"

    @property
    def nothing(self) -> str:
        return f"Not measured yet: `make bench-{self.name}` writes this section."

    def section(self, parts: Mapping[str, Part]) -> str:
        """Return the section of the page as Markdown."""
        if not parts:
            return self.nothing
        part = parts[self.name]
        found: dict[tuple[str, str], Row] = {(row["subject"], row["workload"]): row for row in rows(part.samples)}
        seconds, (last_head, last) = part.settings["seconds"], self.last
        blocks = [f"{part.origin}, {CONCURRENCY} callers, {part.rounds} rounds of {seconds} s, medians."]
        for work, title in _TITLES.items():
            lines = []
            for setup in self.setups:
                row = found.get((setup, work), {})
                cells = [number(row[figure][0]) if figure in row else FAILED for figure in self.heads]
                lines.append([setup, *cells, last(found, setup, work)])
            blocks.append(table([f"{title} a request", *self.heads.values(), last_head], lines))
        return "\n\n".join(blocks)

    def main(
        self,
        module: str,
        measure: Callable[[Bench, str], Iterator[Sample]],
        subjects: Mapping[str, Mapping[str, Any]],
        seconds: int,
    ) -> None:
        """Measure as the command line says, save the results, print the section, and write the page from its own results."""
        parser = argparse.ArgumentParser(prog=f"python -m {module}", allow_abbrev=False)
        parser.add_argument("--rounds", type=int, default=3)
        parser.add_argument("--seconds", type=int, default=seconds, help="of each timed run")
        parser.add_argument("--out", type=Path, default=self.results)
        given = parser.parse_args()
        now, settings = f"{dt.datetime.now(dt.UTC):%Y-%m-%d %H:%M} UTC", {"seconds": given.seconds, "warm_s": WARM_S}
        part = Part(
            self.name, now, commit(), environment(), settings, {x: dict(about) for x, about in subjects.items()}
        )
        with tempfile.TemporaryDirectory(prefix="bench-") as directory, Bench(Path(directory), given.seconds) as bench:
            run(bench, Group((self.name,), measure), {self.name: part}, given.rounds, given.out)
        text = self.section(load(given.out))
        print(text)
        if given.out == self.results:
            self.path.write_text(with_section(self.path.read_text(encoding="utf-8"), self.name, text), encoding="utf-8")
