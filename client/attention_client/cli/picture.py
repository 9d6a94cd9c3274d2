"""Picture: one head's attention weights as an SVG; needs no library, and the same weights give the same bytes.

Invariant: the text of a picture is foreign, so it is escaped: what XML cannot hold by `printable`, its marks by `html`.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

import numpy as np
from rich.cells import cell_len

from attention_client.cli.terminal import printable

CELL, BAR_STEPS, BAR = 22, 40, 200
CHARACTER = 6.6  # mean width of one at the font's size, 11
_PALE, _DARK, NOT_FINITE = np.array([247, 251, 255]), np.array([8, 48, 107]), "#d62728"


def svg(weights: np.ndarray, queries: Sequence[str], keys: Sequence[str], title: str) -> str:
    """Return the picture of weights [L, S]: a row for each query, a column for each key, and the scale of the colours."""
    numbers = np.where(np.isfinite(weights), weights.astype(np.float64).clip(-1e300, 1e300), np.nan)
    finite = numbers[np.isfinite(numbers)]
    low, high = finite.min(initial=0.0), finite.max(initial=0.0)
    high += float(low == high)
    left, top = (round(max(map(cell_len, words)) * CHARACTER) + 50 for words in (queries, keys))
    right, bottom = left + CELL * len(keys), top + CELL * len(queries)
    bar = right + max(30, top // 2)
    width, height = bar + 110, max(bottom, top + BAR) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="11">',
        f'<title>{_text(title)}</title><rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{left}" y="16" font-weight="bold">{_text(title)}</text>',
        f'<text x="{left}" y="34">key: a column each, is attended to</text>',
        f'<text transform="translate(16 {top}) rotate(90)">query: a row each, attends</text>',
    ]
    for place, word in enumerate(queries):
        parts.append(f'<text x="{left - 5}" y="{top + CELL * place + 15}" text-anchor="end">{_text(word)}</text>')
    for place, word in enumerate(keys):
        parts.append(
            f'<text transform="translate({left + CELL * place + 14} {top - 5}) rotate(-60)">{_text(word)}</text>'
        )
    for (row, column), number in np.ndenumerate(numbers):
        at = f'x="{left + CELL * column}" y="{top + CELL * row}" width="{CELL - 1}" height="{CELL - 1}"'
        parts.append(f'<rect {at} fill="{_colour(number, low, high)}"/>')
    for step in range(BAR_STEPS):
        fill = _colour(low + (high - low) * (1 - step / (BAR_STEPS - 1)), low, high)
        size = BAR // BAR_STEPS
        parts.append(f'<rect x="{bar}" y="{top + size * step}" width="16" height="{size}" fill="{fill}"/>')
    for share in (0, 0.25, 0.5, 0.75, 1):
        figure = f"{low + (high - low) * share:.3g}"
        parts.append(f'<text x="{bar + 22}" y="{top + BAR * (1 - share) + 4:g}">{figure}</text>')
    parts.append(f'<text x="{bar}" y="{top - 10}">weight</text>')
    if finite.size < numbers.size:
        parts.append(f'<text x="{bar}" y="{top + BAR + 20}" fill="{NOT_FINITE}">red: not finite</text>')
    return "\n".join([*parts, "</svg>", ""])


def _text(text: str) -> str:
    return html.escape(printable(text))


def _colour(number: float, low: float, high: float) -> str:
    if not np.isfinite(number):
        return NOT_FINITE
    return "#" + "".join(f"{round(part):02x}" for part in _PALE + (_DARK - _PALE) * (number - low) / (high - low))
