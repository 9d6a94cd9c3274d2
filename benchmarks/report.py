"""python -m benchmarks.report: write the generated sections of performance.md and README.md from the results alone.

Invariants: only what stands between the markers is replaced; the README's sentence names its processor, its date and how many
targets are missed, and performance.md names each; a figure of older code or another processor says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from benchmarks.results import LATEST, Part, load, newest
from benchmarks.subjects import AGAIN, BOUND, ECHO, SERVICE
from benchmarks.summary import judged, ratio, rows
from benchmarks.tables import mark, number, performance, table, with_range

ROOT = Path(__file__).parents[1]
_SHOWN = {
    "w1": "lengths 8 to 256, safetensors",
    "w2": "16 tokens, safetensors",
    "w3": "lengths 8 to 256, with all weights",
    "w2json": "16 tokens, JSON lists",
    "w2c1": "16 tokens, one caller",
}


# What the sentence of the README says of these workloads.
_SAID = (
    (("w1", "w2", "w3"), "mosec", "rps", "{} times the requests/s of Mosec with tensors as bytes"),
    (("w2json",), "mosec", "rps", "{} times with lists"),
    (("w1", "w2", "w3"), BOUND, "tok_s", "{} times the speed of plain torch without a server"),
)


def sentence(parts: Mapping[str, Part]) -> str:
    """Return what the README says about speed, as Markdown."""
    last = newest(parts)
    said = [text for text in (_said(parts, *about) for about in _SAID) if text]
    verdicts = [target["is_met"] for target in judged(parts)]
    counts = [f"{verdicts.count(v)} {word}" for v, word in ((False, "missed"), (None, "not measured")) if v in verdicts]
    return (
        f"On {last.processor} ({last.measured_at[:10]}), the service has {', '.join(said) or 'not been compared'}; "
        f"of {len(verdicts)} targets {', '.join([f'{verdicts.count(True)} are met', *counts])} "
        "([every figure, and other processors](docs/internals/performance.md#speed))."
    )


def _said(parts: Mapping[str, Part], names: tuple[str, ...], other: str, figure: str, text: str) -> str:
    """Return a clause with the smallest and the largest median over the workloads; nothing if none was measured."""
    found = {name: ratio(parts[name].samples, figure, SERVICE, other) for name in names if name in parts}
    medians = sorted(spread[0] for spread in found.values() if spread)
    ends = dict.fromkeys(map(number, medians[:1] + medians[-1:]))
    marks = dict.fromkeys(mark(name, parts) for name, spread in found.items() if spread)
    return text.format(" to ".join(ends)) + "".join(marks) if medians else ""


def claims(parts: Mapping[str, Part]) -> str:
    """Return the summary of performance.md as Markdown: the workloads in one table, and the missed targets."""
    shown = [parts[name] for name in _SHOWN if name in parts]
    heads = ["request", "requests/s", "p50, p99 ms", "of the bound", "times the requests/s of", "itself, started again"]
    return "\n\n".join(
        [_about(shown, newest(parts)), table(heads, [_line(part, parts) for part in shown]), _verdicts(parts)]
    )


def _about(parts: list[Part], last: Part) -> str:
    days = sorted({day for part in parts for day in re.findall(r"\d{4}-\d\d-\d\d", part.measured_at)})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    # Parts with other rounds than the first are named.
    first, *rest = ((_SHOWN[part.name], f"{part.rounds} of {part.settings['seconds']:g} s") for part in parts)
    rounds = "; ".join([first[1], *(f"{name}: {length}" for name, length in rest if length != first[1])])
    return (
        f"Measured {when} on {last.processor}, which the load generator shares: "
        "`serve` with default settings, one layer, 512 wide, 8 heads, 32 callers where nothing else is said, medians over "
        f"rounds ({rounds}). The bound is the same work in plain torch in one process, without a server:"
    )


def _line(part: Part, parts: Mapping[str, Part]) -> list[str]:
    row = next(row for row in rows(part.samples) if row["subject"] == SERVICE)
    over = ratio(part.samples, "tok_s", SERVICE, BOUND)
    peers = sorted({sample["subject"] for sample in part.samples} - {SERVICE, AGAIN, BOUND, ECHO})
    ratios = {name: ratio(part.samples, "rps", SERVICE, name) for name in peers}
    itself = ratio(part.samples, "rps", AGAIN, SERVICE)
    return [
        _SHOWN[part.name] + mark(part.name, parts),
        number(row["rps"][0]) if "rps" in row else "failed",
        ", ".join(number(row[name][0]) for name in ("p50_ms", "p99_ms") if name in row),
        f"{over[0]:.2f}" if over and part.name != "w2c1" else "",
        ", ".join(f"{name} {number(found[0])}" for name, found in ratios.items() if found),
        with_range(itself) or "not measured",
    ]


def _verdicts(parts: Mapping[str, Part]) -> str:
    found = judged(parts)
    verdicts = [target["is_met"] for target in found]
    absent = f", {verdicts.count(None)} not measured" if None in verdicts else ""
    lines = [f"Of {len(found)} targets {verdicts.count(True)} are met{absent}."]
    missed = [
        f"{x['what']} {x['target']}: {with_range(x['measured'])}{mark(x['part'], parts)}"
        for x in found
        if x["is_met"] is False
    ]
    lines += [f"Missed: {'; '.join(missed)}."] if missed else []
    return "\n".join(lines)


# Page, and the function that writes each of its sections, by the name of the markers.
PAGES = {
    ROOT / "docs" / "internals" / "performance.md": {"claims": claims, "bench": performance},
    ROOT / "README.md": {"speed": sentence},
}


def with_section(text: str, marker: str, section: str) -> str:
    """Return the page with `section` between its markers; ValueError if it has none."""
    before, start, rest = text.partition(f"<!-- {marker} -->\n")
    _, end, after = rest.partition(f"<!-- /{marker} -->")
    if not end:
        raise ValueError(f"the page has no markers <!-- {marker} --> … <!-- /{marker} -->")
    return f"{before}{start}{section}\n{end}{after}"


def stale(parts: Mapping[str, Part]) -> dict[Path, str]:
    """Return the new text of each page that differs from the results."""
    new = {}
    for page, sections in PAGES.items():
        text = old = page.read_text(encoding="utf-8")
        for marker, section in sections.items():
            text = with_section(text, marker, section(parts))
        if text != old:
            new[page] = text
    return new


if __name__ == "__main__":
    for path, text in stale(load(LATEST)).items():
        path.write_text(text, encoding="utf-8")
        print(f"{path.relative_to(ROOT)} written")
