"""Heat map: no weight and no strongest key is cut off, whatever the words."""

from __future__ import annotations

import io

import numpy as np
import pytest
from rich.console import Console

from service.commands.heat_map import draw

WEIGHTS = np.array([[0.25, 0.75], [1.0, 0.0]])


@pytest.mark.parametrize("width", range(40, 130, 7))
@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        (["a" * 85, "yes"], ["x", "y"]),
        (["a", "b"], ["一二三四五", "六七八九十"]),
        (["一二三四五六七八九十一二三", "b"], ["x", "y" * 20]),
        (["a", "b"], ["x", "y"]),
    ],
    ids=["a long row word", "wide keys", "a wide row word", "short words"],
)
def test_words_head_the_columns_only_if_all_weights_fit_beside_them(queries, keys, width):
    drawn = draw(WEIGHTS, queries, keys, title="", use_legend=False, width=width)
    text = io.StringIO()
    Console(file=text, width=width).print(drawn)
    lines = text.getvalue().splitlines()
    has_words = keys[0] in lines[0]
    if has_words:
        assert all(f"{keys[best]} {weight}" in text.getvalue() for best, weight in ((1, "0.750"), (0, "1.000")))
        assert all(query in text.getvalue() for query in queries)
    if width >= 120:
        assert has_words
