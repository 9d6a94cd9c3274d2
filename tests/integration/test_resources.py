"""What callers cannot make grow: metric series, the page of metrics, files left behind (group R of the catalogue)."""

import asyncio
import weakref

import numpy as np
import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families
from safetensors.numpy import save

from tests.integration.running import in_service

X = [[0.5] * 16]
INPUT = {"name": "query", "datatype": "FP32", "shape": [1, 1, 16], "data": X[0]}
NUM_CALLERS = 200
MAX_PAGE_BYTES = 256 * 1024


def test_invented_names_create_no_series_R5(served):
    async def one(service, i: int) -> None:
        await service.client.get(f"/nowhere/{i}")
        await service.client.get(f"/v1/layers/nobody-{i}")
        await service.attend({"query": X}, f"nobody-{i}", headers={"x-request-id": f"caller-{i}"})
        await service.client.post(f"/v2/models/nobody-{i}/infer", json={"id": f"id-{i}"}, headers={"x-api-key": f"{i}"})
        await service.attend({"query": X, f"field-{i}": i})

    async def story(service):
        await one(service, -1)
        before = (await service.samples()).keys()
        for i in range(NUM_CALLERS):
            await one(service, i)
        assert (await service.samples()).keys() == before

    served(story)


@in_service()
async def test_the_metrics_page_is_small_and_parses_R11(service):
    for body in ({"query": X}, {}, {"query": 1}, {"query": X, "more": 1}, {"query": [X[0][:3]]}):
        await service.attend(body)
    answer = await service.client.get("/metrics")
    assert len(answer.content) <= MAX_PAGE_BYTES
    families = list(text_string_to_metric_families(answer.text))
    assert len(families) > 10
    assert all(family.name.startswith("attention_") for family in families)


def test_a_thousand_failures_leave_no_file_behind_R7(served, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def found() -> list[str]:
        return sorted(str(path) for path in tmp_path.rglob("*") if path.is_file())

    async def story(service):
        await service.attend({})
        before = found()
        for i in range(250):
            for body in (
                {},
                {"query": "x"},
                {"query": X, "masks": [{"kind": "causal", "offset": "1"}]},
                {"query": [[i]]},
            ):
                assert (await service.attend(body)).status_code == 422
        assert found() == before

    served(story)


@pytest.mark.parametrize(
    ("path", "kind", "body"),
    [
        ("/v1/layers/small/attend", "application/json", orjson.dumps({"query": X})),
        ("/v1/layers/small/attend", "application/vnd.safetensors", save({"query": np.array(X, np.float32)})),
        ("/v2/models/small/infer", "application/json", orjson.dumps({"inputs": [INPUT]})),
    ],
    ids=["JSON", "safetensors", "Open Inference"],
)
@in_service()
async def test_a_slow_reader_of_an_answer_keeps_no_tensor_of_its_request(service, path, kind, body):
    queries: list[weakref.ref] = []
    service.engine.wrong = lambda call: queries.append(weakref.ref(call.query))
    answered, reads = asyncio.Event(), asyncio.Event()
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])
    scope = {"type": "http", "method": "POST", "path": path, "headers": [(b"content-type", kind.encode())]}

    async def receive():
        return next(messages, None) or await asyncio.Event().wait()

    async def send(message):
        if message["type"] == "http.response.start":
            assert message["status"] == 200
            answered.set()
            await reads.wait()

    call = service.transport.app({**scope, "query_string": b"", "root_path": ""}, receive, send)
    answer = asyncio.create_task(call)
    await answered.wait()
    await service.until(lambda: queries[-1]() is None)
    reads.set()
    await answer
