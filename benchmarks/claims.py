"""Claims: what the README says of speed: few lines, from the results alone, misses included.

Laws: pure; a claim names its machine and its date; a target that was missed or not measured is named as such.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.results import Part
from benchmarks.summary import ratio, rows
from benchmarks.tables import number, table, with_range
from benchmarks.targets import Judged, judged

_SHOWN = {
    "w1": "lengths 8 to 256, safetensors",
    "w2": "16 tokens, safetensors",
    "w3": "lengths 8 to 256, with all weights",
    "w2json": "16 tokens, JSON lists",
    "w2c1": "16 tokens, one caller",
}
_NOBODY = ("service", "bound", "echo")


def claims(parts: Mapping[str, Part]) -> str:
    """The section; says so where there is nothing to claim."""
    shown = [name for name in _SHOWN if name in parts]
    if not shown:
        return "Nothing has been measured with this version of the benchmark yet (`make bench`)."
    lines = [_line(parts[name]) for name in shown]
    heads = ["request", "requests/s", "p50, p99 ms", "of the bound", "times the requests/s of"]
    return "\n\n".join([_about([parts[name] for name in shown]), table(heads, lines), _verdicts(parts)])


def _about(parts: list[Part]) -> str:
    first = parts[0]
    days = sorted({part.measured_at[:10] for part in parts})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    about = first.machine
    return (
        f"Measured {when} on {about['cpu']}, {about['cores']} cores, which the load generator shares: `serve` with default "
        "settings, one layer, 512 wide, 8 heads, 32 callers where nothing else is said, medians over rounds "
        f"({_rounds(parts)}). The bound is the same work in plain torch in one process, "
        "without a server:"
    )


def _rounds(parts: list[Part]) -> str:
    """How often and how long; parts that were measured otherwise than the first are named."""

    def of(part: Part) -> str:
        return f"{part.rounds} of {part.settings['seconds']:g} s"

    others = [f"{_SHOWN[part.name]}: {of(part)}" for part in parts[1:] if of(part) != of(parts[0])]
    return "; ".join([of(parts[0]), *others])


def _line(part: Part) -> list[str]:
    row = next(row for row in rows(part.samples) if row["subject"] == "service")
    over = ratio(part.samples, "tok_s", "service", "bound")
    return [
        _SHOWN[part.name],
        number(row["rps"][0]) if "rps" in row else "failed",
        ", ".join(number(row[name][0]) for name in ("p50_ms", "p99_ms") if name in row),
        f"{over[0]:.2f}" if over and part.name != "w2c1" else "",
        _others(part),
    ]


def _others(part: Part) -> str:
    names = sorted({sample["subject"] for sample in part.samples if sample["subject"] not in _NOBODY})
    found = {name: ratio(part.samples, "rps", "service", name) for name in names}
    return ", ".join(f"{name} {number(over[0])}" for name, over in found.items() if over)


def _verdicts(parts: Mapping[str, Part]) -> str:
    found = judged({name: part.samples for name, part in parts.items()})
    met = sum(row.is_met is True for row in found)
    missed = "; ".join(_told(row) for row in found if row.is_met is False)
    absent = sum(row.is_met is None for row in found)
    lines = [f"Of {len(found)} targets {met} are met{f', {absent} were not measured' if absent else ''}."]
    lines += [f"Missed: {missed}."] if missed else []
    return "\n".join([*lines, "All figures: [`docs/performance.md`](docs/performance.md)."])


def _told(row: Judged) -> str:
    return f"{row.what} {row.target}: {with_range(row.measured)}"
