"""POST /v1/layers/{layer}/attend, from the JSON that goes in to the JSON that comes out."""

import asyncio
import base64
import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from attention_client import AsyncClient, masks
from tests.integration.running import LAYERS, in_service, in_shared_service
from tests.oracle import Lengths, multi_head

RNG = np.random.default_rng(5)
X = RNG.standard_normal((5, 16), np.float32)
SMALL = LAYERS[0]


def rows(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def packed(array: np.ndarray, dtype: str | None = None) -> dict:
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"dtype": dtype or str(array.dtype), "shape": list(array.shape), "data": data}


def unpacked(tensor: dict) -> np.ndarray:
    kinds = {"bfloat16": ml_dtypes.bfloat16}
    return np.frombuffer(base64.b64decode(tensor["data"]), kinds.get(tensor["dtype"], tensor["dtype"])).reshape(
        tensor["shape"]
    )


def oracle(query: np.ndarray, **kwargs):
    """torch.nn.MultiheadAttention with the weights of the layer `small`."""
    mha = torch.nn.MultiheadAttention(16, 4, batch_first=True).eval()
    t = SMALL.tensors
    state = {
        "in_proj_weight": torch.cat([t["query.weight"], t["key.weight"], t["value.weight"]]),
        "in_proj_bias": torch.cat([t["query.bias"], t["key.bias"], t["value.bias"]]),
        "out_proj.weight": t["output.weight"],
        "out_proj.bias": t["output.bias"],
    }
    mha.load_state_dict(state)
    x = torch.from_numpy(query)
    with torch.no_grad():
        return mha(x, x, x, average_attn_weights=False, **kwargs)


@in_service()
async def test_a_sequence_gets_the_result_of_torch(service):
    answer = (await service.attend({"query": X.tolist(), "weights": {"form": "heads"}})).json()
    output, weights = oracle(X)
    assert np.allclose(answer["output"], output, atol=1e-5)
    assert np.allclose(answer["weights"], weights, atol=1e-6)
    assert answer["masked_rows"] == 0
    assert answer["layer"] == {"name": "small", "digest": SMALL.digest}
    assert answer["batch"] == {"requests": 1, "sequences": 1, "tokens": 5}
    assert set(answer["timing_ms"]) == {"decode", "queue", "compute", "total"}
    assert answer["timing_ms"]["total"] >= answer["timing_ms"]["compute"] > 0


@in_service()
async def test_contributions_scores_lse_and_entropy_are_those_of_the_definition(service):
    """Of the first two keys; the third row may attend to nothing. Without weights too, and of some heads and rows."""
    body = {"query": X.tolist(), "masks": [{"kind": "lengths", "values": [2, 2, 0, 2, 2]}]}
    asked = {"scores": {"stage": "masked"}, "lse": True, "entropy": True}
    found = (await service.attend({**body, **asked})).json()
    tensors = {name: tensor.numpy() for name, tensor in SMALL.tensors.items()}
    expected = multi_head(SMALL.spec, tensors, (X[None],) * 3, [Lengths(np.array([[2, 2, 0, 2, 2]]))])
    assert found["weights"] is None
    for name, reference in (("scores", expected.masked), ("lse", expected.lse), ("entropy", expected.entropy)):
        assert np.allclose(np.array(found[name], np.float32), reference[0], atol=1e-5), name
    assert np.array(found["entropy"])[:, 2].tolist() == [0.0] * 4
    plain = (await service.attend(body)).json()
    assert found["output"] == plain["output"]
    assert asked.keys().isdisjoint(plain)
    wanted = {"form": "contributions", "heads": [3, 0], "queries": [4, 2]}
    some = (await service.attend({**body, "weights": wanted})).json()["weights"]
    whole = (await service.attend({**body, "weights": "contributions"})).json()["weights"]
    assert np.allclose(whole, expected.contributions[0], atol=1e-5)
    assert np.array_equal(some, np.array(whole)[[3, 0]][:, [4, 2]])
    assert not np.array(whole)[:, 2].any()
    async with AsyncClient("http://service", transport=service.transport) as client:
        options: dict[str, Any] = {"scores": "masked", "lse": True, "entropy": True, "weights": "contributions"}
        answer = await client.attend("small", X, masks=[masks.lengths([2, 2, 0, 2, 2])], **options)
        for name, listed in {**found, "weights": whole}.items():
            if name in ("weights", *asked):
                assert np.array_equal(getattr(answer, name), np.array(listed, np.float32)), name
        plain = await client.attend("small", X)
        assert (plain.weights, plain.scores, plain.lse, plain.entropy) == (None,) * 4


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_answer_comes_in_the_dtype_of_the_query(served, dtype):
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    x = X.astype(kind)

    async def story(service):
        answer = (await service.attend({"query": packed(x, dtype)})).json()
        assert answer["output"]["dtype"] == dtype
        output, _ = oracle(x.astype(np.float32))
        tolerance = {"float16": 2e-3, "bfloat16": 2e-2}.get(dtype, 1e-5)
        assert np.allclose(unpacked(answer["output"]).astype(np.float32), output, atol=tolerance, rtol=tolerance)

    served(story)


