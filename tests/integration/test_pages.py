"""The GET side: layers, metrics, OpenAPI with examples that run, the page that works offline."""

import asyncio
import dataclasses
import re
import sys
import threading
import time
from pathlib import Path

import pytest

from service.api.openapi import pages
from service.layers.catalog import Catalog
from service.observability.metrics import Metrics
from service.worker.service import Service
from tests.integration import models
from tests.integration.models import small_model, store
from tests.integration.running import LAYERS, Running, in_service, prepare, running, small_layer


@in_service()
async def test_layers_name_everything_that_decides_the_bits_of_an_answer(service):
    found = (await service.client.get("/v1/layers")).json()["layers"]
    assert [layer["name"] for layer in found] == ["cross", "small", "zero"]
    cross = (await service.client.get("/v1/layers/cross")).json()
    assert cross == found[0]
    assert (cross["query_width"], cross["key_width"], cross["value_width"]) == (16, 12, 20)
    assert cross["digest"] == LAYERS[1].digest
    assert cross["batching"] == "packed"
    assert set(cross["numerics"]) == {"isa", "torch", "threads", "dtype", "device", "least_rows"}
    assert cross["limits"]["body_bytes"] == 16 * 2**20
    assert found[2]["extra_keys"] == 1
    missing = await service.client.get("/v1/layers/nobody")
    assert (missing.status_code, missing.json()["code"]) == (404, "layer_not_found")


@pytest.fixture
def minilm(tmp_path):
    store(tmp_path, small_model("minilm"))


@pytest.mark.usefixtures("minilm")
@in_service(layers=[*LAYERS, *models.LAYERS])
async def test_every_get_route_of_the_openapi_page_answers_with_its_example_values(service):
    page = (await service.client.get("/openapi.json")).json()
    for path, operations in page["paths"].items():
        given = {x["name"]: x["example"] for x in next(iter(operations.values()))["parameters"] if "name" in x}
        if "get" in operations:
            answer = await service.client.get(path.format(**given))
            assert answer.status_code == 200, (path, answer.text)


MODEL_ROUTES = ("", "/ready", "/config", "/stats", "/infer")


