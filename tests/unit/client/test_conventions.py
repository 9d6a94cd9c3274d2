"""Conventions: the arguments of each system become the keyword arguments of Client.attention, or an error in a sentence."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from attention_client import AsyncClient, errors
from attention_client import conventions as typed_conventions

# mypy counts *arrays as every positional argument.
conventions: Any = typed_conventions
F32 = np.float32


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, F32)


def three(*shape: int) -> list[np.ndarray]:
    return [ones(*shape)] * 3


def flags(*shape: int) -> np.ndarray:
    return np.ones(shape, bool)


def said(arguments) -> dict:
    """The arguments without the arrays; a mask is its kind, its fields and the shape of its values."""
    masks = [
        (mask.kind, dict(mask.fields), None if mask.values is None else tuple(np.shape(mask.values)))
        for mask in arguments["masks"]
    ]
    return {k: v for k, v in arguments.items() if k not in {"query", "key", "value"}} | {"masks": masks}


@pytest.mark.parametrize(("shape", "layout"), [((3, 4), "ld"), ((2, 3, 4), "hld"), ((1, 2, 3, 4), "bhld")])
def test_torch_sdpa_reads_the_layout_off_the_rank_and_keeps_the_arrays(shape, layout):
    query, key, value = (np.zeros(shape, F32) for _ in range(3))
    found = conventions.torch_sdpa(query, key, value)
    assert found["query"] is query
    assert found["key"] is key
    assert found["value"] is value
    assert said(found) == {"layout": layout, "masks": []}


@pytest.mark.parametrize(
    ("shape", "axes"), [((5,), "s"), ((3, 5), "ls"), ((2, 3, 5), "hls"), ((1, 3, 5), "hls"), ((2, 2, 3, 5), "bhls")]
)
@pytest.mark.parametrize(("dtype", "kind"), [(torch.bool, "attend"), (torch.float32, "bias"), (torch.bfloat16, "bias")])
def test_the_attn_mask_of_torch_sdpa_broadcasts_from_the_right(shape, axes, dtype, kind):
    query, key, value = torch.ones(2, 2, 3, 4), torch.ones(2, 2, 5, 4), torch.ones(2, 2, 5, 4)
    found = conventions.torch_sdpa(query, key, value, torch.ones(shape, dtype=dtype), scale=0.5)
    assert said(found) == {"layout": "bhld", "masks": [(kind, {"axes": axes}, shape)], "scale": 0.5}


def test_is_causal_of_torch_keras_and_flax_is_top_left():
    top_left = [("causal", {"align": "top_left"}, None)]
    q, k, v = three(1, 2, 3, 4)
    for found in (
        conventions.torch_sdpa(q, k, v, is_causal=True),
        conventions.keras(query=q, key=k, value=v, is_causal=True),
        conventions.flax(q, k, v, is_causal=True),
    ):
        assert said(found)["masks"] == top_left


def test_torch_mha_moves_the_batch_first_and_asks_for_the_mean_of_the_weights():
    query, key = torch.randn(3, 2, 8), torch.randn(5, 2, 8)
    padding, mask = torch.zeros(2, 5).bool(), torch.zeros(8, 3, 5)
    found = conventions.torch_mha(query, key, key, 4, attn_mask=mask, key_padding_mask=padding, is_causal=True)
    assert torch.equal(found["query"], query.transpose(0, 1))
    assert said(found) == {
        "layout": "packed",
        "num_heads": 4,
        "weights": "mean",
        "masks": [("bias", {"axes": "bhls"}, (2, 4, 3, 5)), ("ignore", {"axes": "bs"}, (2, 5))],
    }


@pytest.mark.parametrize(
    ("options", "weights"),
    [({}, "mean"), ({"average_attn_weights": False}, "heads"), ({"need_weights": False}, None)],
)
def test_torch_mha_takes_batch_first_one_sequence_and_the_choice_of_weights(options, weights):
    x = ones(2, 3, 8)
    found = conventions.torch_mha(x, x, x, 2, batch_first=True, **options)
    assert found["query"] is x
    assert found.get("weights") == weights
    one = conventions.torch_mha(*three(3, 8), 2, attn_mask=flags(3, 3), key_padding_mask=flags(3))
    assert said(one)["masks"] == [("ignore", {"axes": "ls"}, (3, 3)), ("ignore", {"axes": "s"}, (3,))]


def test_onnx_of_four_axes_has_every_attribute():
    past = ones(2, 2, 7, 4)
    found = conventions.onnx(
        ones(2, 4, 3, 4), ones(2, 2, 5, 4), ones(2, 2, 5, 6), flags(3, 10), past, past,
        is_causal=1, qk_matmul_output_mode=2, scale=0.5, softcap=2.0, left_window_size=4,
    )  # fmt: skip
    assert {name: found.pop(name) is past for name in ("past_key", "past_value")} == dict.fromkeys(
        ("past_key", "past_value"), True
    )
    assert not found["masks"][0].values[:, 10:].any()
    assert said(found) == {
        "layout": "bhld",
        "masks": [
            ("attend", {"axes": "ls"}, (3, 12)),
            ("causal", {"offset": 7}, None),
            ("window", {"left": 4, "offset": 7}, None),
        ],
        "scale": 0.5,
        "softcap": 2.0,
        "present": True,
        "scores": "masked",
    }


def test_onnx_of_three_axes_is_packed_and_aligns_to_the_valid_keys():
    found = conventions.onnx(
        ones(2, 3, 8), ones(2, 5, 4), ones(2, 5, 4), nonpad_kv_seqlen=np.array([5, 3]), is_causal=1,
        q_num_heads=4, kv_num_heads=2, qk_matmul_output_mode=3,
    )  # fmt: skip
    assert said(found) == {
        "layout": "packed",
        "num_heads": 4,
        "num_kv_heads": 2,
        "masks": [("lengths", {}, (2,)), ("causal", {"offset": [2, 0]}, None)],
        "weights": "heads",
    }


def test_a_short_float_mask_of_onnx_blocks_the_other_keys():
    found = conventions.onnx(*three(1, 1, 4, 2), attn_mask=np.zeros((4, 3), F32))
    assert np.array_equal(
        found["masks"][0].values, np.pad(np.zeros((4, 3), F32), ((0, 0), (0, 1)), constant_values=-np.inf)
    )


@pytest.mark.parametrize(("mode", "stage"), [(0, "scaled"), (1, "capped"), (2, "masked"), (3, None), (None, None)])
def test_the_output_mode_of_onnx_is_a_stage_of_the_scores(mode, stage):
    found = conventions.onnx(*three(1, 1, 4, 2), qk_matmul_output_mode=mode)
    assert (found.get("scores"), found.get("weights")) == (stage, "heads" if mode == 3 else None)


def test_flax_and_jax_take_lengths_and_a_window():
    found = conventions.flax(
        ones(2, 3, 4, 8), ones(2, 5, 4, 8), ones(2, 5, 4, 8), ones(1, 4, 3, 5), flags(2, 1, 3, 5),
        query_seq_lengths=torch.tensor([3, 1]), key_value_seq_lengths=[5, 2], local_window_size=2,
    )  # fmt: skip
    assert found["masks"][2].values[..., 0].tolist() == [[True, True, True], [True, False, False]]
    assert said(found) == {
        "layout": "blhd",
        "masks": [
            ("attend", {"axes": "bhls"}, (2, 1, 3, 5)),
            ("bias", {"axes": "bhls"}, (1, 4, 3, 5)),
            ("attend", {"axes": "bls"}, (2, 3, 1)),
            ("lengths", {}, (2,)),
            ("window", {"left": 2, "right": 2, "align": "top_left"}, None),
        ],
    }
    of_one_number = said(conventions.flax(*three(2, 3, 4, 8), local_window_size=np.int64(2)))
    assert of_one_number["masks"] == said(found)["masks"][-1:]
    of_two = said(conventions.flax(*three(2, 3, 4, 8), local_window_size=np.array([2, 0])))
    assert of_two["masks"] == [("window", {"left": 2, "right": 0, "align": "top_left"}, None)]
    assert said(conventions.flax(*three(3, 4, 8), mask=flags(4, 3, 3)))["layout"] == "lhd"


FOUR = three(2, 4, 3, 8)
KEYS = [ones(2, 4, 3, 8), ones(2, 2, 3, 8), ones(2, 2, 3, 8)]
PACKED = three(3, 2, 8)
META = torch.ones(2, dtype=torch.int64, device="meta")


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: conventions.torch_sdpa(*FOUR, flags(3, 3), is_causal=True), errors.InvalidInput, "exclude each other"),
        (lambda: conventions.torch_sdpa(*FOUR, dropout_p=0.1), errors.InvalidInput, "dropout"),
        (lambda: conventions.torch_sdpa(*KEYS), errors.BadShape, "enable_gqa=True"),
        (lambda: conventions.torch_sdpa(*FOUR, np.ones((3, 3), int)), errors.BadDtype, "booleans or floats"),
        (lambda: conventions.torch_sdpa(*three(3, 8), flags(1, 3, 3)), errors.BadMask, "1 or 2 axes, got 3"),
        (lambda: conventions.torch_sdpa(*FOUR, [[True]]), errors.InvalidInput, "attn_mask must be a NumPy array"),
        (lambda: conventions.torch_sdpa(*three(2, 2, 2, 2, 2)), errors.BadShape, "2 or 3 or 4 axes"),
        (lambda: conventions.torch_sdpa(ones(3, 8), ones(1, 3, 8), ones(3, 8)), errors.BadShape, r"got \[2, 3, 2\]"),
        (lambda: conventions.torch_sdpa([[1.0]], ones(1, 1), ones(1, 1)), errors.InvalidInput, "query must be a NumPy"),
        (lambda: conventions.torch_mha(*PACKED, 2, is_causal=True), errors.InvalidInput, "hint"),
        (lambda: conventions.torch_mha(*PACKED, 2, attn_mask=flags(2, 3, 3)), errors.BadShape, r"\[4, L, S\]"),
        (lambda: conventions.torch_mha(*PACKED, 2, key_padding_mask=flags(3)), errors.BadShape, r"\[B, S\]"),
        (lambda: conventions.torch_mha(*PACKED, 2, attn_mask=np.ones((3, 3), int)), errors.BadDtype, "of torch"),
        (lambda: conventions.onnx(*PACKED, q_num_heads=2), errors.InvalidInput, "kv_num_heads"),
        (lambda: conventions.onnx(*FOUR, None, *FOUR[:2], [3, 3]), errors.InvalidInput, "exclude each other"),
        (lambda: conventions.onnx(*FOUR, qk_matmul_output_mode=4), errors.InvalidInput, "0, 1, 2 or 3, got 4"),
        (lambda: conventions.onnx(*FOUR, torch.ones(3, 2)), errors.InvalidInput, "fewer keys than 3"),
        (lambda: conventions.onnx(*FOUR, np.ones((3, 2), int)), errors.BadDtype, "booleans or floats, got int64"),
        (lambda: conventions.torch_mha(*PACKED, None, attn_mask=np.ones((3, 3))), errors.InvalidInput, "num_heads must"),
        (lambda: conventions.keras(query=FOUR[0], value=FOUR[0], attention_mask=flags(3)), errors.BadMask, "3 or 4"),
        (lambda: conventions.keras(query=FOUR[0], value=FOUR[0], query_mask=flags(2)), errors.BadMask, "query_mask"),
        (lambda: conventions.flax(*FOUR, query_seq_lengths=[[1]]), errors.BadShape, "query_seq_lengths"),
        (lambda: conventions.flax(*FOUR, query_seq_lengths=np.array([1.5, 2])), errors.BadDtype, "int64, got float64"),
        (lambda: conventions.flax(*FOUR, query_seq_lengths=META), errors.InvalidInput, "values in memory"),
        (lambda: conventions.onnx(*FOUR, nonpad_kv_seqlen=[[3, 3]]), errors.BadShape, r"must be \[B\], got \[1, 2\]"),
        (lambda: conventions.onnx(*FOUR, nonpad_kv_seqlen=3), errors.BadShape, r"must be \[B\], got \[\]"),
        (lambda: conventions.onnx(*FOUR, nonpad_kv_seqlen=META), errors.InvalidInput, "values in memory"),
        (lambda: conventions.onnx(*FOUR, nonpad_kv_seqlen=np.array([3.0, 2])), errors.BadDtype, "int64, got float64"),
        (lambda: conventions.flax(*FOUR, key_value_seq_lengths=[1.5]), errors.BadDtype, "whole numbers"),
        (lambda: conventions.flash(*FOUR, dropout_p=0.1), errors.InvalidInput, "dropout"),
        (lambda: conventions.flash(*FOUR, alibi_slopes=np.ones(4)), errors.BadDtype, "alibi_slopes"),
        (lambda: conventions.d2l(*FOUR), errors.BadShape, "3 axes"),
        (lambda: conventions.numpy_article(*FOUR, mask=math.nan), errors.InvalidInput, "mask must be a NumPy array"),
    ],
)  # fmt: skip
def test_what_a_system_refuses_is_refused_in_a_sentence(call, error, words):
    with pytest.raises(error, match=words) as caught:
        call()
    assert isinstance(caught.value, errors.InvalidInput)


@pytest.mark.parametrize("rank", [0, 1, 5])
def test_a_past_of_another_rank_is_left_to_the_service(rank):
    past = np.ones((1,) * rank, np.float32)
    assert conventions.onnx(*FOUR, past_key=past, past_value=past)["past_key"] is past


def test_every_argument_is_one_of_the_client():
    taken = set(AsyncClient.attention.__annotations__)
    assert set(conventions.AttentionArguments.__annotations__) <= taken
