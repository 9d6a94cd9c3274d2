"""Group M of the catalogue over the whole service: what each mask means, to the bit, and which ones mean nothing."""

import json

import numpy as np
import pytest

from tests.integration.running import LAYERS, in_service, in_shared_service

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
        assert "query row 0 of sequence 0" in refused.json()["detail"]

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
@in_shared_service()
async def test_a_malformed_mask_is_refused(service, case):
    for mask in BAD[case]:
        refused = await service.attend({"query": X.tolist(), "masks": [mask]})
        assert refused.json().get("code") in CODES[case], (mask, refused.text)
        assert refused.status_code == (400 if refused.json()["code"] == "bad_json" else 422)


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


@pytest.mark.parametrize("allowed", [RNG.random((5, 5)) < 0.6 for _ in range(3)])
def test_causal_and_another_mask_are_both_obeyed_M13(served, allowed):
    allowed[:, 0] = True

    async def story(service):
        both = await answer(service, {"kind": "causal"}, {"kind": "attend", "values": allowed.tolist()})
        written_out = np.tril(np.ones((5, 5), bool)) & allowed
        assert both == await answer(service, {"kind": "attend", "values": written_out.tolist()})

    served(story)


CUBE = RNG.standard_normal((3, 5, 16)).astype(np.float32)
# More sequences than a short list has entries: from there on a list of numbers is decoded as an array.
MANY = RNG.standard_normal((70, 2, 16)).astype(np.float32)


@pytest.mark.parametrize("cube", [CUBE, CUBE[:1], MANY], ids=["three", "one", "many"])
@pytest.mark.parametrize(
    "fields",
    [{"kind": "causal"}, {"kind": "window", "left": 1, "right": 2}, {"kind": "window", "left": 2**60, "right": 1}],
    ids=str,
)
def test_each_sequence_may_have_an_offset_of_its_own(shared, cube, fields):
    """Any whole number, exactly, however many sequences there are: two huge ones may cancel."""
    offsets = [-1, 0, 2**70, 1, -(2**70), 2**60 + 1, 10**400] * len(cube)

    async def story(service):
        whole = await answer(service, {**fields, "offset": offsets[: len(cube)]}, x=cube)
        num_masked = 0
        for b in range(len(cube)):
            alone = await answer(service, {**fields, "offset": offsets[b]}, x=cube[b])
            assert (alone["output"], alone["weights"]) == (whole["output"][b], whole["weights"][b])
            num_masked += alone["masked_rows"]
        assert whole["masked_rows"] == num_masked

    shared(story)


@in_service()
async def test_one_offset_for_all_and_the_same_for_each_are_the_same_bits(service):
    for offset in (-1, 0, 3):
        one = await answer(service, {"kind": "causal", "offset": offset}, x=CUBE)
        assert one == await answer(service, {"kind": "causal", "offset": [offset] * 3}, x=CUBE)


@pytest.mark.parametrize("kind", ["causal", "window"])
@pytest.mark.parametrize(
    ("x", "offset", "words"),
    [
        (CUBE, [0, 1], "or a list of 3, one for each sequence"),
        (CUBE, [0, 1, 2, 3], "or a list of 3"),
        (CUBE, [], "or a list of 3"),
        (CUBE, [0, 1, 1.5], "or a list of 3"),
        (CUBE, [0, 1, True], "or a list of 3"),
        (CUBE, [0, 1, "-inf"], "or a list of 3"),
        (CUBE, [0, 1, None], "or a list of 3"),
        (CUBE, [[0], [1], [2]], "or a list of 3"),
        (CUBE, {"dtype": "int64", "shape": [3], "data": [0, 1, 2]}, "or a list of 3"),
        (CUBE, 1.0, "must be a whole number"),
        (CUBE, True, "must be a whole number"),
        (CUBE, "1", "must be a whole number"),
        (MANY, [0] * 69, "or a list of 70"),
        (MANY, [0] * 69 + [0.5], "or a list of 70"),
        (MANY, [0] * 69 + [False], "or a list of 70"),
        (MANY, [0] * 69 + ["-inf"], "or a list of 70"),
        (MANY, [0] * 69 + ["x"], "or a list of 70"),
        (MANY, [[0]] * 70, "or a list of 70"),
        (CUBE[0], [0], "must be a whole number"),
    ],
    ids=lambda value: str(value)[:24] if not isinstance(value, np.ndarray) else f"{value.ndim}-D",
)
@in_shared_service()
async def test_an_offset_is_a_whole_number_or_one_for_each_sequence(service, kind, x, offset, words):
    refused = await service.attend({"query": x.tolist(), "masks": [{"kind": kind, "offset": offset}]})
    problem = refused.json()
    assert (refused.status_code, problem["code"], problem["param"]) == (422, "bad_mask", "/masks/0/offset")
    assert words in problem["detail"]
    assert ("one for each" in problem["detail"]) == (x.ndim == 3)
