"""Tables: what was measured, as the page `docs/performance.md` shows it.

Laws: pure, from the results alone; a median with its quartiles; what was not measured is left out, and a part says
when, at which commit and on what it was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.plotted import PLOTS
from benchmarks.results import Part
from benchmarks.summary import ratio, rows
from benchmarks.targets import Judged, judged

Row = Mapping[str, Any]
HEADLINE = {
    "w1": "W1, 32 callers",
    "w2": "W2, 32 callers",
    "w3": "W3, 32 callers",
    "w2json": "W2 as nested-list JSON, 32 callers",
    "w1c1": "W1, one caller",
    "w2c1": "W2, one caller",
    "bfloat16": "W1 in bfloat16, 32 callers",
}
_VERDICTS = {True: "yes", False: "**no**", None: "not measured"}


def performance(parts: Mapping[str, Part]) -> str:
    """The whole section; one sentence where nothing was measured."""
    if not parts:
        return "Nothing has been measured with this version of the benchmark yet."
    blocks = [_about(parts), _targets(parts), *_subjects(parts), *_memory(parts), *_sweeps(parts), _runs(parts)]
    return "\n\n".join(block for block in blocks if block)


def table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    told = [heads, ["---"] * len(heads), *lines]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in told)


def number(value: float) -> str:
    """Three digits, or all before the point."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 1 or not value else f"{value:.3f}"


def with_range(spread: Sequence[float] | None, show: Callable[[float], str] = number) -> str:
    if not spread:
        return ""
    median, lower, upper = (show(value) for value in spread)
    return median if lower == upper else f"{median} ({lower}–{upper})"


def machine_line(part: Part) -> str:
    about = part.machine
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return (
        f"{about['cpu']}, {about['cores']} cores, {about['memory_gib']} GiB, {about['system']}, Python {about['python']}, "
        f"{versions}, {about['wrk'].split(' [')[0]}"
    )


def _about(parts: Mapping[str, Part]) -> str:
    machines = dict.fromkeys(machine_line(part) for part in parts.values())
    lines = "\n".join(f"- {line}" for line in machines)
    return f"Figures are medians over rounds (quartiles); ratios are formed within a round. Measured on:\n\n{lines}"


def _targets(parts: Mapping[str, Part]) -> str:
    lines = [_target_line(row) for row in judged({name: part.samples for name, part in parts.items()})]
    return "### Targets\n\n" + table(["what", "target", "measured", "met"], lines)


def _target_line(row: Judged) -> list[str]:
    return [row.what, row.target, with_range(row.measured), _VERDICTS[row.is_met]]


def _subjects(parts: Mapping[str, Part]) -> Iterator[str]:
    """A table for each workload that has targets."""
    for name, title in HEADLINE.items():
        if name in parts:
            found = rows(parts[name].samples)
            lines = [_subject_line(parts[name], row) for row in found]
            heads = ["subject", "requests/s", "tokens/s", "of the bound", "p50 ms", "p99 ms", "cores"]
            yield f"### {title}\n\n" + table(heads, lines)


def _subject_line(part: Part, row: Row) -> list[str]:
    # One caller waits for answers, not for a core: there the times count.
    is_bound = row["subject"] == "bound" or part.name.endswith("c1")
    over = None if is_bound else ratio(part.samples, "tok_s", row["subject"], "bound")
    failed = f", {row['failed']} of {row['failed'] + row['rounds']} failed" if row["failed"] else ""
    cores = f"{row['server_cores'][0]:.2f}" if "server_cores" in row else ""
    return [
        _named(part, row["subject"]) + failed,
        with_range(row.get("rps")),
        number(row["tok_s"][0]) if "tok_s" in row else "",
        with_range(over),
        *(number(row[name][0]) if name in row else "" for name in ("p50_ms", "p99_ms")),
        cores,
    ]


def _named(part: Part, subject: str) -> str:
    about = part.subjects.get(subject, {})
    told = [text for text in (about.get("version"), about.get("settings")) if text and text != "default"]
    return f"{subject} ({', '.join(told)})" if told else subject


