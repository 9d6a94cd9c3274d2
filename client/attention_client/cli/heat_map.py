"""Heat map: one head's attention weights, of an answer or a file, as a table in the terminal, labelled with words.

Invariants: Only the weight decides a colour. The legend's bounds are exact: `*` above 0.5, `+` above 0.2, `.` above 0.05, blank
otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from attention_client.cli.arguments import load_array
from attention_client.cli.asking import Ask
from attention_client.cli.terminal import console
from attention_client.errors import InvalidInput

LEGEND = ((0.5, "*"), (0.2, "+"), (0.05, "."))
# From nearly black to bright, because the eye reads brightness as strength.
_RAMP = ("#1a1a2e", "#16325c", "#0f4c81", "#1f7a8c", "#3fa796", "#8cc84b", "#f5d547", "#ffffff")


def legend_mark(weight: float) -> str:
    return next((mark for bound, mark in LEGEND if weight > bound), " ")


def asked_head(ask: Ask, layer: str | None, body: dict[str, Any], sequence: int, head: int) -> np.ndarray:
    """Return the weights [L, S] that the layer computes for one sequence and head; raises InvalidInput for a missing sequence."""
    reply = ask(layer, {**body, "weights": {"form": "heads", "heads": [head]}})
    weights = reply.array("weights", (1, None, None), (None, 1, None, None))
    sequences: list[np.ndarray] = [*weights.reshape(-1, *weights.shape[-2:])]
    if sequence >= len(sequences):
        raise InvalidInput(f"--sequence must be below {len(sequences)}, the number of sequences")
    return sequences[sequence]


def stored_head(path: Path, sequence: int, head: int | None) -> tuple[np.ndarray, str]:
    """Return the weights [L, S] of one sequence and head in a file, and their title; raises InvalidInput if it lacks them."""
    array = load_array(path, "weights")
    found = f"{array.dtype} {list(array.shape)}"
    if array.ndim not in (2, 3, 4) or array.dtype.kind != "f" or not array.size:
        raise InvalidInput(f"{path} must hold weights [B, H, L, S], [B, L, S] or [L, S], got {found}")
    has_heads = array.ndim == 4  # noqa: PLR2004 ([B, H, L, S])
    if head is not None and not has_heads:
        raise InvalidInput(f"{path} has no heads to choose from: {found}; --sequence chooses from [H, L, S]")
    table = array.reshape(-1, array.shape[1] if has_heads else 1, *array.shape[-2:])
    for option, index, size in zip(("--sequence", "--head"), (sequence, head or 0), table.shape, strict=False):
        if index >= size:
            raise InvalidInput(f"{option} must be below {size}")
    return table[sequence, head or 0], f"{path.name}, head {head or 0}" if has_heads else path.name


def print_map(weights: np.ndarray, tokens: str | None, key_tokens: str | None, title: str, *, use_legend: bool) -> None:
    rows, columns = weights.shape
    queries = _words(tokens, rows, "--tokens")
    keys = _words(key_tokens, columns, "--key-tokens") if key_tokens or rows != columns else queries
    screen = console()
    screen.print(draw(weights, queries, keys, title=title, use_legend=use_legend, width=screen.width))


def _words(text: str | None, count: int, option: str) -> list[str]:
    words = [str(i) for i in range(count)] if text is None else text.split()
    if len(words) != count:
        raise InvalidInput(f"{option} has {len(words)} words for {count} rows")
    return words


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
