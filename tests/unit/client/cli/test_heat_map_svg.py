"""Picture: `show --svg` writes valid XML with both axes, every token, every weight and the scale, for any tokens."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from typer.testing import CliRunner

from attention_client.cli.app import app
from attention_client.cli.heat_map import NOT_FINITE, svg
from attention_client.errors import ServiceError

NAMESPACE = "{http://www.w3.org/2000/svg}"


def show(*words: object) -> str:
    found = CliRunner().invoke(app, ["show", *map(str, words)], env={"COLUMNS": "80"})
    if isinstance(found.exception, ServiceError):
        raise found.exception
    assert found.exit_code == 0, found.output
    return found.stdout


def drawn(text: str) -> tuple[list[str], list[str]]:
    """Return the words of a picture and what its weights are drawn with: their share of the scale, or another colour."""
    root = ET.fromstring(text)
    assert root.tag == f"{NAMESPACE}svg"
    words = [element.text or "" for element in root.iter(f"{NAMESPACE}text")]
    return words, [
        element.attrib.get("fill-opacity", element.attrib["fill"]) for element in [*root.iter(f"{NAMESPACE}rect")][2:]
    ]


def test_a_picture_has_both_axes_the_tokens_and_the_scale(tmp_path):
    weights = np.array([[0.25, 0.75, 0.0], [0.0, 0.0, 0.5]])
    np.save(tmp_path / "w.npy", weights)
    words = ("--tokens", "the cat", "--key-tokens", "le <chat> &")
    text = show("--weights", tmp_path / "w.npy", *words, "--svg", tmp_path / "w.svg")
    assert text.replace("\n", " ").split() == f"w.npy: 2 queries and 3 keys, written to {tmp_path}/w.svg".split()
    found, shares = drawn((tmp_path / "w.svg").read_text(encoding="utf-8"))
    assert found[:3] == ["w.npy", "key: a column each, is attended to", "query: a row each, attends"]
    assert found[3:8] == ["the", "cat", "le", "<chat>", "&"]
    assert found[8:] == ["weight", "0", "0.375", "0.75"]
    assert shares == ["0.333", "1.000", "0.000", "0.000", "0.000", "0.667"], "of the largest weight"


@given(
    st.lists(st.text(max_size=9), min_size=1, max_size=4), st.lists(st.text(max_size=9), min_size=1, max_size=4),
    st.text(max_size=9), st.data()
)  # fmt: skip
def test_any_text_and_any_numbers_make_valid_xml_and_the_same_twice(queries, keys, title, data):
    numbers = st.floats(width=32) | st.sampled_from([1e308, -1e308, 5e-324])
    weights = data.draw(arrays(np.float64, (len(queries), len(keys)), elements=numbers))
    text = svg(weights, queries, keys, title)
    assert text == svg(weights.copy(), list(queries), list(keys), title)
    words, colours = drawn(text.encode().decode())
    assert colours.count(NOT_FINITE) == np.count_nonzero(~np.isfinite(weights))
    assert ("red: not finite" in words[0]) == (not np.isfinite(weights).all())


@given(array_shapes(min_dims=2, max_dims=2, max_side=12))
def test_every_weight_is_a_square(shape):
    _, colours = drawn(svg(np.full(shape, 0.5), ["q"] * shape[0], ["k"] * shape[1], ""))
    assert colours == ["1.000"] * (shape[0] * shape[1])


@pytest.mark.parametrize("name", ["w.png", "w", "w.svg.gz", "w.npz"])
def test_a_file_that_is_no_svg_is_refused_before_anything_is_read(tmp_path, name):
    with pytest.raises(ServiceError, match=rf"^--svg .*{name}: the file must end with \.svg$"):
        show("--weights", "missing.npy", "--svg", tmp_path / name)
    assert not [*tmp_path.iterdir()]


def test_a_picture_that_cannot_be_written_is_one_sentence(tmp_path):
    np.save(tmp_path / "w.npy", np.eye(2))
    with pytest.raises(ServiceError, match=r"^.*/nowhere/w\.svg cannot be written: No such file or directory$"):
        show("--weights", tmp_path / "w.npy", "--svg", tmp_path / "nowhere" / "w.svg")


def test_the_legend_of_the_terminal_and_a_picture_exclude_each_other(tmp_path):
    with pytest.raises(ServiceError, match=r"^--legend is of the terminal; --svg has its own scale$"):
        show("--weights", tmp_path / "w.npy", "--legend", "--svg", Path("x.svg"))
