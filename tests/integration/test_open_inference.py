"""The Open Inference Protocol as its text says it, beyond what real clients send."""

import json
import tracemalloc

import pytest

from service.wire.inference_codec import split_inference
from tests.integration.running import in_service, in_shared_service

QUERY = {"name": "query", "datatype": "FP32", "shape": [1, 2, 16], "data": [0.5] * 32}
INFER = "/v2/models/small/infer"


async def infer(service, *inputs: dict, path: str = INFER, **fields):
    body = {"inputs": list(inputs) or [QUERY], **fields}
    return await service.client.post(path, content=json.dumps(body).encode(), headers={"content-type": "text/plain"})


@in_service()
async def test_an_answer_has_the_keys_of_the_protocol_and_the_facts_of_v1(service):
    found = (await infer(service, id="42", model_name="another", unknown=[1])).json()
    assert found["model_name"] == "small"
    assert found["model_version"] == "1"
    assert found["id"] == "42"
    assert found["parameters"]["batch_requests"] == 1
    assert found["parameters"]["masked_rows"] == 0
    assert found["parameters"]["layer_digest"].startswith("sha256:")
    (output,) = found["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("output", "FP32", [1, 2, 16])
    assert len(output["data"]) == 32
    assert "id" not in (await infer(service)).json()
    versioned = await infer(service, path="/v2/models/small/versions/1/infer")
    assert versioned.json()["outputs"] == found["outputs"]


def test_data_may_be_nested_as_its_shape_says_or_flat(served):
    nested = {**QUERY, "data": [[[0.5] * 16] * 2]}

    async def story(service):
        flat = (await infer(service)).json()["outputs"]
        assert (await infer(service, nested)).json()["outputs"] == flat
        wrong: list[object] = [[[0.5] * 16] * 2, [[0.5] * 32], [0.5] * 31, 0.5, "x", None, {}]
        for data in wrong:
            answer = await infer(service, {**QUERY, "data": data})
            assert answer.status_code == 400, data

    served(story)


@in_service()
async def test_weights_are_requested_by_parameter_or_name_and_only_requested_outputs_are_sent(service):
    def names(answer) -> list[str]:
        return [output["name"] for output in answer.json()["outputs"]]

    assert names(await infer(service, parameters={"weights": "mean"})) == ["output", "weights"]
    by_name = await infer(service, outputs=[{"name": "weights"}])
    assert names(by_name) == ["weights"]
    assert by_name.json()["outputs"][0]["shape"] == [1, 4, 2, 2]
    only = await infer(service, outputs=[{"name": "output"}], parameters={"weights": "heads"})
    assert names(only) == ["output"]


@in_service()
async def test_the_flag_of_an_output_overrides_that_of_the_request(service):
    answer = await infer(
        service,
        outputs=[{"name": "output", "parameters": {"binary_data": False}}, {"name": "weights"}],
        parameters={"binary_data_output": True},
    )
    assert answer.headers["content-type"] == "application/octet-stream"
    head = int(answer.headers["inference-header-content-length"])
    output, weights = json.loads(answer.content[:head])["outputs"]
    assert "data" in output
    assert weights["parameters"] == {"binary_data_size": 64}
    assert len(answer.content) == head + 64


def test_parameters_of_stateful_models_are_ignored(served):
    parameters = {"sequence_id": 7, "sequence_start": True, "sequence_end": False, "priority": 1, "timeout": 5_000_000}

    async def story(service):
        assert (await infer(service, parameters=parameters)).status_code == 200

    served(story)


@pytest.mark.parametrize(
    ("inputs", "fields", "words"),
    [
        ([{**QUERY, "name": "input0"}], {}, 'unknown input "input0" in inputs'),
        ([{**QUERY, "name": "attn_mask"}], {}, 'here it is "attend_mask" (true: may attend)'),
        ([{**QUERY, "name": "key_padding_mask"}], {}, 'here it is "ignore_mask" with the parameter'),
        ([{**QUERY, "name": "Q"}], {}, 'here it is "query"'),
        ([{**QUERY, "name": "hidden_states"}], {}, 'here it is "query"'),
        ([QUERY, QUERY], {}, "twice"),
        ([QUERY] * 100, {}, "at most 16"),
        ([{**QUERY, "shape": [2, 16]}], {}, "must be [B, L, d]"),
        ([{**QUERY, "shape": [1, 2, 16.0]}], {}, "whole number"),
        ([{**QUERY, "shape": [1, -2, 16]}], {}, "the shape of query must be whole numbers of at least 1"),
        ([{**QUERY, "shape": [1, 0, 2]}], {}, "the shape of query must be whole numbers of at least 1"),
        ([{**QUERY, "shape": "x"}], {}, "must be a list"),
        ([{**QUERY, "datatype": "FP16"}], {}, "has no JSON form"),
        ([{**QUERY, "datatype": "BYTES"}], {}, "must be one of FP16, BF16, FP32, FP64"),
        ([{**QUERY, "datatype": 5}], {}, "must be a string"),
        ([{**QUERY, "parameters": {"binary_data_size": 128}}], {}, "either data or binary_data_size"),
        ([{**QUERY, "data": None}], {}, "either data or binary_data_size"),
        ([{**QUERY, "parameters": {"shared_memory_region": "x"}}], {}, "shared memory"),
        ([{**QUERY, "data": None, "parameters": {"binary_data_size": 128}}], {}, "the body has only 0 left"),
        ([{**QUERY, "data": None, "parameters": {"binary_data_size": 127}}], {}, "need, got 127"),
        ([{**QUERY, "data": None, "parameters": {"binary_data_size": -1}}], {}, "must be a number of bytes"),
        ([{**QUERY, "data": None, "parameters": {"binary_data_size": 10**400}}], {}, "must be a number of bytes"),
        ([QUERY], {"outputs": [{"name": "logits"}]}, "unknown output"),
        ([QUERY], {"outputs": [{"name": "output"}] * 2}, "twice"),
        ([QUERY], {"outputs": [{"name": "output"}] * 4000}, "at most 16"),
        ([QUERY], {"outputs": [{"name": "output", "parameters": {"binary_data": 1}}]}, "true or false"),
        ([QUERY], {"outputs": [{"name": "output", "parameters": {"classification": 2}}]}, "not supported"),
        ([QUERY], {"parameters": {"causal_mask": "top_left"}}, 'unknown parameter "causal_mask" in parameters'),
        ([QUERY], {"parameters": {"is_causal": True}}, 'here it is "causal": "top_left"'),
        ([QUERY], {"parameters": {"need_weights": True}}, 'here it is "weights": "mean"'),
        ([QUERY], {"parameters": {"causal": True}}, "must be one of 'top_left' or 'bottom_right'"),
        ([QUERY], {"parameters": {"weights": "top_k"}}, "must be one of 'heads', 'mean' or 'contributions'"),
        ([{**QUERY, "name": "x" * 3000}], {}, "unknown input"),
        ([{**QUERY, "datatype": "x" * 3000}], {}, "must be one of"),
        ([QUERY], {"parameters": {"timeout": -5}}, "at least 0"),
        ([QUERY], {"parameters": {"timeout": "5"}}, "whole number"),
        ([QUERY], {"parameters": 5}, "must be an object"),
        ([QUERY], {"id": 5}, "must be a string"),
        ([QUERY], {"id": "\ud800"}, "id"),
        ([QUERY], {"id": "x" * 257}, "at most 256"),
        ([QUERY], {"id": "x" * 100_000}, "at most 256"),
        ([QUERY], {"id": "\ud800" * 200 + "é" * 9000}, "id"),
        ([QUERY], {"id": "€😀" * 9000}, "at most 256"),
        ([{"name": "attend_mask", "datatype": "BOOL", "shape": [1, 2], "data": [1, 1]}], {}, "query is required"),
        (
            [QUERY, {"name": "attend_mask", "datatype": "BOOL", "shape": [2], "data": [1, 2]}],
            {},
            "attend_mask has a number other than 0 and 1",
        ),
        ([QUERY, {"name": "lengths", "datatype": "INT64", "shape": [2], "data": [1, 2]}], {}, "lengths must be"),
    ],
)
@in_shared_service()
async def test_an_error_is_one_sentence_in_the_form_of_the_protocol(service, inputs, fields, words):
    answer = await infer(service, *inputs, **fields)
    assert answer.status_code == 400, answer.text
    assert list(answer.json()) == ["error"]
    assert words in answer.json()["error"]
    assert len(answer.content) < 1000


@pytest.mark.parametrize("microseconds", [0, None, 10**6, 2**63 - 1, 10**18, 10**400])
@in_service()
async def test_a_timeout_is_capped_by_the_request_deadline(service, microseconds):
    assert (await infer(service, parameters={"timeout": microseconds})).status_code == 200


@pytest.mark.parametrize("microseconds", ["1" + "0" * 5000, "1e5", "1e400", "-1", "NaN"])
@in_shared_service()
async def test_a_timeout_that_is_no_number_of_microseconds_is_refused(service, microseconds):
    body = json.dumps({"inputs": [QUERY], "parameters": {"timeout": 0}}).replace(
        '"timeout": 0', f'"timeout": {microseconds}'
    )
    answer = await service.client.post(INFER, content=body)
    assert answer.status_code == 400, answer.text
    assert len(answer.content) < 500
    assert "000000" not in answer.text


@in_shared_service()
async def test_an_id_of_any_text_is_returned(service):
    for text in ("", "é", "\u0000", "😀" * 256, '"\\\n'):
        assert (await infer(service, id=text)).json()["id"] == text
        raw = json.dumps({"inputs": [QUERY], "id": text}, ensure_ascii=False)
        assert (await service.client.post(INFER, content=raw)).json()["id"] == text


@pytest.mark.parametrize("length", ["-1", "x", "1e3", "9" * 50, "", "99999999", "0", "0" * 5000])
@in_shared_service()
async def test_an_impossible_length_of_the_json_is_refused(service, length):
    """B2."""
    headers = {"inference-header-content-length": length}
    answer = await service.client.post(INFER, content=json.dumps({"inputs": [QUERY]}), headers=headers)
    assert answer.status_code == 400
    assert "error" in answer.json()


@in_service()
async def test_leading_zeros_of_the_length_of_the_json_are_ignored(service):
    content = json.dumps({"inputs": [QUERY]})
    headers = {"inference-header-content-length": "0" * 5000 + str(len(content))}
    answer = await service.client.post(INFER, content=content, headers=headers)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("num_json", [None, 2**20, 2**20 - 8])
def test_a_body_that_is_mostly_json_is_not_copied(num_json):
    """It was copied twice: 16 MiB of JSON took 48."""
    body = bytearray(b"{" * 2**20)
    tracemalloc.start()
    try:
        text, rest = split_inference(body, None if num_json is None else str(num_json).encode())
        assert tracemalloc.get_traced_memory()[1] < 2**12
    finally:
        tracemalloc.stop()
    assert text is body
    assert len(text) + len(rest) == 2**20


@in_service()
async def test_every_route_under_v2_answers_errors_in_the_form_of_the_protocol(service):
    for method, path, status in (
        ("GET", "/v2/nowhere", 404),
        ("GET", "/v2/models/nobody", 404),
        ("GET", "/v2/models/nobody/config", 404),
        ("GET", "/v2/models/small/versions/2", 404),
        ("DELETE", "/v2/models/small", 405),
        ("GET", INFER, 405),
        ("POST", "/v2/models/nobody/infer", 404),
        ("POST", "/v2/models/small/versions/7/infer", 404),
        ("POST", INFER, 400),
        ("GET", "/v2/systemsharedmemory/status", 404),
        ("POST", "/v2/repository/models/small/load", 404),
    ):
        answer = await service.client.request(method, path)
        assert answer.status_code == status, path
        assert list(answer.json()) == ["error"], path
        assert answer.headers["content-type"] == "application/json"


@in_service()
async def test_an_unready_server_is_live(service):
    assert (await service.client.get("/v2/health/ready")).json() == {"ready": True}
    service.service.begin_drain()
    live = await service.client.get("/v2/health/live")
    assert (live.status_code, live.json()) == (200, {"live": True})
    for path in ("/v2/health/ready", "/v2/models/small/ready"):
        answer = await service.client.get(path)
        assert answer.status_code == 503
        assert answer.json() == {"error": "draining (not_ready)"}


@in_service(queue_capacity=1)
async def test_a_full_queue_is_503_as_the_clients_of_the_protocol_expect(service):
    import asyncio

    service.engine.gate.clear()
    running = asyncio.ensure_future(infer(service))
    await service.until(lambda: service.service.batcher.num_running > 0)
    waiting = asyncio.ensure_future(infer(service))
    await service.until(lambda: service.service.batcher.num_queued > 0)
    refused = await infer(service)
    assert refused.status_code == 503
    assert "queue" in refused.json()["error"]
    assert int(refused.headers["retry-after"]) >= 1
    service.engine.gate.set()
    assert (await running).status_code == (await waiting).status_code == 200


@in_service()
async def test_a_deadline_of_the_request_is_kept(service):
    service.engine.gate.clear()
    answer = await infer(service, parameters={"timeout": 20_000})
    assert answer.status_code == 504
    assert "error" in answer.json()
    service.engine.gate.set()


@in_service()
async def test_statistics_count_requests_sequences_and_passes(service):
    three = {**QUERY, "shape": [3, 2, 16], "data": [0.5] * 96}
    assert (await infer(service, three)).status_code == 200
    assert (await infer(service, {**QUERY, "shape": [1, 2, 15]})).status_code == 400
    (stats,) = (await service.client.get("/v2/models/small/stats")).json()["model_stats"]
    assert (stats["name"], stats["version"]) == ("small", "1")
    assert (stats["inference_count"], stats["execution_count"]) == (3, 1)
    assert stats["last_inference"] > 1_700_000_000_000
    counts = {name: told["count"] for name, told in stats["inference_stats"].items()}
    assert (counts["success"], counts["fail"], counts["compute_infer"], counts["cache_hit"]) == (1, 1, 1, 0)
    every = (await service.client.get("/v2/models/stats")).json()["model_stats"]
    assert {told["name"] for told in every} == {"small", "cross", "zero", "sdpa"}


@in_service()
async def test_a_model_whose_widths_differ_needs_its_keys_and_values(service):
    found = (await service.client.get("/v2/models/cross")).json()
    assert [(x["name"], x["shape"]) for x in found["inputs"]] == [
        ("query", [-1, -1, 16]),
        ("key", [-1, -1, 12]),
        ("value", [-1, -1, 20]),
    ]
    config = (await service.client.get("/v2/models/cross/config")).json()
    assert [x["name"] for x in config["input"]] == ["query", "key", "value"]
    assert config["dynamic_batching"] == {}, "0 would deny ATTENTION_MAX_WAIT_MS"
