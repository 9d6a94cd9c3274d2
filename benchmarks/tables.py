"""Tables: the section of `docs/internals/performance.md` with all figures, written from the results alone.

Invariants: functions are pure; a figure is a median with its quartiles; what was not measured is left out; each table names its
processor, code and day, and says so if they are not those of the newest table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.plots import PLOTS
from benchmarks.results import Part, difference
from benchmarks.summary import judged, ratio, rows

Row = dict[str, Any]
HEADLINE = {
    "w1": "W1, 32 callers",
    "w2": "W2, 32 callers",
    "w3": "W3, 32 callers",
    "w2json": "W2 as nested-list JSON, 32 callers",
    "w1c1": "W1, one caller",
    "w2c1": "W2, one caller",
    "bfloat16": "W1 in bfloat16, 32 callers",
    "w2bfloat16": "W2 in bfloat16, 32 callers",
    "attention": "Attention without a layer beside a layer's for the same bytes, 16 tokens as query, key and value, 32 callers",
}
_OF_BOUND, _GROWTH = "of the bound", "cost over that of half the length"
_OF_SERVICE = "of the service"
_FIGURES = ("rps", _OF_SERVICE, "tok_s", _OF_BOUND, "p50_ms", "p99_ms", "server_cores")
_MEMORY = ("processes", "rest_rss_mib", "rest_pss_mib", "peak_rss_mib", "peak_pss_mib", "largest_process_mib")
_OFFERED = ("offered_rps", "rps", "p50_ms", "p99_ms", "refused", "late_p99_ms", "generator_cores")
# Title, the name of a point, and the figures.
_SWEEPS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "concurrency": ("Callers", "callers", ("rps", "p50_ms", "p99_ms", "refused")),
    "processes": ("Processes", "processes", ("rps", "p99_ms", "server_cores")),
    "length": ("Length", "rows", ("callers", "rps", "tok_s", "p99_ms", _OF_BOUND, _GROWTH)),
    "batch": ("Batch", "`max_batch_requests`", ("rps", "mean_batch", "p99_ms", "refused")),
    "offered": ("Offered load", "share of capacity", _OFFERED),
}
# Headings of figures whose name is not one.
_HEADINGS = {
    "rps": "requests/s",
    "tok_s": "tokens/s",
    "server_cores": "cores",
    "offered_rps": "offered/s",
    "late_p99_ms": "generator late p99 ms",
    "generator_cores": "generator's cores",
    "rest_rss_mib": "RSS at rest",
    "rest_pss_mib": "PSS at rest",
    "peak_rss_mib": "RSS at peak",
    "peak_pss_mib": "PSS at peak",
    "largest_process_mib": "largest process",
}
_WITH_RANGE = ("rps", _OF_SERVICE, _OF_BOUND)
_FORMATS = {"callers": ".0f", "server_cores": ".2f", **dict.fromkeys(_MEMORY, ",.0f")}
_VERDICTS = {True: "yes", False: "**no**", None: "not measured"}


def performance(parts: Mapping[str, Part]) -> str:
    """Return the whole section as Markdown."""
    blocks = [_machines(parts), _targets(parts)]
    for names, section in ((HEADLINE, _subjects), (("memory",), _memory), (_SWEEPS, _sweep)):
        for part in (parts[name] for name in names if name in parts):
            title, *rest = section(part)
            blocks += [f"### {title}", _origin(part, parts), *rest]
    return "\n\n".join([*blocks, _runs(parts)])


def table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (heads, ["---"] * len(heads), *lines))


def number(value: float) -> str:
    """Return three digits, or all digits in front of the point."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 1 or not value else f"{value:.3f}"


def with_range(spread: Sequence[float] | None) -> str:
    if not spread:
        return ""
    median, lower, upper = map(number, spread)
    return median if lower == upper else f"{median} ({lower}–{upper})"


def mark(name: str, parts: Mapping[str, Part]) -> str:
    """Return what is added to a row whose part is not of the newest code or processor."""
    found = difference(parts[name], parts) if name in parts else ""
    return f" (**{found}**: {parts[name].origin})" if found else ""


def _origin(part: Part, parts: Mapping[str, Part]) -> str:
    """Return the line above a table: processor, code and day, in bold if not those of the newest table."""
    found = difference(part, parts)
    return f"**{found.capitalize()}: {part.origin}.**" if found else f"{part.origin}."


def _cells(row: Row, figures: Sequence[str]) -> list[str]:
    return [_cell(figure, row[figure]) if figure in row else "" for figure in figures]


