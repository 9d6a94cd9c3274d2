"""Writes the table of docs/checkpoints.md from the rows of the families: `python -m tests.unit.layers.families_page`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from service.layers.families import FAMILIES, FAMILY_NAMES
from service.layers.family import Family

PAGE = Path(__file__).parents[3] / "docs" / "checkpoints.md"
START, END = "<!-- families -->", "<!-- /families -->"
HEADS = ("family", "models and modules", "`model_type`", "its keys, below the layer's prefix", "parts")


def page(before: str) -> str:
    """Return the page with the present table."""
    head, rest = before.split(START)
    lines = [f"| {' | '.join(cells)} |" for cells in (HEADS, ["---"] * len(HEADS), *_rows())]
    return "\n".join([head + START, "", *lines, "", END + rest.split(END)[1]])


def _rows() -> Iterator[list[str]]:
    for name in FAMILY_NAMES:
        rows = [row for row in FAMILIES if row.name == name]
        models = dict.fromkeys(model for row in rows for model in row.models)
        keys = dict.fromkeys(_keys(row) for row in rows)
        parts = dict.fromkeys(part for row in rows for part in _parts(row))
        yield [
            f"`{name}`",
            next((row.about for row in rows if row.about), ""),
            ", ".join(f"`{model}`" for model in models) + (" (needed)" if not any(row.is_open for row in rows) else ""),
            "; ".join(keys),
            ", ".join(parts),
        ]


def _keys(row: Family) -> str:
    """Return the key of query, or of all three, and that of the output."""
    output = [key for key, names in row.parts.items() if names[0] == "output.weight"]
    return " … ".join(f"`{key}`" for key in (row.anchors[0], *output))


def _parts(row: Family) -> Iterator[str]:
    if row.causal:
        yield "causal" if row.causal is True else f"causal if `{row.causal}`"
    if row.is_grouped:
        yield "grouped heads"
    if row.rotary:
        yield f"rotary ({row.rotary.layout}; {', '.join(row.rotary.scalings)})"
    if row.norm:
        yield f"{row.norm.kind} norm over the {row.norm.over}"
    if row.window:
        yield f"window (`{row.window.size}`)"
    if row.table:
        yield "relative bias"
    if row.softcap:
        yield "softcap"
    if "sinks" in row.parts:
        yield "sinks"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
