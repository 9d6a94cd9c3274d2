"""python -m benchmarks.gpu_page: write the generated section of `docs/gpu.md` from the results of `make gpu` alone.

Invariants: without results the page says that no card has run it; a part that failed, and an aim that was missed or not
measured, are named as such.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.machine import ROOT
from benchmarks.report import with_section
from benchmarks.tables import number, table

RESULTS = ROOT / "benchmarks" / "results" / "gpu.json"
PAGE = ROOT / "docs" / "gpu.md"
NOTHING = "No card has run it yet, so there are no figures."
_MODES = (("float32", False), ("float32", True), ("bfloat16", False), ("bfloat16", True))
Rows = list[dict[str, Any]]


def section(results: Mapping[str, Any] | None) -> str:
    """Return the section as Markdown."""
    if results is None:
        return NOTHING
    rows = {name: part["rows"] for name, part in results["parts"].items()}
    served = [row for name, found in rows.items() if name.startswith("serve-") for row in found if "rps" in row]
    blocks = [_about(results, rows.get("machine", [])), _aims(served, rows.get("speed", []))]
    blocks += _serving(served)
    blocks += _engine(rows.get("speed", []))
    titles = {
        "bits": "Alone and together",
        "cudnn": "cuDNN's attention",
        "meaning": "Biases beside the CPU's",
        "launches": "Launches and copies of a batch",
        "varlen": "One launch in plain torch",
        "memory": "Memory used up",
        "lost": "Device lost",
        "tests": "Tests marked `gpu`",
    }
    for name, title in titles.items():
        blocks += _plain(title, rows.get(name, []))
    blocks.append(_parts(results["parts"]))
    return "\n\n".join(blocks)


def _about(results: Mapping[str, Any], rows: Rows) -> str:
    card = rows[0] if rows else {}
    told = ", ".join(
        f"{key} {card[key]}" for key in ("memory_mib", "driver", "cuda", "cudnn", "torch") if card.get(key)
    )
    dry = "**A dry run on the CPU; its figures mean nothing.** " if results["dry"] else ""
    return (
        f"{dry}Measured {results['measured_at']} at `{results['commit']}` on {card.get('card', 'an unknown card')} ({told}); "
        f"{results['cpu']}, {results['cores']} cores, {results['memory_gib']} GiB, Python {results['python']}."
    )


def aims(served: Rows, speed: Rows) -> list[tuple[str, float | None, bool | None]]:
    """Return each aim with its figure and whether it is met; None = not measured."""
    best = max((row["rps"] for row in served if row["case"] == "w2"), default=None)
    calls = {
        (row["case"], row["batch"], row["dtype"], row["exact"]): row["calls_per_s"]
        for row in speed
        if "calls_per_s" in row
    }

    def lowest(over: tuple[str, bool], under: tuple[str, bool]) -> float | None:
        pairs = [(calls[key], calls.get((*key[:2], *under))) for key in calls if key[2:] == over]
        return min((a / b for a, b in pairs if b), default=None)

    found = [
        ("W2 with the best number of workers, requests/s ≥ 20,000", best, 20_000.0),
        ("float32, exact over tolerant, lowest of the cases ≥ 0.8", lowest(("float32", True), ("float32", False)), 0.8),
        ("bfloat16 over float32, lowest of the cases ≥ 1", lowest(("bfloat16", False), ("float32", False)), 1.0),
    ]
    return [(what, value, None if value is None else value >= least) for what, value, least in found]


def _aims(served: Rows, speed: Rows) -> str:
    verdicts = {True: "yes", False: "**no**", None: "not measured"}
    lines = [
        [what, "" if value is None else number(value), verdicts[is_met]] for what, value, is_met in aims(served, speed)
    ]
    return table(["aim", "measured", "met"], lines)


def _serving(served: Rows) -> Iterator[str]:
    if served:
        names = (
            "workers",
            "case",
            "callers",
            "rps",
            "p50_ms",
            "p99_ms",
            "refused",
            "memory_mib",
            "device_mib",
            "card_mib",
            "generator_cores",
        )
        yield "### Serving\n\n" + table(names, [[_cell(row.get(name)) for name in names] for row in served])
        yield (
            "`memory_mib` is the host's (PSS) and `device_mib` what torch holds for layers and batches, both of all processes; "
            "`card_mib` is all that the card has in use, with each worker's CUDA context."
        )


def _engine(rows: Rows) -> Iterator[str]:
    calls = {
        (row["case"], row["batch"], row["dtype"], row["exact"]): row["calls_per_s"]
        for row in rows
        if "calls_per_s" in row
    }
    if calls:
        heads = ["calls/s", "batch", *(f"{dtype}{', exact' if is_exact else ''}" for dtype, is_exact in _MODES)]
        keys = dict.fromkeys(key[:2] for key in calls)
        lines = [
            [case, str(batch), *(_cell(calls.get((case, batch, *mode))) for mode in _MODES)] for case, batch in keys
        ]
        yield "### The engine without HTTP\n\n" + table(heads, lines)


def _plain(title: str, rows: Rows) -> Iterator[str]:
    """Yield the rows as they are, one column for each of their figures."""
    if rows:
        names = list(dict.fromkeys(name for row in rows for name in row))
        yield f"### {title}\n\n" + table(names, [[_cell(row.get(name)) for name in names] for row in rows])


def _parts(parts: Mapping[str, Any]) -> str:
    lines = [
        [name, f"{part['seconds']:.0f}", (part["failed"] or "ok").replace("|", "¦")] for name, part in parts.items()
    ]
    return "### Parts\n\n" + table(["part", "seconds", "result"], lines)


def _cell(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: ""}[value]
    if isinstance(value, float):
        return number(value) if not value or abs(value) >= 1e-3 else f"{value:.1e}"
    return str(value).replace("|", "¦").replace("\n", " ")


def load() -> dict[str, Any] | None:
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else None


def write(results: Mapping[str, Any] | None) -> None:
    PAGE.write_text(with_section(PAGE.read_text(encoding="utf-8"), "gpu", section(results)), encoding="utf-8")


if __name__ == "__main__":
    write(load())
    print(f"{PAGE.relative_to(ROOT)} written")
