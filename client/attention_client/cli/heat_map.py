"""Heat map: one head's attention weights, of an answer or a file, as a table in the terminal or an SVG, labelled with words.

Invariants: Only the weight decides a colour. The legend's bounds are exact: `*` above 0.5, `+` above 0.2, `.` above 0.05, blank
otherwise. All keys are drawn, on several pages if they must be, and each page counts its keys.
The text of an SVG is foreign: what XML cannot hold is escaped by `printable`, its marks by `html`.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from attention_client.cli.arguments import load_array
from attention_client.cli.asking import Ask
from attention_client.cli.terminal import Screen, printable
from attention_client.errors import BadAnswer, InvalidInput

Words: TypeAlias = list[str] | None
LEGEND = ((0.5, "*"), (0.2, "+"), (0.05, "."))
# From nearly black to bright, because the eye reads brightness as strength.
_RAMP = ("#1a1a2e", "#16325c", "#0f4c81", "#1f7a8c", "#3fa796", "#8cc84b", "#f5d547", "#ffffff")

# Of the SVG, in its units.
CELL, BAR = 22, 200
CHARACTER = 6.6  # mean width of one at the font's size, 11
INK, NOT_FINITE = "#0b3d91", "#d62728"


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


def text_head(ask: Ask, model: str | None, body: dict[str, Any], head: int) -> tuple[np.ndarray, list[Words], str]:
    """Return the weights [L, L] of a head of a model (None: the only one) on a text, its tokens as words, and a title."""
    model = model or ask.only_model()
    reply = ask.of_text(model, {**body, "weights": {"form": "heads", "heads": [head]}})
    match reply.facts.get("tokens"):
        case [*tokens] if all(isinstance(token, dict) and isinstance(token.get("text"), str) for token in tokens):
            words = [token["text"] for token in tokens]
            weights = reply.array("weights", (1, len(words), len(words)))[0]
            return weights, [words, None], f"{model}, layer {body['layer']}, head {head}"
    raise BadAnswer("the answer lacks the tokens of the text")


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


def print_map(
    weights: np.ndarray, words: Sequence[Words], title: str, picture: Path | None, *, use_legend: bool
) -> None:
    """Draw the weights in the terminal, or write them to the SVG `picture`; `words` are those of queries and of keys."""
    (tokens, key_tokens), (rows, columns), title = words, weights.shape, printable(title)
    queries = _words(tokens, rows, "--tokens")
    keys = _words(key_tokens, columns, "--key-tokens") if key_tokens or rows != columns else queries
    screen = Screen()
    if picture is not None:
        try:
            picture.write_text(svg(weights, queries, keys, title), encoding="utf-8")
        except OSError as error:
            raise InvalidInput(f"{picture} cannot be written: {error.strerror}") from None
        screen.print(f"{title}: {rows} queries and {columns} keys, written to {picture}", soft_wrap=True)
        return
    screen.print(draw(weights, queries, keys, title=title, use_legend=use_legend, width=screen.width))


def _words(given: Words, count: int, option: str) -> list[str]:
    words = [str(i) for i in range(count)] if given is None else [printable(word) for word in given]
    if len(words) != count:
        raise InvalidInput(f"{option} has {len(words)} words for {count} rows")
    return words


def _numbered(words: Sequence[str], width: int) -> list[str]:
    short = [set_cell_size(word, min(cell_len(word), width // 4)) for word in words]
    return [str(n) if word == str(n) else f"{n} {word}" for n, word in enumerate(short)]


def draw(
    weights: np.ndarray, queries: Sequence[str], keys: Sequence[str], *, title: str, use_legend: bool, width: int = 80
) -> RenderableType:
    """Return one head's weights [L, S] as tables: a row per query word with its strongest key, a column per key word.

    The column headers are words if all columns fit into `width` terminal cells beside the rows' words and the strongest keys.
    Else they are numbers, and the columns that have no room follow on further pages, which say which keys they show.
    """
    assert weights.shape == (len(queries), len(keys)), "a word for every row and column. This is a bug."
    heads, num_shown = list(keys), len(keys)

    def room() -> int:
        return width - max(max(map(cell_len, keys)) + len(" 0.000"), len("strongest")) - max(map(cell_len, queries)) - 2

    if sum(max(3, cell_len(key)) + 1 for key in keys) > room():
        queries, keys, heads = _numbered(queries, width), _numbered(keys, width), [str(n) for n in range(len(keys))]
        num_shown = max(1, room() // (max(3, len(heads[-1])) + 1))
    best = [int(np.argmax(row)) for row in weights]
    strongest = [f"{keys[i]} {row[i]:.3f}" if row[i] > 0 else "-" for i, row in zip(best, weights, strict=True)]
    pages: list[RenderableType] = [Text(title, style="italic")] if title else []
    for first in range(0, len(keys), num_shown):
        shown = range(first, min(first + num_shown, len(keys)))
        if len(shown) < len(keys):
            pages.append(Text(f"keys {shown[0]}–{shown[-1]} of {len(keys)}", style="bold"))
        table = Table(box=None, padding=(0, 1, 0, 0), show_edge=False)
        table.add_column("", justify="right", no_wrap=True)
        for place in shown:
            table.add_column(Text(heads[place]), justify="center", no_wrap=True, min_width=3)
        table.add_column("strongest", no_wrap=True)
        for word, row, i, text in zip(queries, weights, best, strongest, strict=True):
            cells = (Text(legend_mark(w)) if use_legend else _cell(float(w)) for w in row[first : shown.stop])
            table.add_row(Text(word), *cells, Text(text if i in shown or text == "-" else "elsewhere"))
        pages.append(table)
    marks = "   ".join(f"{mark} > {bound}" for bound, mark in LEGEND)
    note = marks if use_legend else "weights in hundredths; brighter = stronger"
    return Group(*pages, Text(note, style="dim"))


def _cell(weight: float) -> Text:
    """Return the weight in hundredths on a background that is brighter for larger weights; ?? for one that is not finite."""
    if not np.isfinite(weight):
        return Text("??", style="red")
    step = min(len(_RAMP) - 1, int(max(weight, 0.0) ** 0.5 * len(_RAMP)))
    ink = "black" if step >= len(_RAMP) // 2 else "white"
    return Text(f"{round(weight * 100):2d}", style=f"{ink} on {_RAMP[step]}")


def svg(weights: np.ndarray, queries: Sequence[str], keys: Sequence[str], title: str) -> str:
    """Return the picture of weights [L, S]: a row for each query, a column for each key, darker for larger weights; a scale."""
    high = float(weights[np.isfinite(weights)].max(initial=0.0)) or 1.0
    title += " (red: not finite)" * (not np.isfinite(weights).all())
    left, top = (round(max(map(cell_len, words)) * CHARACTER) + 50 for words in (queries, keys))
    bar = left + CELL * len(keys) + max(30, top // 2)
    width, height = bar + 110, top + max(CELL * len(queries), BAR) + 30
    size = f'width="{width}" height="{height}"'
    texts = [
        (f'x="{left}" y="16" font-weight="bold"', title),
        (f'x="{left}" y="34"', "key: a column each, is attended to"),
        (f'transform="translate(16 {top}) rotate(90)"', "query: a row each, attends"),
        *((f'x="{left - 5}" y="{top + CELL * n + 15}" text-anchor="end"', word) for n, word in enumerate(queries)),
        *((f'transform="translate({left + CELL * n + 14} {top - 5}) rotate(-60)"', key) for n, key in enumerate(keys)),
        (f'x="{bar}" y="{top - 10}"', "weight"),
        *((f'x="{bar + 22}" y="{top + BAR * (1 - part) + 4:g}"', f"{high * part:.3g}") for part in (0, 0.5, 1)),
    ]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {size} font-family="sans-serif" font-size="11">',
        f'<linearGradient id="scale" y1="1" x2="0" y2="0"><stop stop-color="{INK}" stop-opacity="0"/>',
        f'<stop offset="1" stop-color="{INK}"/></linearGradient><rect {size} fill="white"/>',
        f'<rect x="{bar}" y="{top}" width="16" height="{BAR}" fill="url(#scale)" stroke="gray"/>',
        *(f"<text {where}>{html.escape(printable(text))}</text>" for where, text in texts),
    ]
    for (row, column), weight in np.ndenumerate(weights):
        fill = (
            f'"{INK}" fill-opacity="{np.clip(weight, 0.0, high) / high:.3f}"'
            if np.isfinite(weight)
            else f'"{NOT_FINITE}"'
        )
        at = f'x="{left + CELL * column}" y="{top + CELL * row}" width="{CELL - 1}" height="{CELL - 1}"'
        parts.append(f"<rect {at} fill={fill}/>")
    return "\n".join([*parts, "</svg>", ""])
