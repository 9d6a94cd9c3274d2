"""Heat map: no weight and no strongest key is cut off, whatever the words."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console
from typer.testing import CliRunner

from attention_client.cli.app import DRAWING, app
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
def test_columns_that_have_no_room_follow_on_further_pages(size, width, use_legend):
    """Every weight and every row's word and strongest key are shown, within the width."""
    words = [f"w{n}" for n in range(size)]
    text = io.StringIO()
    drawn = draw(1.5 * np.eye(size), words, words, title="a title", use_legend=use_legend, width=width)
    Console(file=text, width=width).print(drawn)
    title, *lines, _ = text.getvalue().splitlines()
    counts = [line for line in lines if line.startswith("keys ")]
    heads = [head for line in lines for head in line.split()[:-1] if line.split()[-1] == "strongest"]
    rows = [line.split() for line in lines if line not in counts and line.split()[-1] != "strongest"]
    num_pages = len(counts) or 1
    assert heads in (words, [str(n) for n in range(size)])
    assert len(rows) == size * num_pages
    assert sum(row[1:].count("*" if use_legend else "150") for row in rows) == size
    strongest = [row for row in rows if row[-1] == "1.500"]
    assert len(strongest) == size, "the strongest key is named on the page that shows it"
    assert all(row[-2] in words and row[-2] in row[:2] for row in strongest)
    assert sum(row[-1] == "elsewhere" for row in rows) == len(rows) - size, (
        "and every other page says that it is not there"
    )
    assert title == "a title"
    assert max(map(len, lines)) <= width
    assert bool(counts) == (heads != words)


@pytest.mark.parametrize(
    "tokens", [(), ("--key-tokens", " ".join(f"w{n}" for n in range(60)))], ids=["numbers", "words"]
)
def test_each_page_says_which_keys_of_how_many_it_shows(tmp_path, tokens):
    np.save(tmp_path / "w.npy", np.full((2, 60), 1 / 60))
    lines = lines_of("show", "--weights", tmp_path / "w.npy", *tokens)
    counts = [line for line in lines if line.startswith("keys ")]
    assert counts[0] == f"keys 0–{len(lines[2].split()) - 2} of 60"
    ends = [tuple(map(int, re.findall(r"\d+", line))) for line in counts]
    assert [first for first, *_ in ends] == [0, *(last + 1 for _, last, _ in ends[:-1])]
    assert ends[-1][1:] == (59, 60)
    assert [line.split()[0] for line in lines if line.rstrip().endswith("strongest")] == [
        str(first) for first, *_ in ends
    ]


@pytest.mark.parametrize("size", [3, 60])
def test_words_longer_than_the_terminal_cut_no_weight_off(tmp_path, size):
    np.save(tmp_path / "w.npy", np.full((2, size), 0.75))
    text = lines_of(
        "show",
        "--weights",
        tmp_path / "w.npy",
        "--tokens",
        f"{'a' * 500} b",
        "--key-tokens",
        "猫" * 90 + " x" * (size - 1),
    )
    assert max(map(cell_len, text)) <= 80
    assert sum(line.split().count("75") for line in text) == 2 * size


@pytest.mark.parametrize("width", [2, 6, 20])
def test_words_without_width_and_a_narrow_terminal_are_drawn(width):
    words = ["\u200d", "\u0301", "猫" * 9, *map(str, range(17))]
    drawn = draw(np.full((20, 20), 0.05), words, words, title="", use_legend=False, width=width)
    text = io.StringIO()
    Console(file=text, width=width).print(drawn)
    assert text.getvalue()


def test_the_help_of_show_ends_with_what_it_draws(tmp_path):
    weights = np.zeros((3, 3, 3))
    weights[2] = np.array([[1, 0, 0], [0.3333, 0.6667, 0], [0.12, 0.55, 0.33]])
    np.save(tmp_path / "w.npy", weights[None])
    drawn = lines_of("show", "--weights", tmp_path / "w.npy", "--head", "2", "--tokens", "the cat sat")
    drawn[0] = drawn[0].replace("w.npy", "minilm-l3")
    shown = [line.strip() for line in lines_of("show", "--help")]
    place = shown.index("minilm-l3, head 2")
    assert shown[place : place + len(drawn)] == [line.strip() for line in drawn]
    assert DRAWING.strip().splitlines() == [line.rstrip() for line in drawn]


def lines_of(*words: object) -> list[str]:
    found = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "80", "TERM": "dumb"})
    assert found.exit_code == 0, found.output
    return found.stdout.splitlines()
