"""Spans of a whole service: the real engine, every way a request can end."""

import asyncio

import opentelemetry.trace
import pytest
from opentelemetry.trace import StatusCode

from tests.integration.running import LAYERS, prepare, running
from tests.spans import Spans

X = {"query": [[0.5] * 16]}
PHASES = ["receive", "decode", "queue", "compute", "send"]


@pytest.fixture
def traced(tmp_path):
    prepare(tmp_path, LAYERS)

    def run(story, **changed):
        async def main():
            spans = Spans()
            async with running(tmp_path, tracer=spans.tracer, **changed) as service:
                await story(service, spans)

        asyncio.run(main())

    return run


V2 = {"inputs": [{"name": "query", "shape": [1, 1, 16], "datatype": "FP32", "data": [0.5] * 16}]}


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/layers/small/attend", X), ("/v2/models/small/infer", V2)], ids=["v1", "v2"]
)
def test_an_answer_has_its_phases_and_its_batch(traced, path, body):
    async def story(service, spans):
        assert (await service.client.post(path, json=body)).status_code == 200
        (request,), (batch,) = spans.requests, spans.batches
        assert request.name == f"POST {path.replace('small', '{layer}')}"
        assert request.attributes["url.path"] == path
        phases = spans.phases(request)
        assert [span.name for span in phases] == PHASES
        edges = [
            request.start_time,
            *(t for span in phases for t in (span.start_time, span.end_time)),
            request.end_time,
        ]
        assert edges == sorted(edges), "one after the other, and within the request"
        assert [link.context for link in request.links] == [batch.context]
        assert batch.attributes["attention.batch.tokens"] == request.attributes["attention.tokens"]

    traced(story)


def test_requests_of_one_batch_link_to_one_span(traced):
    async def story(service, spans):
        service.engine.gate.clear()
        first = asyncio.ensure_future(service.attend(X))
        await service.until(lambda: service.service.batcher.num_running == 1)
        peers = [asyncio.ensure_future(service.attend(X)) for _ in range(2)]
        await service.until(lambda: service.service.batcher.num_queued == 2)
        service.engine.gate.set()
        await asyncio.gather(first, *peers)
        alone, together = spans.batches
        assert [batch.attributes["attention.batch.requests"] for batch in (alone, together)] == [1, 2]
        linked = [request.links[0].context for request in spans.requests]
        assert sorted(context.span_id for context in linked) == sorted(
            [alone.context.span_id, *[together.context.span_id] * 2]
        )

    traced(story)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "name", "phases"),
    [
        ("GET", "/v1/layers", None, 200, "GET /v1/layers", []),
        ("HEAD", "/v1/layers", None, 200, "HEAD /v1/layers", []),
        ("GET", "/v1/layers/nobody", None, 404, "GET /v1/layers/{layer}", []),
        ("GET", "/nothing", None, 404, "GET", []),
        ("OPTIONS", "/v1/layers", None, 204, "OPTIONS", []),
        ("POST", "/v1/layers/small/attend", {"query": [[1]]}, 422, "POST /v1/layers/{layer}/attend", ["receive", "decoding"]),
    ],
)  # fmt: skip
def test_every_request_is_one_span_and_a_refusal_is_no_error(traced, method, path, body, status, name, phases):
    async def story(service, spans):
        answer = await service.client.request(method, path, json=body)
        assert answer.status_code == status
        (request,) = spans.requests
        assert request.name == name
        assert request.attributes["http.response.status_code"] == status
        assert request.attributes["attention.request_id"] == answer.headers["x-request-id"]
        assert request.status.status_code is StatusCode.UNSET
        assert [span.name for span in spans.phases(request)] == phases
        assert not request.links

    traced(story)


def test_an_internal_fault_is_an_error_span(traced):
    async def story(service, spans):
        service.engine.wrong = lambda call: True
        assert (await service.attend(X)).status_code == 500
        (request,) = spans.requests
        assert request.status.status_code is StatusCode.ERROR
        assert request.attributes["error.type"] == "engine_failed"
        assert [span.name for span in spans.phases(request)] == ["receive", "decode", "queued"]
        assert not spans.batches

    traced(story)


def test_a_preflight_is_one_span_too(traced):
    async def story(service, spans):
        asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
        assert (await service.client.options("/v1/layers", headers=asked)).status_code == 200
        assert len(spans.requests) == 1

    traced(story, cors_origins="https://a.example")


def test_fastapi_adds_no_spans_with_a_provider_of_the_process(tmp_path, monkeypatch):
    """It would call every refusal an error without a status, and know nothing of the attention routes."""
    prepare(tmp_path, LAYERS)
    spans = Spans()
    monkeypatch.setattr(opentelemetry.trace, "get_tracer_provider", lambda: spans.provider)

    async def main():
        async with running(tmp_path) as service:
            assert (await service.client.get("/v1/layers")).status_code == 200
            assert not spans.all

    asyncio.run(main())
