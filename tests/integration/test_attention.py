"""POST /v1/attention: the float64 oracle over HTTP, every form of a request, refusals that queue nothing."""

import asyncio
import itertools
import json
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from attention_client import AsyncClient, Weights, masks
from attention_client.errors import LayoutRequired
from tests import oracle
from tests.integration.running import in_service, small_layer

URL = "/v1/attention"
BINARY = "application/vnd.safetensors"
RNG = np.random.default_rng(7)
LAYOUTS = {"ld": "ld", "bld": "bld", "hld": "hld", "lhd": "lhd", "bhld": "bhld", "blhd": "blhd"}
SIZES = {"b": 2, "l": 3, "d": 8}


def randn(*shape: int, dtype=np.float32) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


def inputs(
    layout: str, heads: int = 4, kv_heads: int = 2, keys: int = 5, value_width: int = 6, dtype=np.float32
) -> dict:
    """Query, key and value with the axes of `layout`."""
    shapes = {
        "query": SIZES | {"h": heads},
        "key": SIZES | {"h": kv_heads, "l": keys},
        "value": SIZES | {"h": kv_heads, "l": keys, "d": value_width},
    }
    return {name: randn(*(sizes[axis] for axis in layout), dtype=dtype) for name, sizes in shapes.items()}


def four_axes(array: np.ndarray, layout: str) -> np.ndarray:
    moved = array.transpose([layout.index(axis) for axis in "bhld" if axis in layout])
    for place, axis in enumerate("bhld"):
        if axis not in layout:
            moved = np.expand_dims(moved, place)
    return moved


def as_json(tensors: dict, **fields: object) -> dict:
    return {**{name: array.tolist() for name, array in tensors.items()}, **fields}


def as_file(tensors: dict, **fields: object) -> bytes:
    arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    return safetensors.numpy.save(arrays, {"request": json.dumps(fields)})


async def ask(service, tensors: dict, **fields: object) -> dict:
    """The answer's tensors as arrays, from JSON and from safetensors, which have the same bits."""
    reply = await service.client.post(URL, json=as_json(tensors, **fields))
    assert reply.status_code == 200, reply.text
    body = reply.json()
    binary = await service.client.post(URL, content=as_file(tensors, **fields), headers={"content-type": BINARY})
    assert binary.status_code == 200, binary.text
    found = safetensors.numpy.load(binary.content)
    for name, array in found.items():
        assert np.array_equal(np.asarray(body[name], dtype=np.float32), array), name
    return {**body, **found}


def close(found: object, expected: np.ndarray) -> bool:
    return np.allclose(
        np.asarray(found, dtype=np.float64), expected, rtol=0, atol=1e-5 * max(1, np.abs(expected).max())
    )


@in_service()
async def test_every_layout_agrees_with_the_reference_and_is_answered_in_its_own_axes(service):
    for layout in LAYOUTS:
        heads = {"heads": 4, "kv_heads": 2} if "h" in layout else {"heads": 1, "kv_heads": 1}
        tensors = inputs(layout, **heads)
        found = await ask(service, tensors, layout=layout, weights={"form": "heads"}, lse=True)
        query, key, value = (four_axes(x, layout) for x in tensors.values())
        expected = oracle.scaled_dot_product((query, key, value))
        assert close(four_axes(found["output"], layout), expected.output), layout
        shape = [size for axis, size in zip("bhls", (2, heads["heads"], 3, 5), strict=True) if axis in layout + "ls"]
        assert close(found["weights"], expected.weights.reshape(shape)), layout
        assert close(found["lse"], expected.lse.reshape(shape[:-1])), layout
        assert found["layer"] == {"name": "sdpa", "digest": None}


@in_service()
async def test_packed_heads_are_answered_packed(service):
    split = inputs("blhd", heads=4, kv_heads=2)
    packed = {name: array.reshape(*array.shape[:2], -1) for name, array in split.items()}
    one = await ask(service, packed, layout="packed", num_heads=4, num_kv_heads=2)
    other = await ask(service, split, layout="blhd")
    assert np.array_equal(one["output"], other["output"].reshape(2, 3, -1))


@in_service()
async def test_scale_softcap_sinks_past_and_every_stage_of_scores_agree_with_the_reference(service):
    tensors = inputs("bhld")
    past = {"past_key": randn(2, 2, 7, 8), "past_value": randn(2, 2, 7, 6)}
    key, value = (np.concatenate([past[f"past_{x}"], tensors[x]], 2) for x in ("key", "value"))
    sinks = randn(4)
    options = {"scale": 0.7, "softcap": 1.5}
    causal = [{"kind": "causal"}]
    expected = oracle.scaled_dot_product(
        (tensors["query"], key, value), [oracle.Causal(7)], scale=0.7, softcap=1.5, sinks=sinks
    )
    every = {**tensors, **past, "sinks": sinks}
    for stage in ("scaled", "capped"):
        found = await ask(service, every, **options, masks=causal, scores={"stage": stage})
        assert close(found["scores"], getattr(expected, stage)), stage
    masked = safetensors.numpy.load(
        (
            await service.client.post(
                URL,
                content=as_file(every, **options, masks=causal, scores={"stage": "masked"}, lse=True, present=True),
                headers={"content-type": BINARY},
            )
        ).content
    )
    assert np.array_equal(np.isneginf(masked["scores"]), np.isneginf(expected.masked))
    assert close(masked["output"], expected.output)
    assert close(masked["lse"], expected.lse)
    assert np.array_equal(masked["present_key"], key)
    assert np.array_equal(masked["present_value"], value)


