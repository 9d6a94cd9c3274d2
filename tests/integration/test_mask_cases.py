"""Group M of the catalogue over the whole service: what each mask means, to the bit, and which ones mean nothing."""

import json

import numpy as np
import pytest
import torch

from tests.integration.running import LAYERS

SMALL = LAYERS[0]
RNG = np.random.default_rng(0)
X = RNG.standard_normal((5, 16)).astype(np.float32)


async def answer(service, *masks: dict, x: np.ndarray = X, **fields) -> dict:
    found = await service.attend({"query": x.tolist(), "masks": list(masks), "weights": {"form": "heads"}, **fields})
    assert found.status_code == 200, found.text
    told = found.json()
    return {name: told[name] for name in ("output", "weights", "masked_rows")}


def bias_of(allowed: np.ndarray) -> dict:
    values = np.where(allowed, 0.0, -np.inf).astype(object)
    return {"kind": "bias", "values": json.loads(json.dumps(values.tolist()).replace("-Infinity", '"-inf"'))}


EMPTY_ROW = np.ones((5, 5), bool)
EMPTY_ROW[2] = False


def test_an_empty_row_is_zeros_however_it_is_written_M1_M2(served):
    ways: list[dict] = [
        {"kind": "attend", "values": EMPTY_ROW.tolist()},
        {"kind": "ignore", "values": (~EMPTY_ROW).tolist()},
        {"kind": "lengths", "values": [5, 5, 0, 5, 5]},
        bias_of(EMPTY_ROW),
    ]

    async def story(service):
        found = [await answer(service, way) for way in ways]
        assert found[1:] == found[:-1]
        assert found[0]["masked_rows"] == 1
        assert (np.array(found[0]["weights"])[:, 2] == 0).all()
        assert np.allclose(found[0]["output"][2], SMALL.tensors["output.bias"], atol=1e-6)
        assert np.isfinite(np.array(found[0]["output"])).all()

    served(story)


def test_masks_that_empty_a_row_only_together_follow_the_same_rule_M3(served):
    padding = {"kind": "ignore", "values": [True, True, False, False, False]}
    nothing = {"kind": "attend", "values": [False] * 5}

    async def story(service):
        both = await answer(service, {"kind": "causal"}, padding)
        assert both["masked_rows"] == 2
        assert (np.array(both["weights"])[:, :2] == 0).all()
        none = await answer(service, nothing)
        assert none["masked_rows"] == 5
        assert np.allclose(none["output"], np.tile(SMALL.tensors["output.bias"], (5, 1)), atol=1e-6)
        refused = await service.attend({"query": X.tolist(), "masks": [nothing], "masked_rows": "error"})
        assert (refused.status_code, refused.json()["code"]) == (422, "masked_row")

    served(story)


def values(*shape: int):
    return np.ones(shape, bool).tolist()


BAD: dict[str, list[dict]] = {
    "M4": [
        *[
            {"kind": "attend", "values": values(*shape)}
            for shape in [(4,), (6,), (5, 4), (2, 5, 5), (4, 5, 4), (1, 4, 5, 5)]
        ],
        {"kind": "ignore", "values": []},
        {"kind": "bias", "values": [[0.0] * 4] * 5},
        {"kind": "attend", "values": True},
    ],
    "M6": [
        *[
            {"kind": kind, "values": [1, 0, value, 1, 1]}
            for kind in ("attend", "ignore")
            for value in (2, -1, 0.5, "1", None)
        ],
        {"kind": "attend", "values": ["true"] * 5},
        {"kind": "attend", "values": {"dtype": "int64", "shape": [5], "data": [1, 0, 2, 1, 1]}},
    ],
    "M8": [
        *[
            {"kind": "bias", "values": [0, 0, value, 0, 0]}
            for value in ("nan", "inf", "Infinity", "-Infinity", 3.5e38, 10**400)
        ],
        {"kind": "bias", "values": {"dtype": "float32", "shape": [5], "data": "AADAfwAAAAAAAAAAAAAAAAAAAAA="}},
    ],
    "M9": [
        *[{"kind": "lengths", "values": value} for value in (6, -1, 2.5, "3", True, None, 10**30, -(2**63))],
        {"kind": "lengths", "values": [1, 2, 3]},
        {"kind": "lengths", "values": [5, 5, 5, 5, 6]},
        {"kind": "lengths", "values": [[5]] * 5},
    ],
}
CODES = {
    "M4": ("bad_mask", "bad_shape"),
    "M6": ("bad_mask",),
    "M8": ("non_finite", "bad_dtype", "bad_json"),
    "M9": ("bad_mask", "bad_dtype", "invalid"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_malformed_mask_is_refused(served, case):
    async def story(service):
        for mask in BAD[case]:
            refused = await service.attend({"query": X.tolist(), "masks": [mask]})
            assert refused.json().get("code") in CODES[case], (mask, refused.text)
            assert refused.status_code == (400 if refused.json()["code"] == "bad_json" else 422)

    served(story)


def test_zeros_and_ones_are_booleans_and_large_biases_are_numbers_M6_M8(served):
    flags = [True, False, True, True, False]

    async def story(service):
        as_bool = await answer(service, {"kind": "attend", "values": flags})
        as_int = await answer(service, {"kind": "attend", "values": [int(flag) for flag in flags]})
        assert as_int == as_bool
        for low in (-1e9, -1e38):
            biased = await answer(service, {"kind": "bias", "values": [0.0 if flag else low for flag in flags]})
            assert biased["masked_rows"] == 0
            assert np.allclose(biased["output"], as_bool["output"], atol=1e-6)

    served(story)


def test_the_polarities_are_those_of_torch_M7(served):
    """`ignore` is key_padding_mask (True = ignored), `attend` that of scaled_dot_product_attention (True = kept)."""
    padding = torch.tensor([False, True, False, False, True])
    module = torch.nn.MultiheadAttention(16, 4, batch_first=True)
    tensors = SMALL.tensors
    with torch.no_grad():
        module.in_proj_weight.copy_(torch.cat([tensors[f"{name}.weight"] for name in ("query", "key", "value")]))
        module.in_proj_bias.copy_(torch.cat([tensors[f"{name}.bias"] for name in ("query", "key", "value")]))
        module.out_proj.weight.copy_(tensors["output.weight"])
        module.out_proj.bias.copy_(tensors["output.bias"])
        x = torch.from_numpy(X)[None]
        wanted = module(x, x, x, key_padding_mask=padding[None], need_weights=False)[0][0].numpy()

    async def story(service):
        ignored = await answer(service, {"kind": "ignore", "values": padding.tolist()})
        kept = await answer(service, {"kind": "attend", "values": (~padding).tolist()})
        assert ignored == kept
        assert np.allclose(ignored["output"], wanted, atol=1e-5)

    served(story)


@pytest.mark.parametrize("allowed", [RNG.random((5, 5)) < 0.6 for _ in range(3)])
def test_causal_and_another_mask_are_both_obeyed_M13(served, allowed):
    allowed[:, 0] = True

    async def story(service):
        both = await answer(service, {"kind": "causal"}, {"kind": "attend", "values": allowed.tolist()})
        written_out = np.tril(np.ones((5, 5), bool)) & allowed
        assert both == await answer(service, {"kind": "attend", "values": written_out.tolist()})

    served(story)