def _cell(figure: str, found: Any) -> str:
    if figure in _FORMATS:
        return format(found[0], _FORMATS[figure])
    if isinstance(found, str):
        return found
    return with_range(found) if figure in _WITH_RANGE else number(found[0])


def _machines(parts: Mapping[str, Part]) -> str:
    lines = "\n".join(dict.fromkeys(f"- {_machine(part)}" for part in parts.values()))
    return (
        "Figures are medians over rounds (quartiles); ratios are formed within a round. `service again` is the same service, "
        "started a second time: its ratio to `service` shows the noise. A line in bold above a table says that its code or "
        f"processor is not that of the newest table, so the two may not be compared. Measured on:\n\n{lines}"
    )


def _machine(part: Part) -> str:
    about = part.machine
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    system = f"{about['memory_gib']} GiB, {about['system']}, Python {about['python']}"
    return f"{part.processor}, {system}, {versions}, {about['wrk'].split(' [')[0]}"


def _targets(parts: Mapping[str, Part]) -> str:
    found = judged(parts)
    origins = dict.fromkeys(_origin(parts[x["part"]], parts) for x in found if x["part"] in parts)
    lines = [
        [x["what"] + mark(x["part"], parts), x["target"], with_range(x["measured"]), _VERDICTS[x["is_met"]]]
        for x in found
    ]
    return "\n\n".join(["### Targets", " ".join(origins), table(["what", "target", "measured", "met"], lines)])


def _subjects(part: Part) -> list[str]:
    """Return title and table of every subject on one workload."""
    lines = []
    for row in rows(part.samples):
        if row["subject"] != "service":
            row[_OF_SERVICE] = ratio(part.samples, "rps", row["subject"], "service")
        # With one caller latency counts and not the use of all cores.
        if row["subject"] != "bound" and not part.name.endswith("c1"):
            row[_OF_BOUND] = ratio(part.samples, "tok_s", row["subject"], "bound")
        failed = f", {row['failed']} of {row['failed'] + row['rounds']} failed" if row["failed"] else ""
        lines.append([_named(part, row["subject"]) + failed, *_cells(row, _FIGURES)])
    return [HEADLINE[part.name], table(["subject", *map(_heading, _FIGURES)], lines)]


def _named(part: Part, subject: str) -> str:
    about = part.subjects.get(subject, {})
    found = [text for text in (about.get("version"), about.get("settings")) if text and text != "default"]
    return f"{subject} ({', '.join(found)})" if found else subject


def _heading(figure: str) -> str:
    return _HEADINGS.get(figure, figure.replace("_", " "))


def _memory(part: Part) -> list[str]:
    lines = [[_named(part, row["subject"]), *_cells(row, _MEMORY)] for row in rows(part.samples)]
    return ["Memory under W1, MiB, all processes added up", table(["subject", *map(_heading, _MEMORY)], lines)]


def _sweep(part: Part) -> list[str]:
    title, point, figures = _SWEEPS[part.name]
    found = [row for row in rows(part.samples) if row["subject"] == "service"]
    found.sort(key=lambda row: (row["workload"], row["point"] or 0))
    if part.name == "length":
        found = [row | _compared(part, row, found) for row in found]
    heads = ["work", point, *("answered/s" if (part.name, x) == ("offered", "rps") else _heading(x) for x in figures)]
    picture = [f"![{title}](../plots/{PLOTS[part.name].file})"] if part.name in PLOTS else []
    return [title, *picture, table(heads, [[*_point(row), *_cells(row, figures)] for row in found])]


def _point(row: Row) -> tuple[str, str]:
    work = "one length" if row["workload"] == "length" else row["workload"].upper()
    return work, f"{row['point']:,}" if isinstance(row["point"], int) else str(row["point"] or "failed")


def _compared(part: Part, row: Row, found: Sequence[Row]) -> dict[str, str]:
    """Return the cells of a length that compare it with the bound and with half the length."""
    over = ratio(part.samples, "tok_s", "service", "bound", point=row["point"])
    half = next((x for x in found if (x["point"] or 0) * 2 == row["point"] and "rps" in x), None)
    return {
        _OF_BOUND: f"{over[0]:.2f}" if over else "",
        _GROWTH: f"{half['rps'][0] / row['rps'][0]:.2f}" if half and "rps" in row else "",
    }


def _runs(parts: Mapping[str, Part]) -> str:
    lines = []
    for name, part in parts.items():
        rounds, load = f"{part.rounds} x {part.settings['seconds']:g} s", str(part.machine["load_before"])
        lines.append([name, part.measured_at, f"`{part.commit}`", part.processor, rounds, load])
    return "### Runs\n\n" + table(["part", "when", "code", "processor", "rounds", "load before"], lines)