def test_a_batch_of_sequences_is_its_sequences_one_by_one(served):
    batch = rows(3, 4, 16)

    async def story(service):
        whole = (await service.attend({"query": packed(batch), "weights": {"form": "heads"}})).json()
        assert whole["batch"] == {"requests": 1, "sequences": 3, "tokens": 12}
        for b in range(3):
            one = (await service.attend({"query": packed(batch[b]), "weights": {"form": "heads"}})).json()
            assert np.array_equal(unpacked(whole["output"])[b], unpacked(one["output"]))
            assert np.array_equal(unpacked(whole["weights"])[b], unpacked(one["weights"]))

    served(story)


@in_service()
async def test_cross_attention_accepts_keys_and_values_of_other_widths(service):
    body = {"query": rows(3, 16).tolist(), "key": rows(7, 12).tolist(), "value": rows(7, 20).tolist()}
    answer = (await service.attend({**body, "weights": {"form": "mean"}}, "cross")).json()
    assert np.shape(answer["output"]) == (3, 16)
    assert np.shape(answer["weights"]) == (3, 7)
    refused = await service.attend({"query": body["query"]}, "cross")
    assert (refused.status_code, refused.json()["param"]) == (422, "/key")


CAUSAL = np.tril(np.ones((5, 5), bool))


@pytest.mark.parametrize(
    ("mask", "blocked"),
    [
        ({"kind": "causal"}, ~CAUSAL),
        ({"kind": "causal", "align": "bottom_right"}, ~CAUSAL),
        ({"kind": "causal", "offset": 0}, ~CAUSAL),
        ({"kind": "attend", "values": CAUSAL.tolist()}, ~CAUSAL),
        ({"kind": "attend", "values": CAUSAL.astype(int).tolist()}, ~CAUSAL),
        ({"kind": "attend", "values": packed(CAUSAL, "bool")}, ~CAUSAL),
        ({"kind": "ignore", "values": (~CAUSAL).tolist()}, ~CAUSAL),
        ({"kind": "ignore", "values": [[(~CAUSAL).tolist()]][0]}, ~CAUSAL),
        ({"kind": "bias", "values": [["-inf" if b else 0 for b in row] for row in ~CAUSAL]}, ~CAUSAL),
        ({"kind": "lengths", "values": [1, 2, 3, 4, 5]}, ~CAUSAL),
        ({"kind": "window", "right": 0}, ~CAUSAL),
        ({"kind": "window", "left": None, "right": 0, "offset": 0}, ~CAUSAL),
        ({"kind": "lengths", "values": 3}, np.arange(5)[None].repeat(5, 0) >= 3),
        ({"kind": "attend", "values": [True, True, True, False, False]}, np.arange(5)[None].repeat(5, 0) >= 3),
        ({"kind": "window", "left": 1, "right": 1}, np.abs(np.subtract.outer(np.arange(5), np.arange(5))) > 1),
    ],
)
@in_shared_service()
async def test_every_mask_kind_blocks_the_positions_it_names(service, mask, blocked):
    """M7 for every kind."""
    answer = await service.attend({"query": X.tolist(), "masks": [mask], "weights": {"form": "heads"}})
    assert answer.status_code == 200, answer.text
    output, weights = oracle(X, attn_mask=torch.from_numpy(blocked))
    assert np.allclose(answer.json()["output"], output, atol=1e-5)
    assert np.allclose(answer.json()["weights"], weights, atol=1e-6)
    assert (np.array(answer.json()["weights"])[:, blocked] == 0).all()


@in_service()
async def test_a_layer_that_appends_a_column_reports_the_width_and_has_no_masked_rows(service):
    body = {"query": X.tolist(), "masks": [{"kind": "lengths", "values": 0}], "weights": {"form": "heads"}}
    answer = (await service.attend(body, "zero")).json()
    assert np.shape(answer["weights"]) == (4, 5, 6)
    assert (np.array(answer["weights"])[..., 5] == 1).all()
    assert answer["masked_rows"] == 0


