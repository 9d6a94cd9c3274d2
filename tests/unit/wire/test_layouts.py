"""Layouts: every one gives [B, H, L, d] and back, and says what is missing."""

from __future__ import annotations

import itertools

import pytest
import torch

from service.errors import BadShape, InvalidInput, LayoutRequired
from service.wire.layouts import Layout, layout_of

SIZES = {"b": 2, "h": 3, "l": 4, "d": 5}
NAMED = ("ld", "bld", "hld", "lhd", "bhld", "blhd")


def tensor(axes: str) -> torch.Tensor:
    shape = [SIZES[axis] for axis in axes]
    return torch.arange(float(torch.tensor(shape).prod())).reshape(shape)


@pytest.mark.parametrize("axes", NAMED)
def test_a_layout_gives_the_four_axes_and_takes_them_back(axes):
    layout, given = Layout(axes), tensor(axes)
    rows = layout.rows(given, "query")
    assert rows.shape == tuple(SIZES[axis] if axis in axes else 1 for axis in "bhld")
    assert torch.equal(layout.of_answer(rows, "output"), given)


@pytest.mark.parametrize("axes", NAMED)
def test_every_element_keeps_its_place(axes):
    given = tensor(axes)
    rows = Layout(axes).rows(given, "query")
    for place in itertools.product(*(range(SIZES[axis] if axis in axes else 1) for axis in "bhld")):
        at = dict(zip("bhld", place, strict=True))
        assert rows[place] == given[tuple(at[axis] for axis in axes)]


@pytest.mark.parametrize(("shape", "axes"), [((4, 6), "lhd"), ((2, 4, 6), "blhd")])
def test_packed_has_the_heads_side_by_side_in_the_features(shape, axes):
    given = torch.arange(float(torch.tensor(shape).prod())).reshape(shape)
    layout = layout_of("packed", given.dim(), 3, None)
    assert layout.axes == axes
    rows = layout.rows(given, "query")
    assert torch.equal(rows[0, 1, 2], given.reshape(-1, 4, 6)[0, 2, 2:4])
    assert torch.equal(layout.of_answer(rows, "output"), given)


def test_packed_takes_fewer_key_and_value_heads():
    layout = layout_of("packed", 2, 6, 2)
    assert layout.rows(torch.zeros(4, 12), "query").shape == (1, 6, 4, 2)
    assert layout.rows(torch.zeros(5, 4), "key").shape == (1, 2, 5, 2)


@pytest.mark.parametrize(("rank", "axes"), [(2, "ld"), (4, "bhld")])
def test_two_and_four_axes_have_a_default(rank, axes):
    assert layout_of(None, rank, None, None).axes == axes


def test_three_axes_must_say_what_they_are():
    with pytest.raises(LayoutRequired, match=r"bld.*hld.*lhd.*packed") as refused:
        layout_of(None, 3, None, None)
    assert refused.value.param == "/layout"


@pytest.mark.parametrize("rank", [0, 1, 5])
def test_other_numbers_of_axes_are_refused(rank):
    with pytest.raises(BadShape, match="2 to 4 axes"):
        layout_of(None, rank, None, None)
    with pytest.raises(BadShape):
        layout_of("packed", rank, 2, None)


@pytest.mark.parametrize("name", [None, *NAMED])
@pytest.mark.parametrize("field", ["num_heads", "num_kv_heads"])
def test_numbers_of_heads_belong_to_packed(name, field):
    with pytest.raises(InvalidInput, match=field) as refused:
        layout_of(name, 2, **{"num_heads": None, "num_kv_heads": None} | {field: 2})
    assert refused.value.param == f"/{field}"


def test_packed_needs_the_number_of_heads_and_features_that_they_share_evenly():
    with pytest.raises(InvalidInput, match="num_heads is required"):
        layout_of("packed", 2, None, None)
    with pytest.raises(BadShape, match="7 features, which 2 heads"):
        layout_of("packed", 2, 2, None).rows(torch.zeros(3, 7), "query")


@pytest.mark.parametrize("axes", NAMED)
def test_another_number_of_axes_and_an_empty_axis_are_refused(axes):
    given = tensor(axes)
    for wrong in (given[0], given[None], given[:0]):
        with pytest.raises(BadShape, match="query must be"):
            Layout(axes).rows(wrong, "query")


@pytest.mark.parametrize("axes", NAMED)
def test_a_past_always_has_heads_and_a_batch_where_the_layout_has_one(axes):
    layout = Layout(axes)
    with_batch, without = torch.zeros(2, 3, 4, 5), torch.zeros(3, 4, 5)
    right, wrong = (with_batch, without) if layout.has_batch else (without, with_batch)
    assert layout.past(right, "past_key").dim() == 4
    with pytest.raises(BadShape, match="past_key must be"):
        layout.past(wrong, "past_key")


@pytest.mark.parametrize("axes", NAMED)
def test_tables_have_the_axes_that_the_layout_has(axes):
    layout = Layout(axes)
    shape = (2 if "b" in axes else 1, 3 if "h" in axes else 1, 4, 6)
    kept = [size for axis, size in zip("bhls", shape, strict=True) if axis in axes or axis in "ls"]
    assert list(layout.of_answer(torch.zeros(shape), "weights").shape) == kept
    assert list(layout.of_answer(torch.zeros(shape)[:, 0], "weights").shape) == [x for x in kept if x != 3]
