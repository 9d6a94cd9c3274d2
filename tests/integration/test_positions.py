"""Positions, a past and a layer's own masks over HTTP: the same bits and the same refusals in every form."""

import json

import numpy as np
import pytest
import safetensors.numpy

from service.attention.spec import Norm, RelativeBias, Rotary, Window
from tests.integration.forms import (
    BINARY,
    Request,
    answers,
    as_base64,
    as_inference,
    as_safetensors,
    check_same_bits,
    read_json,
)
from tests.integration.running import small_layer

ROTARY = Rotary("half", (1.0, 0.1))
LAYERS = [
    small_layer("small", num_kv_heads=2, rotary=ROTARY, window=Window(None, 0)),
    small_layer(
        "parts",
        rotary=ROTARY,
        norm=Norm("rms", "head", 1e-6),
        relative_bias=RelativeBias(8, 16, is_bidirectional=True),
        window=Window(2, 2),
        softcap=20.0,
        has_sinks=True,
    ),
    small_layer("plain"),
]
RANDOM = np.random.default_rng(44)
PATH = "/v1/layers/small/attend"


def rows(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal((*shape, 16)).astype(np.float32)


def whole(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def past(sequences: int, length: int) -> dict[str, np.ndarray]:
    shape = (sequences, 2, length, 4)
    return {name: RANDOM.standard_normal(shape).astype(np.float32) for name in ("past_key", "past_value")}


CASES = {
    "one sequence": Request(rows(3), places={"positions": whole(5, 6, 7)}),
    "a batch": Request(rows(2, 3), places={"positions": whole(5, 6, 7, 0, 1, 2).reshape(2, 3)}),
    "cross": Request(
        rows(2, 3),
        rows(2, 5),
        places={
            "positions": whole(2, 3, 4, 0, 1, 2).reshape(2, 3),
            "key_positions": whole(*range(5), 1, 1, 1, 2, 3).reshape(2, 5),
        },
    ),
    "past": Request(
        rows(1, 1),
        places={"positions": whole(4)[None], "key_positions": whole(*range(5))[None], **past(1, 4)},
        more={"present": True},
    ),
    "own masks off": Request(rows(1, 3), more={"layer_masks": "none"}),
}


@pytest.mark.parametrize("request_", CASES.values(), ids=CASES)
def test_positions_and_a_past_have_the_same_bits_in_every_form(served, request_):
    async def story(service):
        check_same_bits(await answers(service, request_))

    served(story, layers=LAYERS)


def test_positions_in_their_default_order_change_no_bit(served):
    query = rows(4)

    async def story(service):
        bodies = [{}, {"positions": [0, 1, 2, 3]}, {"key_positions": [0, 1, 2, 3], "positions": [0, 1, 2, 3]}]
        found = [await service.attend({"query": as_base64(query), **body}) for body in bodies]
        assert len({answer.json()["output"]["data"] for answer in found}) == 1
        # Without its own masks and with the same mask of the request a layer gives the same bits.
        masked = {"query": as_base64(query), "layer_masks": "none", "masks": [{"kind": "causal"}]}
        assert (await service.attend(masked)).json()["output"] == found[0].json()["output"]
        free = (await service.attend({"query": as_base64(query), "layer_masks": "none"})).json()["output"]
        assert free != found[0].json()["output"]

    served(story, layers=LAYERS)


def test_a_decoders_step_gives_the_row_of_the_whole_sequence(served):
    """The present of one answer is the past of the next request, also through a file of safetensors."""
    query = rows(5)

    async def story(service):
        full = read_json((await service.attend({"query": as_base64(query), "present": True})).json())
        first = (await service.attend({"query": as_base64(query[:4]), "present": True})).json()
        step = {
            "query": as_base64(query[4:]),
            "past_key": first["present_key"],
            "past_value": first["present_value"],
            "present": True,
            "positions": [4],
            "key_positions": [0, 1, 2, 3, 4],
        }
        answer = (await service.attend(step)).json()
        found = read_json(answer)
        assert np.abs(found["output"] - full["output"][4:]).max() < 1e-5
        for name in ("present_key", "present_value"):
            assert found[name].shape == (2, 5, 4)
            assert np.abs(found[name] - full[name]).max() < 1e-5

    served(story, layers=LAYERS)


def test_a_repeated_header_does_not_repeat_the_positions_or_the_past_of_another_request(served):
    """A template of a safetensors body keeps no tensor."""
    query = rows(1, 1)

    async def story(service):
        async def ask(request, layer):
            path = f"/v1/layers/{layer}/attend"
            answer = await service.client.post(path, content=as_safetensors(request), headers={"content-type": BINARY})
            assert answer.status_code == 200, answer.text
            return safetensors.numpy.load(answer.content)["output"]

        keys = whole(*range(5))[None]
        cached = past(1, 4)
        found = [
            await ask(Request(query, places={"positions": whole(at)[None], "key_positions": keys, **cached}), "small")
            for at in (4, 9, 4)
        ]
        assert (found[0] == found[2]).all()
        assert (found[0] != found[1]).any()
        pasts = [{name: np.concatenate([tensor] * 2, 1) for name, tensor in past(1, 3).items()} for _ in range(2)]
        plain = [await ask(Request(query, places=one), "plain") for one in (pasts[0], pasts[1], pasts[0])]
        assert (plain[0] == plain[2]).all()
        assert (plain[0] != plain[1]).any()

    served(story, layers=LAYERS)


REFUSED = {
    "no positions": ({}, "positions_required", "/positions"),
    "no key positions": ({"positions": whole(0, 1, 2)[None]}, "positions_required", "/key_positions"),
    "negative": ({"positions": whole(0, -1, 2)[None], "key_positions": whole(*range(5))[None]}, "invalid", "/positions"),
    "too few": ({"positions": whole(0, 1)[None], "key_positions": whole(*range(5))[None]}, "bad_shape", "/positions"),
    "too large": (
        {"positions": whole(0, 1, 2)[None], "key_positions": whole(0, 1, 2, 3, 2**24)[None]}, "invalid", "/key_positions",
    ),
    "half a past": ({"past_key": past(1, 2)["past_key"]}, "invalid", "/past_value"),
    "another past": ({name: tensor[:, :1] for name, tensor in past(1, 2).items()}, "bad_shape", "/past_key"),
}  # fmt: skip


@pytest.mark.parametrize(("places", "code", "param"), REFUSED.values(), ids=REFUSED)
def test_positions_are_refused_alike_in_every_form(served, places, code, param):
    request = Request(rows(1, 3), rows(1, 5), places=places)

    async def story(service):
        details = set()
        for content, headers in (
            (json.dumps(request.fields(as_base64)), {"content-type": "application/json"}),
            (as_safetensors(request), {"content-type": BINARY}),
        ):
            answer = await service.client.post(PATH, content=content, headers=headers)
            problem = answer.json()
            assert (answer.status_code, problem["code"], problem["param"]) == (422, code, param)
            details.add(problem["detail"])
        for binary in (True, False):
            content, head = as_inference(request, binary=binary)
            headers = {"inference-header-content-length": str(head)} if binary else {}
            answer = await service.client.post("/v2/models/small/infer", content=content, headers=headers)
            assert answer.status_code == 400
            details.add(answer.json()["error"].removesuffix(f" ({code})"))
        assert len(details) == 1, details
        if code == "positions_required":
            assert "positions 0 to 2 with key_positions 0 to 4 (top left" in details.pop()

    served(story, layers=LAYERS)


def test_a_layer_without_positions_refuses_them_and_takes_layer_masks(served):
    async def story(service):
        body = {"query": as_base64(rows(2))}
        answer = await service.attend({**body, "positions": [0, 1]}, "plain")
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid")
        assert "uses no positions" in answer.json()["detail"]
        outputs = [
            (await service.attend({**body, **more}, "plain")).json()["output"] for more in ({}, {"layer_masks": "none"})
        ]
        assert outputs[0] == outputs[1]

    served(story, layers=LAYERS)


def test_rows_that_see_no_key_of_the_layers_window_are_counted_or_refused(served):
    async def story(service):
        body = {"query": as_base64(rows(3)), "positions": [0, 5, 6], "key_positions": [5, 6, 7]}
        assert (await service.attend(body)).json()["masked_rows"] == 1
        answer = await service.attend({**body, "masked_rows": "error"})
        assert (answer.status_code, answer.json()["code"]) == (422, "masked_row")

    served(story, layers=LAYERS)


def test_a_layer_tells_its_parts_and_a_model_its_optional_inputs(served):
    async def story(service):
        found = {layer["name"]: layer for layer in (await service.client.get("/v1/layers")).json()["layers"]}
        parts = found["parts"]
        assert parts["rotary"] == {
            "layout": "half", "width": 4, "inverse_frequencies": [1.0, 0.1], "attention_factor": 1.0,
        }  # fmt: skip
        assert (parts["norm"]["kind"], parts["norm"]["over"]) == ("rms", "head")
        assert parts["relative_bias"] == {"buckets": 8, "max_distance": 16, "is_bidirectional": True}
        assert (parts["window"], parts["softcap"], parts["has_sinks"]) == ({"left": 2, "right": 2}, 20.0, True)
        assert found["small"]["num_kv_heads"] == 2
        names = ("rotary", "norm", "relative_bias", "window", "softcap", "has_sinks")
        assert [found["plain"][name] for name in names] == [None] * 5 + [False]
        assert (await service.client.get("/v1/layers/parts")).json() == parts
        for name, expected in (("parts", True), ("plain", False)):
            optional = (await service.client.get(f"/v2/models/{name}")).json()["optional_inputs"]
            inputs = {tensor["name"]: tensor for tensor in optional}
            assert {"past_key", "past_value"} <= inputs.keys()
            assert ("positions" in inputs, "key_positions" in inputs) == (expected, expected)
        page = (await service.client.get("/openapi.json")).json()
        examples = page["paths"]["/v1/layers/{layer}/attend"]["post"]["requestBody"]["content"]["application/json"]
        for name, example in examples["examples"].items():
            answer = await service.attend(example["value"], "parts")
            assert answer.is_success or answer.json()["code"] == name, (name, answer.text)
        assert "positions_required" in examples["examples"]

    served(story, layers=LAYERS)