@in_service()
async def test_a_masked_score_is_minus_infinity_in_json(service):
    x = [[1.0, 2.0], [3.0, 4.0]]
    body = {"query": x, "key": x, "value": x, "masks": [{"kind": "causal"}], "scores": {"stage": "masked"}}
    assert (await service.client.post(URL, json=body)).json()["scores"][0][1] == "-inf"


@in_service()
async def test_a_masked_row_is_zero_counted_or_refused(service):
    x = [[1.0, 2.0], [3.0, 4.0]]
    body = {"query": x, "key": x, "value": x, "masks": [{"kind": "lengths", "values": [0, 2]}], "lse": True}
    found = (await service.client.post(URL, json=body)).json()
    assert found["output"][0] == [0.0, 0.0]
    assert found["lse"][0] == "-inf"
    assert found["masked_rows"] == 1
    refused = await service.client.post(URL, json=body | {"masked_rows": "error"})
    assert (refused.status_code, refused.json()["code"]) == (422, "masked_row")


@in_service()
async def test_a_blocked_key_whose_score_is_beyond_float32_changes_nothing(service):
    body = {"query": [[1e20]], "value": [[1.0], [5.0]], "masks": [{"kind": "lengths", "values": 1}]}
    wide = {"dtype": "float64", "shape": [2, 1], "data": [0.0, 1e300]}
    for fields in (
        {"key": [[0.0], [1e20]]},
        {"key": wide},
        {"key": [[0.0], [1.0]], "value": {**wide, "data": [1.0, 1e300]}},
    ):
        asked = {**body, **fields, "weights": "heads", "lse": True}
        found = (await service.client.post(URL, json=asked)).json()
        assert [found[name] for name in ("output", "weights", "lse")] == [[[1.0]], [[1.0, 0.0]], [0.0]]
        assert found["masked_rows"] == 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@in_service()
async def test_the_answer_has_the_dtype_of_the_query(service, dtype):
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(getattr(torch, dtype))
    body = safetensors.torch.save({"query": x, "key": x.clone(), "value": x.clone()})
    reply = await service.client.post(URL, content=body, headers={"content-type": BINARY})
    found = safetensors.torch.load(reply.content)["output"]
    wide = x.double().numpy()[None, None]
    expected = torch.from_numpy(oracle.scaled_dot_product((wide, wide, wide)).output[0, 0])
    least = 1e-12 if dtype == "float64" else 1e-5 + (torch.finfo(found.dtype).eps if dtype != "float32" else 0)
    assert found.dtype == x.dtype
    assert (found.double() - expected).abs().max() <= least * max(1.0, float(expected.abs().max()))


@in_service()
async def test_a_request_alone_and_in_company_has_the_same_bits(service):
    bodies = [as_file(inputs("bhld", keys=keys), lse=True) for keys in (1, 4, 5, 9)]
    headers = {"content-type": BINARY}

    async def tensors(body: bytes) -> dict:
        reply = await service.client.post(URL, content=body, headers=headers)
        return safetensors.numpy.load(reply.content)

    alone = [await tensors(body) for body in bodies]
    service.engine.gate.clear()
    together = [asyncio.ensure_future(tensors(body)) for body in bodies for _ in range(3)]
    await asyncio.sleep(0)
    service.engine.gate.set()
    for (one, _), other in zip(itertools.product(alone, range(3)), await asyncio.gather(*together), strict=True):
        assert all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"query": [[[1.0]]]}, 422, "layout_required", "/layout"),
        ({"scale": 0}, 422, "invalid", "/scale"),
        ({"attn_mask": []}, 422, "unknown_field", "/attn_mask"),
        ({"value": [["x"]]}, 422, "bad_dtype", "/value"),
        (
            {"masks": [{"kind": "causal"}], "key": [[1.0, 2.0]], "value": [[1.0]]},
            422,
            "causal_align_required",
            "/masks/0",
        ),
    ],
)
@in_service()
async def test_a_refusal_names_the_code_and_the_field_and_queues_nothing(service, fields, status, code, param):
    body = {"query": [[1.0, 2.0], [3.0, 4.0]], "key": [[1.0, 2.0], [0.0, 1.0]], "value": [[1.0], [2.0]], **fields}
    before = len(service.engine.batches)
    reply = await service.client.post(URL, json=body)
    problem = reply.json()
    assert (reply.status_code, problem["code"], problem["param"]) == (status, code, param)
    assert len(service.engine.batches) == before