@in_service()
async def test_the_openapi_page_shows_every_route_and_resolves_every_reference(service):
    answer = await service.client.get("/openapi.json")
    page = answer.json()
    assert set(page["paths"]) == {
        "/healthz",
        "/metrics",
        "/readyz",
        "/v1/layers",
        "/v1/layers/{layer}",
        "/v1/attention",
        "/v1/layers/{layer}/attend",
        "/v1/models",
        "/v1/models/{model}",
        "/v1/models/{model}/attend",
        "/v1/models/{model}/states",
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


@in_service()
async def test_the_docs_page_needs_no_other_host(service):
    page = (await service.client.get("/docs")).text
    links = re.findall(r'(?:src|href)="([^"]+)"', page) + re.findall(r"url: '([^']+)'", page)
    assert links
    for link in links:
        assert not link.startswith(("http", "//"))
        assert (await service.client.get("/" + link)).status_code == 200, link
    assert (await service.client.get("/docs/../settings.py")).status_code == 404


@in_service(probe_s=3600)
async def test_metrics_count_requests_batches_and_errors(service):
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


@pytest.mark.parametrize("accept", ["text/html", "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"])
@in_service()
async def test_a_browser_that_opens_the_root_is_led_to_the_explorer(service, accept):
    answer = await service.client.get("/", headers={"accept": accept})
    assert (answer.status_code, answer.headers["location"], answer.headers["vary"]) == (307, "explore", "accept")
    assert (await service.client.head("/", headers={"accept": accept})).status_code == 307


@pytest.mark.parametrize("accept", ["*/*", "application/json"])
@in_service()
async def test_any_other_client_is_led_from_the_root_to_the_page_of_the_api(service, accept):
    for method in ("GET", "HEAD"):
        answer = await service.client.request(method, "/", headers={"accept": accept})
        assert (answer.status_code, answer.headers["location"], answer.headers["vary"]) == (307, "docs", "accept")


@pytest.mark.parametrize("accept", ["*/*", "text/html"])
@pytest.mark.parametrize("method", ["POST", "PUT"])
@in_service()
async def test_the_root_takes_nothing(service, accept, method):
    assert (await service.client.request(method, "/", headers={"accept": accept})).status_code == 404


@pytest.mark.parametrize(
    ("switched_off", "browsers", "others"),
    [({"explore"}, "docs", "docs"), ({"docs"}, "explore", None), ({"docs", "explore"}, None, None)],
    ids=["no explorer", "no documents", "neither"],
)
def test_a_page_that_is_switched_off_is_not_there_and_the_root_leads_to_the_other_or_nowhere(
    served, switched_off, browsers, others
):
    async def story(service):
        for accept, page in {"text/html": browsers, "*/*": others}.items():
            answer = await service.client.get("/", headers={"accept": accept})
            assert (answer.status_code, answer.headers.get("location")) == ((307, page) if page else (404, None))
        for page in ("explore", "docs"):
            answer = await service.client.get(f"/{page}")
            assert answer.status_code == (404 if page in switched_off else 200)

    served(story, **dict.fromkeys(switched_off, False))


def test_a_page_that_is_switched_off_needs_a_key_as_any_path_that_does_not_exist(served):
    async def story(service):
        plain = {"x-api-key": ""}
        assert (await service.client.get("/docs", headers=plain)).status_code == 200
        for path in ("/explore", "/explore/main.js"):
            assert (await service.client.get(path, headers=plain)).status_code == 401

    served(story, admin=True, explore=False)


@in_service()
async def test_the_explorer_needs_no_other_host_and_its_files_keep_to_its_policy(service):
    page = await service.client.get("/explore")
    links = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert links
    for link in links:
        if link.startswith("data:"):
            continue
        assert re.match(r"explore/|docs$", link), "relative to /explore, so that it works under a prefix"
        answer = await service.client.get(f"/{link}")
        assert answer.status_code == 200, link
        own = page.headers["content-security-policy"]
        assert link == "docs" or answer.headers["content-security-policy"] == own
    policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
    assert policy == {
        "default-src": "'self'",
        "img-src": "'self' blob: data:",
        **dict.fromkeys(("object-src", "base-uri", "form-action", "frame-ancestors"), "'none'"),
    }
    assert page.headers["referrer-policy"] == "no-referrer"


@in_service()
async def test_every_module_style_and_picture_of_the_explorer_is_served_with_its_type_and_nothing_else(service):
    types = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
    for file in EXPLORER.iterdir():
        answer = await service.client.get(f"/explore/{file.name}")
        expected = (200, types[file.suffix]) if file.suffix in types else (404, "application/problem+json")
        assert (answer.status_code, answer.headers["content-type"]) == expected
        assert answer.status_code == 404 or answer.content == file.read_bytes()
    for path in (
        "../settings.py",
        "..%2fsettings.py",
        "%2e%2e/settings.py",
        "%2fetc%2fpasswd",
        "",
        "main.js/",
        "a/main.js",
        "%00",
    ):
        answer = await service.client.get(f"http://service/explore/{path}")
        assert answer.status_code == 404, path


EXPLORER = Path(pages.__file__).parents[2] / "explore"
DOCUMENTS = (
    "/explore",
    "/openapi.json",
    "/docs",
    "/docs/swagger-ui-bundle.js",
    "/docs/swagger-ui.css",
    "/docs/favicon.png",
)


class Called:
    """How often a function of the service was called, and whether ever on the thread of the event loop."""

    def __init__(self, monkeypatch, owner, name: str) -> None:
        self.times = 0
        self.is_on_loop = False
        real = getattr(owner, name)

        def call(*args):
            self.times += 1
            self.is_on_loop |= threading.current_thread() is threading.main_thread()
            return real(*args)

        monkeypatch.setattr(owner, name, call)


async def get_many(service: Running, path: str, times: int = 50) -> set[bytes]:
    answers = await asyncio.gather(*(service.client.get(path) for _ in range(times)))
    assert {answer.status_code for answer in answers} == {200}
    return {answer.content for answer in answers}


def test_D5_the_document_is_rendered_once_a_catalog_for_many_requests(served, monkeypatch):
    written = Called(monkeypatch, pages, "write_openapi")

    async def story(service):
        assert len(await get_many(service, "/openapi.json")) == 1
        first = await service.client.get("/openapi.json")
        await service.client.head("/openapi.json")
        assert (written.times, written.is_on_loop) == (1, False)
        for name in ("zero", "cross"):  # the examples are of the first layer
            assert (await service.client.delete(f"/v1/layers/{name}")).status_code == 204
        (content,) = await get_many(service, "/openapi.json")
        assert written.times == 2
        assert b'"example":"small"' in content
        again = await service.client.get("/openapi.json", headers={"if-none-match": first.headers["etag"]})
        assert (again.status_code, again.content) == (200, content)

    served(story, admin=True)


def test_the_document_of_a_wide_layer_takes_little_more_time_than_reading_it(tmp_path):
    """A scrape of the metrics waits for it, in the same thread."""
    width = 8192
    prepare(tmp_path, [small_layer("wide", query_width=width, key_width=width, value_width=width, out_width=width)])

    async def main():
        async with running(tmp_path) as service:
            times = [time.process_time()]
            answer = await service.client.get("/openapi.json")
            times.append(time.process_time())
            assert answer.json()["paths"]
            times.append(time.process_time())
            assert times[1] - times[0] < 8 * (times[2] - times[1])

    asyncio.run(main())


@pytest.mark.parametrize(
    ("known", "status"),
    [
        ("{tag}", 304),
        ("W/{tag}", 304),
        (' "other" ,{tag}', 304),
        ('W/"a, b", W/{tag}, "c"', 304),
        ("*", 304),
        (" * ", 304),
        ('"other"', 200),
        ("{bare}", 200),
        ('"{bare}', 200),
        ('"x{bare}"', 200),
        ("", 200),
        ('""', 200),
    ],
)
@in_service()
async def test_a_client_with_the_current_document_gets_a_304(service, known, status):
    for path in DOCUMENTS:
        whole = await service.client.get(path)
        tag = whole.headers["etag"]
        assert re.fullmatch(r'"[0-9a-f]{32}"', tag)
        headers = {"if-none-match": known.format(tag=tag, bare=tag.strip('"'))}
        for method in ("GET", "HEAD"):
            answer = await service.client.request(method, path, headers=headers)
            assert (answer.status_code, answer.headers["etag"]) == (status, tag)
            assert answer.headers["cache-control"] == "no-cache"
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.content == (whole.content if (method, status) == ("GET", 200) else b"")
            assert ("content-type" in answer.headers) == (status == 200)


@in_service()
async def test_the_tags_of_if_none_match_may_be_in_several_fields(service):
    tag = (await service.client.get("/docs")).headers["etag"]
    fields = [("if-none-match", '"other"'), ("if-none-match", tag)]
    assert (await service.client.get("/docs", headers=fields)).status_code == 304


@in_service()
async def test_only_documents_may_be_cached(service):
    for path in (
        "/v1/layers",
        "/v1/layers/small",
        "/metrics",
        "/healthz",
        "/readyz",
        "/v2",
        "/v2/models/small",
        "/docs/no",
        "/no",
    ):
        answer = await service.client.get(path, headers={"if-none-match": "*"})
        assert answer.status_code != 304
        assert answer.headers["cache-control"] == "no-store"
        assert "etag" not in answer.headers
    for method in ("OPTIONS", "POST"):
        answer = await service.client.request(method, "/openapi.json", headers={"if-none-match": "*"})
        assert (answer.status_code, answer.headers["cache-control"]) in ((204, "no-store"), (405, "no-store"))
    assert (await service.client.get("/openapi.json", headers={"accept-encoding": "gzip"})).status_code == 200


@in_service()
async def test_a_document_has_the_same_bytes_in_every_coding(service):
    for path in DOCUMENTS:
        answers = [
            await service.client.get(path, headers={"accept-encoding": coding}) for coding in ("gzip", "identity")
        ]
        assert not any("content-encoding" in answer.headers for answer in answers)
        assert len({(answer.content, answer.headers["etag"]) for answer in answers}) == 1


def test_the_list_of_layers_is_written_once_a_catalog(served, monkeypatch):
    described = Called(monkeypatch, Service, "describe")

    async def story(service):
        assert len(await get_many(service, "/v1/layers")) == 1
        assert (described.times, described.is_on_loop) == (len(LAYERS), False)
        assert (await service.client.delete("/v1/layers/zero")).status_code == 204
        found = (await service.client.get("/v1/layers")).json()["layers"]
        assert [layer["name"] for layer in found] == ["cross", "small"]

    served(story, admin=True)


@pytest.mark.parametrize(
    ("path", "computed"),
    [("/metrics", "render"), ("/v2/models/stats", "layer_totals"), ("/v2/models/small/stats", "layer_totals")],
)
def test_concurrent_scrapes_share_one_rendering_that_is_never_stale(served, monkeypatch, path, computed):
    calls = Called(monkeypatch, Metrics, computed)

    async def story(service):
        for times in (1, 2):
            assert (await service.attend({"query": [[0.5] * 16]})).status_code == 200
            content = min(await get_many(service, path), key=len)
            assert calls.times <= 2 * times, "one rendering for the first request, and one for all the others"
            told = {b'attention_queue_seconds_count{layer="small"} %d.0' % times, b'"inference_count":%d,' % times}
            assert [text for text in told if text in content], content
        assert not calls.is_on_loop

    served(story, probe_s=3600)


NUM_LAYERS = 200
GETS = (
    *DOCUMENTS, "/v1/layers", "/v1/layers/small", "/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/small",
    "/v2/models/stats", "/v2/models/small/ready", "/v2/models/small/config", "/v2/models/small/stats", "/healthz", "/readyz",
    "/metrics", "/nothing", "/v1/layers/nobody", "/docs/nothing",
)  # fmt: skip
MAX_HOLD_S = 0.005


@pytest.mark.timed
def test_no_request_without_a_body_holds_the_loop(served, monkeypatch):
    """D5: by the processor time of each of the loop's steps, with many layers that have all worked; the least of three rounds,
    each with other layers, since the machine takes its time too.
    """
    held: list[float] = []
    run = asyncio.Handle._run

    def timed(handle):
        started = time.thread_time()
        run(handle)
        held.append(time.thread_time() - started)

    async def ask_everything(service, least):
        monkeypatch.setattr(asyncio.Handle, "_run", timed)
        for path in GETS:
            for method in ("GET", "HEAD", "OPTIONS", "POST"):
                held.clear()
                await asyncio.gather(*(service.client.request(method, path) for _ in range(4)))
                least[method, path] = min(max(held), least.get((method, path), 1.0))
        monkeypatch.setattr(asyncio.Handle, "_run", run)

    async def story(service):
        small = service.service.catalog.get("small")
        least: dict[tuple[str, str], float] = {}
        for number in range(3):
            names = [f"a{number}", "cross", "small", "zero", *(f"l{n:03}" for n in range(NUM_LAYERS))]
            stored = {name: dataclasses.replace(small.stored, name=name) for name in names}
            layers = {name: dataclasses.replace(small, stored=stored[name]) for name in names}
            service.service._registry.catalog = Catalog(layers)
            service.service.telemetry.serving(names, len(names))
            for name in names:
                assert (await service.attend({"query": [[0.5] * 16]}, name)).status_code == 200
            await ask_everything(service, least)
        assert {asked: seconds for asked, seconds in least.items() if seconds > MAX_HOLD_S} == {}

    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.0005)
    try:
        served(story, probe_s=3600, heartbeat_s=60)
    finally:
        sys.setswitchinterval(interval)


@in_service()
async def test_the_type_of_a_problem_leads_to_its_row_on_the_page_of_errors(service):
    for code, body in {
        "unknown_field": {"query": [[0.5] * 16], "is_causal": True},
        "bad_shape": {"query": [[0.5]]},
    }.items():
        problem = (await service.attend(body)).json()
        page, _, row = problem["type"].partition("#")
        found = await service.client.get(page)
        assert (found.status_code, found.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert f'<tr id="{row}"><td><code>{code}</code>' in found.text
