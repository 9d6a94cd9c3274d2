"""Axes of masks: which axis of a mask is which, whatever the sizes, in every form of a request."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from tests import oracle
from tests.integration.forms import (
    AXES,
    BINARY,
    OPTIONAL_AXES,
    WIDTH,
    Request,
    answers,
    as_inference,
    as_list,
    as_nested,
    as_safetensors,
    check_same_bits,
)
from tests.integration.running import LAYERS, in_shared_service

HEADS = LAYERS[0].spec.num_heads
PARAMETERS = {name: tensor.numpy() for name, tensor in LAYERS[0].tensors.items()}
# B, L, S: all unequal, B = L, B = H, L = S, H = L, all equal.
SIZES = [(2, 5, 3), (3, 3, 6), (HEADS, 3, 5), (2, 5, 5), (2, HEADS, 3), (HEADS, HEADS, HEADS)]
MEANINGS: dict[str, Callable[[np.ndarray], oracle.Mask]] = {
    "attend": oracle.Attend,
    "ignore": oracle.Ignore,
    "bias": oracle.Bias,
}
TRIANGLE = np.tri(HEADS, dtype=bool)
CUBE = np.random.default_rng(1).standard_normal((HEADS, HEADS, WIDTH)).astype(np.float32)


def inputs(sizes: tuple[int, int, int], *, is_batch: bool) -> tuple[np.ndarray, np.ndarray]:
    rng, (sequences, queries, keys) = np.random.default_rng(list(sizes)), sizes
    query, key = (rng.standard_normal((sequences, rows, WIDTH)).astype(np.float32) for rows in (queries, keys))
    return (query, key) if is_batch else (query[0], key[0])


def drawn(kind: str, axes: str, sizes: tuple[int, int, int], *, ones: str = "") -> tuple[np.ndarray, oracle.Mask]:
    """Values with these axes, and what they mean: [B|1, H|1, L|1, S|1]. Axes in `ones` have the size 1."""
    full = dict(zip("bhls", (sizes[0], HEADS, *sizes[1:]), strict=True))
    rng = np.random.default_rng([len(axes), *sizes])
    values = rng.random([1 if name in ones else full[name] for name in axes]) < 0.6
    whole = values.reshape([values.shape[axes.index(name)] if name in axes else 1 for name in full])
    if kind == "bias":
        floats = np.where(whole, rng.standard_normal(whole.shape), -np.inf).astype(np.float32)
        return floats.reshape(values.shape), oracle.Bias(floats)
    return values, MEANINGS[kind](whole)


def check_against_reference(found: dict[str, np.ndarray], request: Request, mask: oracle.Mask) -> None:
    key = request.query if request.key is None else request.key
    query, key = (x if x.ndim == 3 else x[None] for x in (request.query, key))
    output, weights = oracle.multi_head_attention(LAYERS[0].spec, PARAMETERS, (query, key, key), [mask])
    np.testing.assert_allclose(found["output"].reshape(output.shape), output, atol=2e-5)
    np.testing.assert_allclose(found["weights"].reshape(weights.shape), weights, atol=2e-6)


@pytest.mark.parametrize("kind", ["attend", "ignore", "bias"])
@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "B{}-L{}-S{}".format(*sizes))
@in_shared_service()
async def test_axes_name_what_each_axis_is_whatever_the_sizes_in_every_form_M5(service, sizes, kind):
    for is_batch in (True, False):
        query, key = inputs(sizes, is_batch=is_batch)
        for axes in AXES[is_batch]:
            values, mask = drawn(kind, axes, sizes if is_batch else (1, *sizes[1:]))
            request = Request(query, key, masks=[({"kind": kind, "axes": axes}, values)], weights={"form": "heads"})
            found = await answers(service, request)
            check_same_bits(found)
            check_against_reference(found["base64"], request, mask)
            if axes in OPTIONAL_AXES[is_batch]:
                bare = Request(query, key, masks=[({"kind": kind}, values)], weights={"form": "heads"})
                check_same_bits({"base64": found["base64"], **await answers(service, bare)})


def test_any_axis_may_be_1(shared):
    sizes = SIZES[0]

    async def story(service):
        query, key = inputs(sizes, is_batch=True)
        for axes in AXES[True]:
            for ones in itertools.chain.from_iterable(itertools.combinations(axes, n) for n in range(1, len(axes) + 1)):
                values, mask = drawn("bias", axes, sizes, ones="".join(ones))
                request = Request(
                    query, key, masks=[({"kind": "bias", "axes": axes}, values)], weights={"form": "heads"}
                )
                found = await answers(service, request)
                check_same_bits(found)
                check_against_reference(found["base64"], request, mask)

    shared(story)


@pytest.mark.parametrize("kind", ["attend", "ignore", "bias"])
def test_a_mask_of_two_readings_is_refused_and_each_reading_is_served(shared, kind):
    """np.tri(4) with B = L = 4: without axes it was once read as padding."""
    values = TRIANGLE.astype(np.float32) if kind == "bias" else TRIANGLE

    async def story(service):
        refused = await service.attend({"query": CUBE.tolist(), "masks": [{"kind": kind, "values": values.tolist()}]})
        problem = refused.json()
        assert (refused.status_code, problem["code"], problem["param"]) == (422, "mask_axes_required", "/masks/0")
        assert problem["type"].endswith("mask_axes_required")
        for words in ("masks[0].values", "[B, S]", "[L, S]", "set axes to", '"bs"', '"ls"'):
            assert words in problem["detail"]
        for axes, whole in (("ls", values[None, None]), ("bs", values[:, None, None])):
            request = Request(CUBE, CUBE, masks=[({"kind": kind, "axes": axes}, values)], weights={"form": "heads"})
            check_against_reference((await answers(service, request))["base64"], request, MEANINGS[kind](whole))

    shared(story)


# Shapes that fit neither reading, one, or both; the answer is the same.
TWO_READINGS = [(4, 4), (1, 1), (1, 4), (7, 9), (0, 4), (4, 4, 4), (1, 4, 4), (2, 3, 5)]


@pytest.mark.parametrize("shape", TWO_READINGS, ids=str)
def test_axes_are_required_before_any_shape_is_checked_in_every_form_and_nothing_is_queued(shared, shape):
    values = np.ones(shape, bool)
    other_key = CUBE[:2, :, :5]  # of another width and number of sequences

    async def story(service):
        for request in (
            Request(CUBE, masks=[({"kind": "attend"}, values)]),
            Request(CUBE, key=other_key, masks=[({"kind": "causal"}, None), ({"kind": "ignore"}, values)]),
        ):
            at = len(request.masks) - 1
            bodies = [request.fields(as_list)] + ([request.fields(as_nested)] if values.size else [])
            found = [await service.attend(body) for body in bodies]
            content, headers = as_safetensors(request), {"content-type": BINARY}
            found.append(await service.client.post("/v1/layers/small/attend", content=content, headers=headers))
            for answer in found:
                problem = answer.json()
                assert (answer.status_code, problem["code"]) == (422, "mask_axes_required"), problem
                assert problem["param"] == f"/masks/{at}"
                assert f"masks[{at}].values has {len(shape)} axes" in problem["detail"]
        assert service.service.batcher.num_queued == 0
        samples = await service.samples()
        assert samples.get("attention_batches_total", 0) == 0

    shared(story)


@pytest.mark.parametrize("shape", TWO_READINGS, ids=str)
@pytest.mark.parametrize("name", ["attend_mask", "ignore_mask", "bias"])
def test_the_open_inference_protocol_names_its_parameter(shared, name, shape):
    kind = name.removesuffix("_mask")
    values = np.ones(shape, np.float32 if kind == "bias" else bool)
    request = Request(CUBE, masks=[({"kind": kind}, values)])

    async def story(service):
        for binary in (True, False):
            body, head = as_inference(request, binary=binary)
            headers = {"inference-header-content-length": str(head)} if binary else {}
            refused = await service.client.post("/v2/models/small/infer", content=body, headers=headers)
            assert refused.status_code == 400
            words = refused.json()["error"]
            assert words.endswith("(mask_axes_required)"), words
            assert words.startswith(f"{name} has {len(shape)} axes")
            assert f"set the parameter {name}_axes to" in words

    shared(story)


def mask_field(values: object, axes: object = None, kind: str = "attend") -> dict:
    return {"kind": kind, "values": values} | ({} if axes is None else {"axes": axes})


def ones(*shape: int) -> dict:
    return as_list(np.ones(shape, bool))


ONE = "[5] (axes s), [4, 5] (axes ls) or [4, 4, 5] (axes hls), and any axis may be 1"
BATCH = (
    "[5] (axes s), [4, 5] (axes ls), [4, 4, 5] (axes hls), [2, 5] (axes bs), [2, 4, 5] (axes bls) or "
    "[2, 4, 4, 5] (axes bhls), and any axis may be 1"
)


@pytest.mark.parametrize(
    ("is_batch", "bad", "param", "words"),
    [
        (True, mask_field(ones(3, 5), "bs"), "values", f"must be {BATCH}; got [3, 5] as axes bs"),
        (True, mask_field(ones(2, 5), "ls"), "values", f"must be {BATCH}; got [2, 5] as axes ls"),
        (True, mask_field(ones(5), "bs"), "values", f"must be {BATCH}; got [5] as axes bs"),
        (True, mask_field(ones(2, 4, 4, 5), "hls"), "values", f"must be {BATCH}; got [2, 4, 4, 5] as axes hls"),
        (True, mask_field(ones(0), "s"), "values", f"must be {BATCH}; got [0] as axes s"),
        (True, mask_field(ones(4)), "values", f"must be {BATCH}; got [4]"),
        (True, mask_field(ones(2, 4, 5, 4)), "values", f"must be {BATCH}; got [2, 4, 5, 4]"),
        (True, mask_field(True), "values", f"must be {BATCH}; got []"),
        (True, mask_field(ones(1, 1, 1, 1, 5)), "values", f"must be {BATCH}; got 5 axes"),
        (True, mask_field([[[[[1]]]]]), "values", f"must be {BATCH}; got 5 axes"),
        (False, mask_field(ones(5, 4)), "values", f"must be {ONE}; got [5, 4]"),
        (False, mask_field(ones(4, 5), "s"), "values", f"must be {ONE}; got [4, 5] as axes s"),
        (False, mask_field(ones(1, 4, 4, 5)), "values", f"must be {ONE}; got [1, 4, 4, 5]"),
        (
            False,
            mask_field(ones(1, 5), "bs"),
            "axes",
            "masks[0].axes must be one of s, ls, hls, because query is one sequence",
        ),
        (False, mask_field(ones(1, 4, 4, 5), "bhls"), "axes", "masks[0].axes must be one of s, ls, hls"),
        (True, mask_field(ones(5, 4), "sl"), "axes", "must be one of 's', 'ls', 'hls', 'bs', 'bls' or 'bhls'"),
        (True, mask_field(ones(2, 5), "BS"), "axes", "must be one of"),
        (True, mask_field(ones(2, 5), ["b", "s"]), "axes", "must be one of"),
        (True, mask_field(ones(2, 5), ""), "axes", "must be one of"),
    ],
)
def test_the_refusal_of_a_shape_that_does_not_fit_names_shapes_that_do(shared, is_batch, bad, param, words):
    query, key = inputs((2, 4, 5), is_batch=is_batch)

    async def story(service):
        refused = await service.attend({"query": query.tolist(), "key": key.tolist(), "masks": [bad]})
        problem = refused.json()
        assert (refused.status_code, problem["code"], problem["param"]) == (422, "bad_mask", f"/masks/0/{param}")
        assert words in problem["detail"], problem["detail"]

    shared(story)


@pytest.mark.parametrize("kind", ["lengths", "causal", "window"])
def test_kinds_of_one_reading_take_no_axes(shared, kind):
    fields = {"kind": kind, "axes": "bs"} | ({"values": [1, 2, 3, 4]} if kind == "lengths" else {})

    async def story(service):
        refused = await service.attend({"query": CUBE.tolist(), "masks": [fields]})
        assert (refused.status_code, refused.json()["code"]) == (422, "unknown_field")

    shared(story)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"bias_axes": "bs"}, "names the axes of an input bias, which is missing"),
        ({"attend_mask_axes": "sb"}, "must be one of 's', 'ls', 'hls', 'bs', 'bls' or 'bhls'"),
        ({"attend_mask_axes": 2}, "must be one of"),
        ({"lengths_axes": "bs"}, 'unknown parameter "lengths_axes"'),
        ({"attend_mask_axes": "bs"}, "attend_mask must be [2] (axes s), [2, 2] (axes ls)"),
    ],
)
def test_parameters_of_axes_are_checked(shared, parameters, words):
    query = {"name": "query", "datatype": "FP32", "shape": [1, 2, WIDTH], "data": [0.5] * 2 * WIDTH}
    values = {"name": "attend_mask", "datatype": "BOOL", "shape": [2, 2], "data": [1] * 4}

    async def story(service):
        body = {"inputs": [query, values], "parameters": parameters}
        refused = await service.client.post("/v2/models/small/infer", json=body)
        assert refused.status_code == 400
        assert words in refused.json()["error"]

    shared(story)


@pytest.mark.parametrize("rows", [1, 2, 8, 9, 10, 11, 40])
@pytest.mark.parametrize("of", [bool, float, int], ids=lambda of: of.__name__)
def test_a_bare_array_needs_its_kind_at_every_size(shared, rows, of):
    square = np.tri(rows, dtype=of)

    async def story(service):
        for masks in (square.tolist(), [square.tolist()], square[0].tolist(), as_list(square), [as_list(square)]):
            refused = await service.attend({"query": CUBE.tolist(), "masks": masks})
            assert (refused.status_code, refused.json()["code"]) == (422, "mask_kind_required"), refused.text

    shared(story)


@pytest.mark.parametrize("kind", ["attend", "ignore"])
@pytest.mark.parametrize("values", [[0.0, -1e9, 0, 0], ["-inf", 0, 0, 0], as_list(np.zeros(4, np.float32))], ids=str)
@in_shared_service()
async def test_the_refusal_of_a_float_mask_that_is_no_bias_names_the_bias(service, kind, values):
    refused = await service.attend({"query": CUBE.tolist(), "masks": [{"kind": kind, "values": values}]})
    assert refused.status_code == 422
    assert 'a mask of floats is a "bias"' in refused.json()["detail"]
