"""Masks: a list becomes exactly its mask or raises the service's error."""

import enum
import math
from typing import Any

import numpy as np
import pytest
import torch

from attention_client import errors, masks


class Flag(enum.IntEnum):
    NO = 0
    YES = 1


def listed_in_itself() -> list:
    outer: list = []
    outer.append(outer)
    return outer


def jagged_tensors() -> list:
    return [torch.ones(2), torch.ones(3)]


@pytest.mark.parametrize("values", [[True, False], [1, 0], [True, 0], [np.True_, np.int8(0)], (Flag.YES, Flag.NO),
                                    [torch.tensor(1), torch.tensor(False)], range(1, -1, -1)], ids=repr)  # fmt: skip
@pytest.mark.parametrize("kind", [masks.attend, masks.ignore])
def test_flags_are_booleans_zeros_and_ones(kind, values):
    assert kind(values).values.dtype == bool
    assert kind(values).values.tolist() == [True, False]


@pytest.mark.parametrize(
    "values",
    [[0.0, -math.inf], [0.0, 1.0], ["False", "True"], [2, 0, 1], [-1], [math.nan], [None], None, "", "True", {1, 0},
     [2**70], [1j], [b"1"], [np.float32(1)], {"values": [1]}, object, [object], 0.5],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("kind", [masks.attend, masks.ignore])
def test_any_other_value_of_a_flag_is_a_bad_mask(kind, values):
    with pytest.raises(errors.BadMask):
        kind(values)


@pytest.mark.parametrize("values", [3, [3, 0], [[1], [2]], [np.uint64(3)], [-(2**63)], np.int16(2)], ids=repr)
def test_lengths_are_whole_numbers(values):
    found = masks.lengths(values).values
    assert found.tolist() == np.array(values).tolist()
    assert found.dtype == (np.int16 if isinstance(values, np.generic) else np.int64)


@pytest.mark.parametrize(
    "values",
    [
        1.99,
        [1.99],
        [2.0],
        "2",
        ["2"],
        [True],
        math.nan,
        [math.inf],
        None,
        [None],
        2**70,
        [-(2**70)],
        [2**63],
        {2},
    ],
    ids=repr,
)
def test_any_other_length_is_a_bad_dtype(values):
    with pytest.raises(errors.BadDtype):
        masks.lengths(values)


def test_a_bias_is_numbers_and_minus_infinity():
    found = masks.bias([[0, 0.5], [-math.inf, 1], [np.float64(2), 1e30]]).values
    assert found.dtype == np.float32
    assert found.tolist() == [[0, 0.5], [-math.inf, 1], [2, float(np.float32(1e30))]]


@pytest.mark.parametrize("values", [[True], None, [None], "inf", ["0.5"], ["-inf"], [1j], {0.5}, [10**400]], ids=repr)
def test_a_bias_without_numbers_is_refused(values):
    with pytest.raises(errors.BadDtype):
        masks.bias(values)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e39, -1e39])
def test_no_finite_number_becomes_minus_infinity(value):
    with pytest.raises(errors.NonFinite):
        masks.bias([0.0, value])


@pytest.mark.parametrize("kind", [masks.attend, masks.ignore, masks.lengths, masks.bias])
@pytest.mark.parametrize(
    "values",
    [[[1], [1, 1]], [1, [1]], [[[1]], [1]], [np.ones(2), np.ones(3)], jagged_tensors(), listed_in_itself(),
     [torch.ones((), device="meta")]],
    ids=["rows", "a number and a row", "depths", "arrays", "tensors", "itself", "no memory"],
)  # fmt: skip
def test_lists_of_unequal_length_are_a_bad_shape(kind, values):
    with pytest.raises(errors.BadShape):
        kind(values)


