"""Picture: one head's attention weights as an SVG; the same weights give the same bytes.

Invariant: the text of a picture is foreign, so it is escaped: what XML cannot hold by `printable`, its marks by `html`.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

import numpy as np
from rich.cells import cell_len

from attention_client.cli.terminal import printable

CELL, BAR = 22, 200
CHARACTER = 6.6  # mean width of one at the font's size, 11
INK, NOT_FINITE = "#0b3d91", "#d62728"


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
