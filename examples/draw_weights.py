"""Draws one head's attention weights from an answer on stdin as an SVG on stdout; needs nothing but Python.

    curl -s … | python3 examples/draw_weights.py HEAD WORD WORD … > weights.svg

The answer is JSON with `"weights": "heads"` for one sequence. The darker a square, the more its row attends to its column.
"""

from __future__ import annotations

import html
import json
import sys

CELL, MARGIN = 26, 70


def svg(weights: list[list[float]], words: list[str]) -> str:
    """Return the picture of weights [L, S]: a row for each query word, a column for each key word."""
    side = MARGIN + CELL * len(words) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {side} {side}" font-family="sans-serif" font-size="12">',
        f'<rect width="{side}" height="{side}" fill="white"/>',
    ]
    for place, word in enumerate(map(html.escape, words)):
        middle = MARGIN + CELL * place + CELL // 2
        parts.append(f'<text x="{MARGIN - 6}" y="{middle + 4}" text-anchor="end">{word}</text>')
        parts.append(f'<text transform="translate({middle + 4} {MARGIN - 6}) rotate(-60)">{word}</text>')
    for row, line in enumerate(weights):
        for column, weight in enumerate(line):
            square = f'x="{MARGIN + CELL * column}" y="{MARGIN + CELL * row}" width="{CELL - 1}" height="{CELL - 1}"'
            parts.append(f'<rect {square} fill="#0b3d91" fill-opacity="{max(weight, 0.03):.3f}"/>')
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    heads = json.load(sys.stdin)["weights"]
    sys.stdout.write(svg(heads[int(sys.argv[1])], sys.argv[2:]))
