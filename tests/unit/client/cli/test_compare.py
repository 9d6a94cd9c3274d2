"""`compare`: the conventions of a kernel are found from its output."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from typer.testing import CliRunner

from attention_client.arrays import Raw, write
from attention_client.cli.app import app
from attention_client.cli.case_file import errors, rounded, widened
from attention_client.errors import ServiceError
from tests import oracle

pytestmark = pytest.mark.usefixtures("service")

RNG = np.random.default_rng(7)
QUERY, KEY, VALUE = (RNG.standard_normal(shape) for shape in ((2, 4, 3, 8), (2, 2, 5, 8), (2, 2, 5, 6)))
MASK = RNG.random((2, 3, 5)) < 0.6
MASK[:, :, 0] = True


def kernel(masks=(), *, key=KEY, value=VALUE, **options):
    return oracle.scaled_dot_product((QUERY, key, value), list(masks), **options).output


def compared(path, output, *, mask=None, request=None, dtype="float32", exit_code=0) -> str:
    tensors = {"query": QUERY, "key": KEY, "value": VALUE, "output": output}
    raws = {name: rounded(array, "float64") for name, array in tensors.items()} | {"output": rounded(output, dtype)}
    raws |= {} if mask is None else {"mask": Raw(mask.dtype.name, mask)}
    path.write_bytes(write(raws, {"request": json.dumps({"layout": "bhld", **(request or {})})}))
    found = CliRunner().invoke(app, ["compare", str(path), "--top", "3"])
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    assert found.exit_code == exit_code
    assert max(map(len, found.stdout.splitlines()[1:])) <= 80
    return " ".join(found.stdout.split())


def first(text: str) -> str:
    """The words of the first row, and what follows."""
    return re.split(r"(?:yes|no) \S+ \S+ (?=bhld)", text)[1]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "case.safetensors"


TILED = {"key": KEY[:, [0, 1, 0, 1]], "value": VALUE[:, [0, 1, 0, 1]]}


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (kernel([oracle.Causal(0)]), "repeat, causal top_left, scale 0.353553"),
        (kernel([oracle.Causal(2)]), "repeat, causal bottom_right, scale 0.353553"),
        (kernel(scale=1.0), "repeat, scale 1"),
        (kernel(**TILED), "tile, scale 0.353553"),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_reading_reproduces_the_output_and_stands_first(path, output, words, dtype):
    text = compared(path, output, dtype=dtype)
    assert "1 of 12 readings reproduce" in text
    assert first(text).startswith("bhld, " + words)


@pytest.mark.parametrize(("kind", "mask"), [("attend", MASK), ("ignore", ~MASK)])
def test_the_polarity_of_a_mask_is_found(path, kind, mask):
    text = compared(path, kernel([oracle.Attend(MASK[:, None])]), mask=mask)
    assert first(text).startswith(f"bhld, repeat, {kind} bls")


def test_a_mask_of_floats_is_also_read_as_a_bias(path):
    added = RNG.standard_normal((3, 5))
    text = compared(path, kernel([oracle.Bias(added[None, None])]), mask=added)
    assert "1 of 12 readings" in text
    assert first(text).startswith("bhld, repeat, bias ls")


@pytest.mark.parametrize("width", [1, 2, 3])
def test_a_window_is_found_exact_and_off_by_one(path, width):
    output = kernel([oracle.Causal(2), oracle.Window(2, width, 0)])
    text = compared(path, output, request={"window": 2, "scale": 8**-0.5})
    assert first(text).startswith(f"bhld, repeat, causal window {width} bottom_right")


@pytest.mark.parametrize(("fill", "words"), [(0.0, "zero"), (None, "mean of values"), (np.nan, "NaN")])
def test_the_convention_for_masked_rows_is_found(path, fill, words):
    mask = MASK.copy()
    mask[:, 1] = False
    output = kernel([oracle.Attend(mask[:, None])])
    output[:, :, 1] = VALUE.mean(2).repeat(2, axis=1) if fill is None else fill
    text = compared(path, output, mask=mask)
    assert f"masked rows {words}" in first(text)
    assert "1 of" in text


def test_a_softcap_after_the_masks_is_found(path):
    found = kernel(softcap=2.0)
    assert "softcap before masks" in first(compared(path, found, request={"softcap": 2.0}))
    scores = QUERY @ KEY.repeat(2, axis=1).swapaxes(2, 3) * 8**-0.5
    scores = np.where(np.tri(3, 5, 2, dtype=bool), scores, -np.inf)
    weights = np.exp(2.0 * np.tanh(scores / 2.0))
    output = weights / weights.sum(-1, keepdims=True) @ VALUE.repeat(2, axis=1)
    text = compared(path, output, request={"softcap": 2.0})
    assert "causal bottom_right, scale 0.353553, softcap after masks" in first(text)


def test_the_layout_is_found_or_fixed(path):
    output = kernel().swapaxes(1, 2).reshape(2, 3, 24)
    tensors = {name: x.swapaxes(1, 2) for name, x in (("query", QUERY), ("key", KEY), ("value", VALUE))}
    raws = {name: rounded(x.reshape(*x.shape[:2], -1), "float64") for name, x in tensors.items()}
    request = {"num_heads": 4, "num_kv_heads": 2}
    path.write_bytes(write(raws | {"output": rounded(output, "float64")}, {"request": json.dumps(request)}))
    found = CliRunner().invoke(app, ["compare", str(path)])
    assert found.exit_code == 0
    assert "packed, repeat" in found.stdout


@pytest.mark.parametrize("shape", [(2, 4, 5, 8), (3, 1, 6, 4), (5, 5, 5, 5)])
@pytest.mark.parametrize("layout", ["bhld", "blhd"])
@pytest.mark.parametrize("axes", ["s", "ls", "bs"])
def test_a_mask_chooses_among_layouts_that_all_tensors_fit(path, shape, layout, axes):
    """As in self-attention, where rows and heads could be exchanged."""
    rng = np.random.default_rng(1)
    b, _, keys, _ = shape
    arrays = {name: rng.standard_normal(shape) for name in ("query", "key", "value")}
    mask = rng.random({"s": (keys,), "ls": (keys, keys), "bs": (b, keys)}[axes]) < 0.6
    mask[..., 0] = True
    by_axes = mask.reshape({"s": (1, 1, 1, keys), "ls": (1, 1, keys, keys), "bs": (b, 1, 1, keys)}[axes])
    output = oracle.scaled_dot_product(tuple(arrays.values()), [oracle.Attend(by_axes)]).output
    raws = {}
    for name, array in (arrays | {"output": output}).items():
        raws[name] = rounded(array if layout == "bhld" else array.swapaxes(1, 2), "float64")
    path.write_bytes(write(raws | {"mask": Raw("bool", mask)}, {}))
    found = CliRunner().invoke(app, ["compare", str(path), "--top", "1"], env={"COLUMNS": "200"})
    assert found.exit_code == 0, found.output
    assert f"{layout}, attend {axes}" in " ".join(found.stdout.split())


def test_a_mask_that_fits_no_layout_is_named_with_the_sizes_of_each(path):
    raws = dict.fromkeys(("query", "key", "value", "output"), Raw("float32", np.ones((2, 4, 5, 8), np.float32)))
    path.write_bytes(write(raws | {"mask": Raw("bool", np.ones((7, 7), bool))}, {}))
    with pytest.raises(ServiceError) as raised:
        CliRunner().invoke(app, ["compare", str(path)], catch_exceptions=False)
    assert raised.value.message == (
        "mask [7, 7] fits no axes of [B, H, L, S] = [2, 4, 5, 5] or [2, 5, 4, 4], or is not 0 and 1"
    )


def test_an_output_that_no_reading_reproduces_is_an_error_that_says_the_nearest(path):
    with pytest.raises(
        ServiceError, match=r"no reading reproduces the output within 2e-05; the nearest, bhld, .* off by"
    ):
        compared(path, np.full((2, 4, 3, 6), 2.0))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"request": {"masks": []}}, "can fix num_heads, .* got masks"),
        ({"request": {"layout": "dlhb"}}, "got layout"),
        ({"request": {"window": True}}, "got window"),
        ({"request": {"window": -1}}, "got window"),
        ({"request": {"num_heads": 0}}, "got num_heads"),
        ({"request": {"softcap": 0}}, "got softcap"),
        ({"request": {"scale": 10**400}}, "got scale"),
        ({"request": {"scale": float("nan")}}, "got scale"),
        ({"request": {"layout": "blhd"}}, "no layout fits query"),
        ({"mask": np.ones((4, 4))}, "mask .* fits no axes"),
        ({"mask": np.full((3, 5), 2)}, "not 0 and 1"),
    ],
)
def test_a_malformed_case_is_one_sentence(path, changes, words):
    with pytest.raises(ServiceError, match=words):
        compared(path, kernel(), **changes)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: No such file"),
        (b"no", "not a readable"),
        (write({"query": Raw("float64", QUERY)}, {"request": "{"}), "not a readable"),
        (write({"query": Raw("float64", QUERY)}, {"request": "[" * 100_000}), "not a readable"),
        (write({"query": Raw("float64", QUERY)}, {"golden": "[" * 100_000}), "not a readable"),
        (write({"query": Raw("float64", QUERY)}, {"request": "[]"}), "must be a JSON object"),
        (write({"query": Raw("float64", QUERY)}, {}), "no tensor key"),
    ],
)
def test_a_file_that_is_no_case_is_one_sentence(path, content, words):
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ServiceError, match=words):
        CliRunner().invoke(app, ["compare", str(path)], catch_exceptions=False)


@pytest.mark.parametrize("rank", [1, 5, 6])
@pytest.mark.parametrize("fixed", [{}, {"layout": "packed"}, {"num_heads": 2}])
def test_tensors_of_a_rank_that_no_layout_has_are_one_sentence(path, rank, fixed):
    raws = dict.fromkeys(("query", "key", "value", "output"), Raw("float32", np.ones((2,) * rank, np.float32)))
    path.write_bytes(write(raws, {"request": json.dumps(fixed)}))
    with pytest.raises(ServiceError, match="no layout fits query"):
        CliRunner().invoke(app, ["compare", str(path)], catch_exceptions=False)


@pytest.mark.parametrize("shape", [(0, 2), (2, 0), (0, 2, 4), (2, 0, 4), (0, 0)])
def test_tensors_without_numbers_are_one_sentence(path, shape):
    raws = dict.fromkeys(("query", "key", "value", "output"), Raw("float32", np.ones(shape, np.float32)))
    path.write_bytes(write(raws, {"request": '{"num_heads": 2}'}))
    with pytest.raises(ServiceError, match="no layout fits query"):
        CliRunner().invoke(app, ["compare", str(path)], catch_exceptions=False)


@pytest.mark.parametrize("name", ["case[v2]", "[red]case[", ":key:"])
def test_the_name_of_the_case_is_printed_as_it_is(tmp_path, name):
    """What rich calls markup is text in a name."""
    assert compared(tmp_path / name, kernel()).startswith(f"{name}, sha256 ")


def test_an_error_counts_units_in_the_last_place_of_the_outputs_dtype():
    one = np.array([1.0, 0.0, np.nan, np.inf])
    assert errors(one, one, "float16") == (0.0, 0.0)
    assert errors(np.array([1.0 + 2**-7]), np.array([1.0]), "bfloat16") == (2**-7, 1.0)
    assert errors(np.array([2**-24]), np.array([0.0]), "float16") == (2**-24, 1.0)
    assert errors(np.array([np.nan]), np.array([1.0]), "float32") == (np.inf, np.inf)


def test_bfloat16_rounds_to_nearest_ties_to_even():
    numbers = np.array([1.0, 1.0 + 2**-8, 1.0 + 3 * 2**-8, -3.0, -np.inf])
    assert widened(rounded(numbers, "bfloat16")).tolist() == [1.0, 1.0, 1.0 + 2**-6, -3.0, -np.inf]
