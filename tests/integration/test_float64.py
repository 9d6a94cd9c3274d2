"""A float64 request is float64 all the way: output, weights, scores and lse, on every route and in every form."""

import base64
import json
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from attention_client import AsyncClient, Weights
from attention_client import masks as kinds
from tests import oracle
from tests.attention_fixtures import as_arrays
from tests.integration.running import LAYERS, Running, in_service

RNG = np.random.default_rng(11)
SMALL = LAYERS[0]
X = RNG.standard_normal((2, 5, 16))
Q, K, V = (RNG.standard_normal((2, 4, n, 8)) for n in (3, 5, 5))
CAUSAL = {"masks": [{"kind": "causal", "align": "bottom_right"}]}
ATTENTION = oracle.scaled_dot_product((Q, K, V), [oracle.Causal(2)])
LAYER_OUTPUT, LAYER_WEIGHTS = oracle.multi_head_attention(
    SMALL.spec, as_arrays(SMALL.tensors), (X, X, X), [oracle.Causal(0)]
)


def packed(array: np.ndarray) -> dict[str, Any]:
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"dtype": str(array.dtype), "shape": list(array.shape), "data": data}


def near(found: Any, expected: np.ndarray) -> bool:
    """Whether it is float64 and off by 1e-12 of the largest number at most."""
    if isinstance(found, dict):
        found = np.frombuffer(base64.b64decode(found["data"]), found["dtype"]).reshape(found["shape"])
    is_finite = np.isfinite(expected)
    least = 1e-12 * max(1.0, np.abs(expected[is_finite]).max())
    return found.dtype == np.float64 and np.allclose(found, expected, rtol=0, atol=least)


async def attention(service: Running, query: np.ndarray = Q, **fields: Any) -> dict[str, Any]:
    body = {"query": packed(query), "key": packed(K), "value": packed(V), **CAUSAL, **fields}
    reply = await service.client.post("/v1/attention", json=body)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


@pytest.mark.parametrize("dtype", [{}, {"dtype": "float64"}], ids=["by default", "asked for"])
def test_attention_agrees_with_float64_in_every_part(served, dtype):
    async def story(service):
        for stage in ("scaled", "masked"):
            wanted: dict[str, Any] = {
                "weights": {"form": "heads", **dtype},
                "scores": {"stage": stage, **dtype},
                "lse": True,
            }
            found = await attention(service, **wanted)
            assert near(found["output"], ATTENTION.output)
            assert near(found["weights"], ATTENTION.weights)
            assert near(found["scores"], getattr(ATTENTION, stage))
            assert near(found["lse"], ATTENTION.lse)
        mean = (await attention(service, weights={"form": "mean", **dtype}))["weights"]
        assert near(mean, ATTENTION.weights.mean(1))
        top = (await attention(service, weights={"form": "top_k", "k": 2, **dtype}))["weights"]
        values, indices, rest = oracle.top_k(ATTENTION.weights, 2)
        assert near(top["values"], values)
        assert near(top["rest"], rest)
        assert top["indices"]["dtype"] == "int32"
        assert base64.b64decode(top["indices"]["data"]) == indices.astype(np.int32).tobytes()

    served(story)


@in_service()
async def test_a_layer_agrees_with_float64_in_json_and_in_safetensors(service):
    fields = {"masks": [{"kind": "causal", "align": "top_left"}], "weights": "heads"}
    found = (await service.attend({"query": packed(X), **fields})).json()
    file = safetensors.numpy.save({"query": X}, {"request": json.dumps(fields)})
    reply = await service.client.post(
        "/v1/layers/small/attend", content=file, headers={"content-type": "application/vnd.safetensors"}
    )
    for answer in (found, safetensors.numpy.load(reply.content)):
        assert near(answer["output"], LAYER_OUTPUT)
        assert near(answer["weights"], LAYER_WEIGHTS)


@in_service()
async def test_the_open_inference_protocol_declares_and_sends_float64(service):
    inputs = [
        {"name": name, "shape": list(array.shape), "datatype": "FP64", "data": array.ravel().tolist()}
        for name, array in (("query", Q), ("key", K), ("value", V))
    ]
    parameters = {"causal": "bottom_right", "weights": "heads", "scores": "masked", "lse": True}
    for is_binary in (False, True):
        body = {"inputs": inputs, "parameters": {**parameters, "binary_data_output": is_binary}}
        reply = await service.client.post("/v2/models/sdpa/infer", json=body)
        head = int(reply.headers.get("inference-header-content-length", len(reply.content)))
        outputs, rest = json.loads(reply.content[:head])["outputs"], reply.content[head:]
        assert {one["name"]: one["datatype"] for one in outputs} == dict.fromkeys(
            ("output", "weights", "scores", "lse"), "FP64"
        )
        for one in outputs:
            expected = getattr(ATTENTION, {"scores": "masked"}.get(one["name"], one["name"]))
            if is_binary:
                size = one["parameters"]["binary_data_size"]
                values, rest = np.frombuffer(rest[:size]), rest[size:]
            else:
                values = np.array(one["data"], np.float64)
            assert near(values.reshape(one["shape"]), expected), one["name"]


@in_service()
async def test_the_client_returns_float64(service):
    async with AsyncClient("http://service", transport=service.transport) as client:
        for weights in ("heads", Weights(dtype="float64")):
            found = await client.attention(
                Q, K, V, masks=[kinds.causal("bottom_right")], weights=weights, scores="masked", lse=True
            )
            assert near(found.output, ATTENTION.output)
            assert near(found.weights, ATTENTION.weights)
            assert near(found.scores, ATTENTION.masked)
            assert near(found.lse, ATTENTION.lse)
        one = await client.attend("small", X, masks=[kinds.causal()], weights="heads")
        assert near(one.output, LAYER_OUTPUT)
        assert near(one.weights, LAYER_WEIGHTS)


@in_service()
async def test_a_query_of_another_dtype_has_float32_and_may_not_ask_for_float64(service):
    """Its key and value are float64, but the query decides what the service computes in."""
    single = Q.astype(np.float32)
    found = await attention(service, single, weights={"form": "heads"}, scores={"stage": "masked"}, lse=True)
    assert [found[name]["dtype"] for name in ("output", "weights", "scores", "lse")] == ["float32"] * 4
    for name, wanted in (("weights", {"form": "heads"}), ("scores", {"stage": "scaled"})):
        body = {"query": packed(single), "key": packed(K), "value": packed(V), name: {**wanted, "dtype": "float64"}}
        refused = (await service.client.post("/v1/attention", json=body)).json()
        assert (refused["status"], refused["code"], refused["param"]) == (422, "invalid", f"/{name}/dtype")
        assert refused["detail"] == (
            f"{name}.dtype must be float32 or float16 unless query is float64: the {name} are computed in float32"
        )
    half = await attention(service, weights={"form": "heads", "dtype": "float16"})
    assert half["weights"]["dtype"] == "float16"


def test_float64_weights_count_eight_bytes(served):
    query = np.repeat(Q, 2, axis=2)
    need = 2 * 4 * 6 * 5 * 8

    async def ask(service):
        body = {"query": packed(query), "key": packed(K), "value": packed(V), "weights": "heads"}
        return await service.client.post("/v1/attention", json=body)

    async def is_answered(service):
        assert (await ask(service)).status_code == 200

    async def is_refused(service):
        reply = await ask(service)
        assert reply.status_code == 413
        assert f"needs {need:,} bytes of returned weights" in reply.json()["detail"]

    served(is_answered, max_weights_bytes=need)
    served(is_refused, max_weights_bytes=need - 1)