@pytest.mark.parametrize("kind", [masks.attend, masks.ignore, masks.lengths, masks.bias])
@pytest.mark.parametrize(("values", "shape"), [([], (0,)), ([[], []], (2, 0))])
def test_an_empty_list_is_sent_as_an_empty_array(kind, values, shape):
    assert kind(values).values.shape == shape
    assert kind(values).values.dtype.name in ("bool", "int64", "float32")


@pytest.mark.parametrize("values", [np.array([0.5]), torch.tensor([2]), np.array(["a"])], ids=repr)
def test_an_array_with_a_dtype_is_left_to_the_service(values):
    assert masks.attend(values).values is values


@pytest.mark.parametrize("kind", [masks.attend, masks.ignore, masks.bias])
def test_axes_are_a_field_of_the_mask(kind):
    values = np.ones((2, 2), bool if kind is not masks.bias else np.float32)
    assert kind(values, axes="bs").fields == {"axes": "bs"}
    assert kind(values).fields == {}


@pytest.mark.parametrize("make", [np.zeros, torch.zeros], ids=["numpy", "torch"])
@pytest.mark.parametrize(("dtype", "kind"), [("bool", "ignore"), ("float32", "bias"), ("float16", "bias")])
@pytest.mark.parametrize(
    ("shape", "axes", "found"),
    [
        ((3, 5), "ls", (3, 5)),
        ((4, 3, 5), "hls", (4, 3, 5)),
        ((8, 3, 5), "bhls", (2, 4, 3, 5)),
        ((4, 4, 4), "hls", (4, 4, 4)),
        ((8, 0, 5), "bhls", (2, 4, 0, 5)),
    ],
)
def test_an_attn_mask_of_torch_becomes_its_kind_and_axes(make, dtype, kind, shape, axes, found):
    mask = masks.attn_mask(make(shape, dtype=getattr(np if make is np.zeros else torch, dtype)), num_heads=4)
    assert (mask.kind, mask.fields, tuple(mask.values.shape)) == (kind, {"axes": axes}, found)


def test_an_attn_mask_of_torch_keeps_the_order_of_sequences_and_heads():
    values = torch.arange(24.0).reshape(8, 1, 3)
    assert torch.equal(masks.attn_mask(values, num_heads=4).values[1, 2], values[1 * 4 + 2])


@pytest.mark.parametrize(("shape", "axes"), [((5,), "s"), ((2, 5), "bs")])
@pytest.mark.parametrize(("dtype", "kind"), [(torch.bool, "ignore"), (torch.float32, "bias")])
def test_a_key_padding_mask_of_torch_becomes_its_kind_and_axes(shape, axes, dtype, kind):
    mask = masks.key_padding_mask(torch.zeros(shape, dtype=dtype))
    assert (mask.kind, mask.fields, tuple(mask.values.shape)) == (kind, {"axes": axes}, shape)


def test_a_mask_that_torch_would_not_take_is_refused():
    for shape in ((3,), (6, 3, 5), (2, 4, 3, 5)):
        with pytest.raises(errors.BadShape):
            masks.attn_mask(torch.zeros(shape), num_heads=4)
    with pytest.raises(errors.BadShape):
        masks.key_padding_mask(torch.zeros(2, 4, 5))
    odd: Any
    for odd in (0, -4, 2.0, "4", None):
        with pytest.raises(errors.InvalidInput, match="num_heads must be a whole number and at least 1"):
            masks.attn_mask(torch.zeros(4, 3, 5), odd)
    for odd in ([[True]], None):
        with pytest.raises(errors.InvalidInput, match="attn_mask must be a NumPy array or a torch tensor, got "):
            masks.attn_mask(odd, 4)
        with pytest.raises(errors.InvalidInput, match="key_padding_mask must be a NumPy array or a torch tensor, got "):
            masks.key_padding_mask(odd)
    for mask in (lambda: masks.attn_mask(torch.zeros(3, 5).int(), 4), lambda: masks.key_padding_mask(np.ones(3, int))):
        with pytest.raises(errors.BadDtype):
            mask()