@in_service(layers=[])
async def test_a_service_without_layers_is_ready_and_computes(service):
    assert (await service.client.get("/readyz")).status_code == 200
    assert (await service.client.get("/v1/layers")).json() == {"layers": []}
    reply = await service.client.post(URL, json={"query": [[1.0]], "key": [[1.0]], "value": [[2.0]]})
    assert reply.json()["output"] == [[2.0]]


@in_service(layers=[small_layer("small")])
async def test_the_reserved_name_is_no_layer(service):
    body = {"query": [[1.0]]}
    reply = await service.client.post("/v1/layers/sdpa/attend", json=body)
    assert (reply.status_code, reply.json()["code"]) == (404, "layer_not_found")
    assert "/v1/attention" in reply.json()["detail"]


def infer_input(name: str, array: np.ndarray) -> dict:
    return {"name": name, "datatype": "FP32", "shape": list(array.shape), "data": array.ravel().tolist()}


@in_service()
async def test_the_model_sdpa_gives_the_bits_of_the_route(service):
    tensors = {**inputs("bhld"), "past_key": randn(2, 2, 7, 8), "past_value": randn(2, 2, 7, 6), "sinks": randn(4)}
    options = {"scale": 0.7, "softcap": 1.5}
    fields = {"masks": [{"kind": "causal", "align": "bottom_right"}], "lse": True, "present": True}
    expected = await ask(service, tensors, **options, **fields, scores={"stage": "capped"}, weights={"form": "mean"})
    parameters = {
        **options,
        "causal": "bottom_right",
        "lse": True,
        "present": True,
        "scores": "capped",
        "weights": "mean",
    }
    body = {"inputs": [infer_input(*item) for item in tensors.items()], "parameters": parameters}
    reply = await service.client.post("/v2/models/sdpa/infer", json=body)
    assert reply.status_code == 200, reply.text
    found = {output["name"]: output for output in reply.json()["outputs"]}
    assert sorted(found) == sorted(["output", "weights", "scores", "lse", "present_key", "present_value"])
    for name, output in found.items():
        array = np.array(output["data"], np.float32).reshape(output["shape"])
        assert np.array_equal(array, expected[name]), name
    assert "layer_digest" not in reply.json()["parameters"]


@in_service()
async def test_the_model_sdpa_is_listed_described_and_ready(service):
    index = (await service.client.post("/v2/repository/index")).json()
    assert [model["name"] for model in index] == ["cross", "small", "zero", "sdpa"]
    about = (await service.client.get("/v2/models/sdpa")).json()
    assert [tensor["name"] for tensor in about["inputs"]] == ["query", "key", "value"]
    assert (await service.client.get("/v2/models/sdpa/ready")).json() == {"name": "sdpa", "ready": True}
    assert (await service.client.get("/v2/models/sdpa/config")).json()["max_batch_size"] == 0
    assert (await service.client.get("/v2/models/sdpa/stats")).json()["model_stats"][0]["name"] == "sdpa"


@pytest.mark.parametrize(
    ("model", "parameters", "code"),
    [
        ("small", {"scale": 1.0}, "unknown_field"),
        ("sdpa", {"layout": "bld"}, "unknown_field"),
        ("sdpa", {"scale": 0}, "invalid"),
    ],
)
@in_service()
async def test_a_parameter_of_another_model_and_a_wrong_one_are_refused(service, model, parameters, code):
    body = {"inputs": [infer_input(name, randn(1, 1, 1, 4)) for name in ("query", "key", "value")]}
    reply = await service.client.post(f"/v2/models/{model}/infer", json={**body, "parameters": parameters})
    assert reply.status_code == 400
    assert code in reply.json()["error"]


@in_service()
async def test_metrics_and_statistics_count_it_as_a_layer_of_its_own(service):
    await ask(service, inputs("bhld"))
    samples = await service.samples()
    counted = [name for name, value in samples.items() if 'layer="sdpa"' in name and value >= 2]
    assert any("requests" in name for name in counted), counted


@in_service()
async def test_the_client_sends_every_option_and_returns_the_same_bits(service):
    tensors = {**inputs("bhld"), "past_key": randn(2, 2, 7, 8), "past_value": randn(2, 2, 7, 6), "sinks": randn(4)}
    options: dict[str, Any] = {"scale": 0.7, "softcap": 1.5, "lse": True, "entropy": True, "present": True}
    expected = await ask(
        service,
        tensors,
        **options,
        masks=[{"kind": "causal", "align": "bottom_right"}],
        scores={"stage": "capped"},
        weights={"form": "contributions", "heads": [1]},
    )
    async with AsyncClient("http://service", transport=service.transport) as client:
        found = await client.attention(
            **tensors,
            **options,
            masks=[masks.causal("bottom_right")],
            weights=Weights("contributions", heads=[1]),
            scores="capped",
        )
        for name in ("output", "weights", "scores", "lse", "entropy", "present_key", "present_value"):
            assert np.array_equal(getattr(found, name), expected[name]), name
        plain = await client.attention(tensors["query"], tensors["key"], tensors["value"])
        assert (plain.weights, plain.scores, plain.lse, plain.present_key) == (None,) * 4
        with pytest.raises(LayoutRequired):
            await client.attention(*(x[0] for x in inputs("bhld").values()))
