"""Report: what was measured beside its target, as a table for people and as a page that keeps it.

Invariants: a row is one target; a row that was not measured says why and is neither a pass nor a miss; a page keeps the rows of
the figures that this run did not measure.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

BEGIN, END = "<!-- torture -->", "<!-- /torture -->"
_VERDICTS = {True: "yes", False: "**NO**", None: "not yet"}


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One target of one figure; `is_met` None: not measured, and `measured` says why."""

    figure: int
    what: str
    target: str
    measured: str
    is_met: bool | None

    def told(self, run: str) -> str:
        return f"| {self.figure} | {self.what} | {self.target} | {self.measured} | {_VERDICTS[self.is_met]} | {run} |"


def at_most(figure: int, what: str, value: float, limit: float, unit: str = "") -> Row:
    """A row for a number that must not be larger than its limit."""
    return Row(figure, what, f"≤ {_text(limit)}{unit}", f"{_text(value)}{unit}", value <= limit)


def at_least(figure: int, what: str, value: float, limit: float, unit: str = "") -> Row:
    return Row(figure, what, f"≥ {_text(limit)}{unit}", f"{_text(value)}{unit}", value >= limit)


def none_of(figure: int, what: str, found: list[str]) -> Row:
    """A row for things that must not happen; it names the first few."""
    told = str(len(found)) + (": " + "; ".join(dict.fromkeys(found[:3])) if found else "")
    return Row(figure, what, "0", told.replace("|", "¦").replace("\n", " ")[:400], not found)


def fails(figure: int, what: str, told: str, is_found: bool) -> Row:
    """A row for a check of a service with a planted fault, which the check must find."""
    return Row(figure, what, "fails", told, is_found)


def not_yet(figure: int, what: str, why: str) -> Row:
    return Row(figure, what, "", why, None)


def _text(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 1000 else f"{value:.3g}"


def table(rows: list[Row], run: str) -> list[str]:
    return ["| # | figure | target | measured | met | run |", "| --- | --- | --- | --- | --- | --- |"] + [
        row.told(run) for row in rows
    ]


def write_page(page: Path, rows: list[Row], run: str, machine: str) -> None:
    """Replaces what stands between the markers; rows of figures that were not run stay."""
    text = page.read_text(encoding="utf-8")
    found = re.search(f"{BEGIN}\n(.*?){END}", text, re.DOTALL)
    if found is None:
        raise SystemExit(f"{page} has no markers {BEGIN} … {END}")
    head, rest = table(rows, run)[:2], table(rows, run)[2:]
    measured = {row.figure for row in rows}
    kept = [line for line in found[1].splitlines() if (n := _figure_of(line)) is not None and n not in measured]
    lines = sorted([*kept, *rest], key=lambda line: _figure_of(line) or 0)
    new = "\n".join(
        [
            BEGIN,
            f"The newest rows are of a run on {machine}. Each row has the date of its own run.",
            "",
            *head,
            *lines,
            END,
        ]
    )
    page.write_text(text[: found.start()] + new + text[found.end() :], encoding="utf-8")


def _figure_of(line: str) -> int | None:
    found = re.match(r"\| (\d+) \|", line)
    return int(found[1]) if found else None
