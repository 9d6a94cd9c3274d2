"""The GET side: layers, metrics, OpenAPI with examples that run, the page that works offline."""

import re
from typing import Any

from tests.integration.running import LAYERS


def test_layers_tell_what_an_answer_depends_on(served):
    async def story(service):
        found = (await service.client.get("/v1/layers")).json()["layers"]
        assert [layer["name"] for layer in found] == ["cross", "small", "zero"]
        cross = (await service.client.get("/v1/layers/cross")).json()
        assert cross == found[0]
        assert (cross["query_width"], cross["key_width"], cross["value_width"]) == (16, 12, 20)
        assert cross["digest"] == LAYERS[1].digest
        assert cross["batching"] == "packed"
        assert set(cross["numerics"]) == {"isa", "torch", "threads", "dtype", "device"}
        assert cross["limits"]["body_bytes"] == 16 * 2**20
        assert found[2]["extra_keys"] == 1
        missing = await service.client.get("/v1/layers/nobody")
        assert (missing.status_code, missing.json()["code"]) == (404, "layer_not_found")

    served(story)


def test_the_examples_of_the_openapi_page_run_as_they_stand(served):
    async def story(service):
        page = (await service.client.get("/openapi.json")).json()
        operation = page["paths"]["/v1/layers/{layer}/attend"]["post"]
        layer = operation["parameters"][0]["example"]
        examples = operation["requestBody"]["content"]["application/json"]["examples"]
        assert len(examples) >= 4
        for example in examples.values():
            answer = await service.attend(example["value"], layer)
            assert answer.status_code == 200, answer.text

    served(story)


def test_every_get_route_of_the_openapi_page_answers_with_its_example_values(served):
    async def story(service):
        page = (await service.client.get("/openapi.json")).json()
        for path, operations in page["paths"].items():
            given = {x["name"]: x["example"] for x in next(iter(operations.values())).get("parameters", [])}
            if "get" in operations:
                answer = await service.client.get(path.format(**given))
                assert answer.status_code == 200, (path, answer.text)
            for name, example in _examples(operations).items():
                answer = await service.client.post(path.format(**given), json=example["value"])
                assert answer.status_code == 200, (path, name, answer.text)

    served(story)


def _examples(operations: dict) -> Any:
    return (
        operations.get("post", {})
        .get("requestBody", {})
        .get("content", {})
        .get("application/json", {})
        .get("examples", {})
    )


MODEL_ROUTES = ("", "/ready", "/config", "/stats", "/infer")


def test_the_openapi_page_shows_every_route_and_resolves_every_reference(served):
    async def story(service):
        answer = await service.client.get("/openapi.json")
        page = answer.json()
        assert set(page["paths"]) == {
            "/healthz",
            "/metrics",
            "/readyz",
            "/v1/layers",
            "/v1/layers/{layer}",
            "/v1/layers/{layer}/attend",
            "/v2",
            "/v2/health/live",
            "/v2/health/ready",
            "/v2/models/stats",
            "/v2/repository/index",
            *(f"/v2/models/{{layer}}{x}{y}" for x in ("", "/versions/{version}") for y in MODEL_ROUTES),
        }
        names = set(re.findall(r'"#/components/schemas/(\w+)"', answer.text))
        assert names <= set(page["components"]["schemas"])
        statuses = set(page["paths"]["/v1/layers/{layer}/attend"]["post"]["responses"])
        assert {"200", "400", "404", "413", "415", "422", "429", "503", "504"} <= statuses

    served(story)


def test_the_docs_page_needs_nothing_from_elsewhere(served):
    async def story(service):
        page = (await service.client.get("/docs")).text
        links = re.findall(r'(?:src|href)="([^"]+)"', page) + re.findall(r"url: '([^']+)'", page)
        assert links
        for link in links:
            assert not link.startswith(("http", "//"))
            assert (await service.client.get("/" + link)).status_code == 200, link
        assert (await service.client.get("/docs/../settings.py")).status_code == 404

    served(story)


def test_docs_can_be_turned_off(served):
    async def story(service):
        assert (await service.client.get("/docs")).status_code == 404
        assert (await service.client.get("/openapi.json")).status_code == 404

    served(story, docs=False)


def test_metrics_tell_what_happened(served):
    async def story(service):
        body = {"query": [[0.5] * 16] * 3, "weights": {"form": "heads"}, "masks": [{"kind": "lengths", "values": 0}]}
        assert (await service.attend(body)).status_code == 200
        answer = await service.client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert len(answer.content) < 256 * 1024
        samples = await service.samples()
        route = "/v1/layers/{layer}/attend"
        assert samples[f'attention_requests_total{{route="{route}",status="200"}}'] == 1
        assert samples[f'attention_request_seconds_count{{route="{route}"}}'] == 1
        assert samples['attention_queue_seconds_count{layer="small"}'] == 1
        assert samples['attention_compute_seconds_count{layer="small"}'] == 1
        assert samples["attention_returned_weights_bytes_total"] == 4 * 3 * 3 * 4
        assert samples["attention_masked_rows_total"] == 3
        assert samples["attention_batch_tokens_sum"] == 3
        assert samples["attention_filler_rows_total"] > 0
        assert samples["attention_ready"] == 1
        assert samples["attention_process_resident_bytes"] > 2**20
        assert samples['attention_device_memory_bytes{device="cpu"}'] > 0
        assert not any("readyz" in name or "healthz" in name for name in samples)

    served(story, probe_s=3600)