def _memory(parts: Mapping[str, Part]) -> Iterator[str]:
    if "memory" in parts:
        names = ("processes", "rest_rss_mib", "rest_pss_mib", "peak_rss_mib", "peak_pss_mib", "largest_process_mib")
        lines = [
            [
                _named(parts["memory"], row["subject"]),
                *(f"{row[name][0]:,.0f}" if name in row else "" for name in names),
            ]
            for row in rows(parts["memory"].samples)
        ]
        heads = ["subject", "processes", "RSS at rest", "PSS at rest", "RSS at peak", "PSS at peak", "largest process"]
        yield "### Memory under W1, MiB, all processes added up\n\n" + table(heads, lines)


# Title, the point's name, and the columns: (heading, figure).
_SWEEPS: dict[str, tuple[str, str, tuple[tuple[str, str], ...]]] = {
    "concurrency": (
        "Callers",
        "callers",
        (("requests/s", "rps"), ("p50 ms", "p50_ms"), ("p99 ms", "p99_ms"), ("refused", "refused")),
    ),
    "processes": ("Processes", "processes", (("requests/s", "rps"), ("p99 ms", "p99_ms"), ("cores", "server_cores"))),
    "length": (
        "Length",
        "rows",
        (("callers", "callers"), ("requests/s", "rps"), ("tokens/s", "tok_s"), ("p99 ms", "p99_ms")),
    ),
    "batch": (
        "Batch",
        "`max_batch_requests`",
        (("requests/s", "rps"), ("mean batch", "mean_batch"), ("p99 ms", "p99_ms"), ("refused", "refused")),
    ),
    "offered": (
        "Offered load",
        "share of capacity",
        (
            ("offered/s", "offered_rps"),
            ("answered/s", "rps"),
            ("p50 ms", "p50_ms"),
            ("p99 ms", "p99_ms"),
            ("refused", "refused"),
            ("generator late p99 ms", "late_p99_ms"),
            ("generator's cores", "generator_cores"),
        ),
    ),
    "evenness": (
        "Evenness over processes",
        "callers",
        (("least share", "least_share"), ("greatest share", "greatest_share")),
    ),
}
_WITH_RANGE = {"rps", "greatest_share"}


def _sweeps(parts: Mapping[str, Part]) -> Iterator[str]:
    for name, (title, point, columns) in _SWEEPS.items():
        if name in parts:
            found = [row for row in rows(parts[name].samples) if row["subject"] == "service"]
            found.sort(key=lambda row: (row["workload"], row["point"] or 0))
            extra = _grown if name == "length" else _nothing
            lines = [_sweep_line(row, columns) + extra(parts[name], row, found) for row in found]
            heads = ["work", point, *(head for head, _ in columns), *extra(parts[name], None, found)]
            shown = f"![{title}](plots/{PLOTS[name].file})\n\n" if name in PLOTS else ""
            yield f"### {title}\n\n{shown}" + table(heads, lines)


def _sweep_line(row: Row, columns: Sequence[tuple[str, str]]) -> list[str]:
    def shown(figure: str) -> str:
        if figure not in row:
            return ""
        if figure == "callers":
            return f"{row[figure][0]:.0f}"
        return with_range(row[figure]) if figure in _WITH_RANGE else number(row[figure][0])

    point = f"{row['point']:,}" if isinstance(row["point"], int) else row["point"] or "failed"
    return [
        row["workload"].upper() if row["workload"] != "length" else "one length",
        str(point),
        *(shown(f) for _, f in columns),
    ]


def _nothing(_part: Part, _row: Row | None, _all: Sequence[Row]) -> list[str]:
    return []


def _grown(part: Part, row: Row | None, found: Sequence[Row]) -> list[str]:
    """Of the bound, and by how much a request's cost grew since half the length."""
    if row is None:
        return ["of the bound", "cost over that of half the length"]
    over = ratio(part.samples, "tok_s", "service", "bound", point=row["point"])
    half = next((x for x in found if x["point"] * 2 == row["point"] and "rps" in x), None)
    grown = f"{half['rps'][0] / row['rps'][0]:.2f}" if half and "rps" in row else ""
    return [f"{over[0]:.2f}" if over else "", grown]


def _runs(parts: Mapping[str, Part]) -> str:
    lines = [
        [
            name,
            part.measured_at,
            f"`{part.commit}`",
            f"{part.rounds} x {part.settings['seconds']:g} s",
            f"{part.machine['load_before']}",
        ]
        for name, part in parts.items()
    ]
    return "### Runs\n\n" + table(["part", "when", "commit", "rounds", "load before"], lines)
