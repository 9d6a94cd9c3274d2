"""Wording: text from files in errors is quoted, cut and bounded."""

from __future__ import annotations

import pytest

from service.errors import LayerError
from service.layers.wording import MAX_MESSAGE, MAX_NAME, about, bounded, listed, quoted, shape_text

NASTY = ["x" * 10_000, "\u202egnp.exe", "\x00", "\x1b[31mred", "\ud800", "\U0001f600" * 200, "'\n\"", ""]


@pytest.mark.parametrize("name", NASTY, ids=range(len(NASTY)))
def test_a_name_from_a_file_is_short_printable_ascii(name):
    """So no name of a tensor can harm a terminal or a log line."""
    shown = quoted(name)
    assert len(shown) <= MAX_NAME
    assert shown.isascii()
    assert shown.isprintable()


def test_a_list_names_four_and_counts_the_rest():
    assert listed("abcd") == "'a', 'b', 'c', 'd'"
    assert listed("abcdefg") == "'a', 'b', 'c', 'd' and 3 more"


def test_texts_are_cut_with_an_ellipsis():
    assert bounded("abcdef", 6) == "abcdef"
    assert bounded("abcdefg", 6) == "abc..."
    assert len(shape_text([10**18] * 1000)) <= MAX_NAME


def test_a_refusal_names_its_subject_once_and_is_bounded():
    """The subject comes first and survives the cut."""
    with pytest.raises(LayerError) as caught, about("layer x"):
        raise LayerError("y" * 10_000)
    assert caught.value.message.startswith("layer x: yyy")
    assert len(caught.value.message) == MAX_MESSAGE
