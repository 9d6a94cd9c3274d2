"""Heat map: no weight and no strongest key is cut off, whatever the words."""

from __future__ import annotations

import io

import numpy as np
import pytest
from rich.console import Console

from attention_client.cli.heat_map import draw

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


@pytest.mark.parametrize("width", [60, 80, 81, 200])
@pytest.mark.parametrize("size", [3, 12, 40, 101])
@pytest.mark.parametrize("use_legend", [True, False])
def test_columns_that_have_no_room_follow_in_further_tables(size, width, use_legend):
    """Every weight and every row's word and strongest key are shown, within the width."""
    words = [f"w{n}" for n in range(size)]
    text = io.StringIO()
    drawn = draw(np.eye(size), words, words, title="a title", use_legend=use_legend, width=width)
    Console(file=text, width=width).print(drawn)
    lines = text.getvalue().splitlines()[1:-1]
    rows = [line.split() for line in lines if line.split()[-1] == "1.000"]
    heads = [head for line in lines for head in line.split()[:-1] if line.split()[-1] == "strongest"]
    assert heads in (words, [str(n) for n in range(size)])
    assert len(rows) == size * (len(lines) - len(rows))
    assert sum(row[1:].count("*" if use_legend else "100") for row in rows) == size
    assert all(row[-2] in words and row[-2] in row[:2] for row in rows)
    assert text.getvalue().count("a title") == 1
    assert max(map(len, lines)) <= width
