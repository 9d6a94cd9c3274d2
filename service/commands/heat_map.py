"""Heat map: draws attention weights as a table in the terminal, labelled with words.

Invariants: Only the weight decides a colour. The legend's bounds are exact: `*` above 0.5, `+` above 0.2, `.` above 0.05, blank
otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

LEGEND = ((0.5, "*"), (0.2, "+"), (0.05, "."))
# From nearly black to bright, because the eye reads brightness as strength.
_RAMP = ("#1a1a2e", "#16325c", "#0f4c81", "#1f7a8c", "#3fa796", "#8cc84b", "#f5d547", "#ffffff")


def legend_mark(weight: float) -> str:
    return next((mark for bound, mark in LEGEND if weight > bound), " ")


def draw(
    weights: np.ndarray, queries: Sequence[str], keys: Sequence[str], *, title: str, use_legend: bool, width: int = 80
) -> RenderableType:
    """Return a table of one head's weights [L, S]: a row per query word with its strongest key, a column per key word.

    The column headers are words if all columns fit into `width` terminal cells beside the rows' words and the strongest keys.
    Else they are numbers, and the columns that have no room follow in further tables.
    """
    assert weights.shape == (len(queries), len(keys)), "a word for every row and column. This is a bug."
    key_widths, num_shown = [cell_len(key) for key in keys], len(keys)
    room = width - max(max(key_widths) + len(" 0.000"), len("strongest")) - 2
    best = [int(np.argmax(row)) for row in weights]
    strongest = [f"{keys[i]} {row[i]:.3f}" if row[i] > 0 else "-" for i, row in zip(best, weights, strict=True)]
    if max(map(cell_len, queries)) + sum(max(3, key_width) + 1 for key_width in key_widths) > room:
        queries = [f"{number} {word}" for number, word in enumerate(queries)]
        num_shown = max(1, (room - max(map(cell_len, queries))) // (max(3, len(str(num_shown - 1))) + 1))
        keys = [str(number) for number in range(len(keys))]
    tables = []
    for first in range(0, len(keys), num_shown):
        table = Table(title=None if first else title, box=None, padding=(0, 1, 0, 0), show_edge=False)
        table.add_column("", justify="right", no_wrap=True)
        for key in keys[first : first + num_shown]:
            table.add_column(Text(key), justify="center", no_wrap=True, min_width=3)
        table.add_column("strongest", no_wrap=True)
        for word, row, text in zip(queries, weights, strongest, strict=True):
            cells = (Text(legend_mark(w)) if use_legend else _cell(float(w)) for w in row[first : first + num_shown])
            table.add_row(Text(word), *cells, Text(text))
        tables.append(table)
    marks = "   ".join(f"{mark} > {bound}" for bound, mark in LEGEND)
    note = marks if use_legend else "weights in hundredths; brighter = stronger"
    return Group(*tables, Text(note, style="dim"))


def _cell(weight: float) -> Text:
    """Return the weight in hundredths on a background that is brighter for larger weights; ?? for one that is not finite."""
    if not np.isfinite(weight):
        return Text("??", style="red")
    step = min(len(_RAMP) - 1, int(max(weight, 0.0) ** 0.5 * len(_RAMP)))
    ink = "black" if step >= len(_RAMP) // 2 else "white"
    return Text(f"{round(weight * 100):2d}", style=f"{ink} on {_RAMP[step]}")