@in_service()
async def test_a_selection_of_weights_is_the_slice_of_all_of_them(service):
    async def weights(**wanted):
        return (await service.attend({"query": packed(X), "weights": wanted})).json()["weights"]

    full = unpacked(await weights(form="heads"))
    some = unpacked(await weights(form="heads", heads=[3, 0], queries=[4, 1]))
    assert np.array_equal(some, full[[3, 0]][:, [4, 1]])
    mean = unpacked(await weights(form="mean"))
    assert np.array_equal(unpacked(await weights(form="mean", queries=[2])), mean[[2]])
    assert np.allclose(mean, full.mean(0), atol=1e-7)
    half = unpacked(await weights(form="heads", dtype="float16"))
    assert np.array_equal(half, full.astype(np.float16))
    top = await weights(form="top_k", k=2)
    values, indices, rest = (unpacked(top[name]) for name in ("values", "indices", "rest"))
    assert indices.dtype == np.int32
    assert np.array_equal(values, np.take_along_axis(full, indices, -1))
    assert np.array_equal(values, -np.sort(-full, -1)[..., :2])
    assert np.allclose(rest, 1 - values.sum(-1), atol=1e-6)


def test_requests_of_every_kind_have_the_same_answers_together_and_alone(served):
    """T18, M12."""
    kinds: list[tuple[int, dict]] = [
        (1, {}),
        (7, {"weights": {"form": "heads"}}),
        (30, {"masks": [{"kind": "causal"}]}),
        (3, {"masks": [{"kind": "lengths", "values": 2}]}),
        (12, {"key": packed(rows(5, 16))}),
        (2, {"query": packed(rows(2, 3, 16))}),
        (5, {"query": packed(rows(5, 16).astype(np.float64))}),
    ]
    bodies = [{"query": packed(rows(n, 16)), **extra} for n, extra in kinds]

    async def story(service):
        alone = [(await service.attend(body)).json() for body in bodies]
        service.engine.gate.clear()
        blocker = asyncio.ensure_future(service.attend({"query": packed(X)}))
        await service.until(lambda: service.service.batcher.num_running == 1)
        tasks = [asyncio.ensure_future(service.attend(body)) for body in bodies]
        await service.until(lambda: service.service.batcher.num_queued == len(bodies))
        service.engine.gate.set()
        together = [(await task).json() for task in tasks]
        await blocker
        assert max(answer["batch"]["requests"] for answer in together) >= 6
        for one, shared in zip(alone, together, strict=True):
            assert one["output"] == shared["output"]
            assert one["weights"] == shared["weights"]

    served(story)


def test_an_answer_beyond_a_mebibyte_is_streamed_and_whole(served):
    x = rows(300, 16)

    async def story(service):
        answer = await service.attend({"query": x.tolist(), "weights": {"form": "heads"}})
        assert len(answer.content) > 2**20
        assert "content-length" not in answer.headers
        weights = np.array(json.loads(answer.content)["weights"])
        assert weights.shape == (4, 300, 300)
        assert np.allclose(weights.sum(-1), 1, atol=1e-5)

    served(story)


@in_service()
async def test_an_answer_that_overflows_is_still_json(service):
    huge = np.full((2, 16), 3e38, np.float32)
    as_list = await service.attend({"query": huge.tolist()})
    assert as_list.status_code == 200
    values = {value for row in as_list.json()["output"] for value in row}
    assert {type(value) for value in values} <= {float, str}
    assert values & {"nan", "inf", "-inf"}
    bits = unpacked((await service.attend({"query": packed(huge)})).json()["output"])
    assert not np.isfinite(bits).all()


def test_overflowing_scores_never_count_as_a_masked_row(served):
    """torch's kernel without a mask answers zeros there; a mask that allows everything must not change the answer."""
    x = (X * 1e20).tolist()

    async def story(service):
        plain = (await service.attend({"query": x})).json()
        for mask in ({"kind": "bias", "values": [0.0] * 5}, {"kind": "attend", "values": [True] * 5}):
            assert (await service.attend({"query": x, "masks": [mask]})).json()["output"] == plain["output"]
        assert not np.allclose(np.float32(plain["output"]), SMALL.tensors["output.bias"])
        assert plain["masked_rows"] == 0

    served(story)


@in_service()
async def test_headers_carry_the_id_the_times_and_the_caching_rules(service):
    answer = await service.attend({"query": X.tolist()}, headers={"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    phases = [part.split(";")[0].strip() for part in answer.headers["server-timing"].split(",")]
    assert phases == ["decode", "queue", "compute", "total"]
    assert answer.headers["cache-control"] == "no-store"
