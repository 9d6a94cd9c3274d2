"""Keys, roles, rates and origins on a whole service: which requests are admitted, how others are refused, what is counted."""

import asyncio
import itertools

import httpx2
import pytest

from attention_client import AsyncClient
from attention_client.errors import Unauthorized
from service.api.auth.access import ADMIN, METRICS, OPEN
from service.api.auth.key_ring import Role, line_for
from tests import processes
from tests.integration import models
from tests.integration.running import LAYERS, in_service

X = {"query": [[0.5] * 16, [0.25] * 16]}
USER, ROOT = "user-key", "root-key"
BEARER = {"authorization": f"Bearer {USER}"}
PAGES = {"/", "/docs", "/docs/errors", "/docs/{asset}", "/openapi.json", "/explore", "/explore/{file}"}
CLOSED = {
    "/v1/layers",
    "/v1/layers/{layer}/attend",
    "/v2",
    "/v2/models/{layer}/infer",
}


@pytest.fixture
def keys(tmp_path):
    file = tmp_path / "keys"
    write(file, (USER, Role.INFER), (ROOT, Role.ADMIN))
    return file


def write(file, *keys) -> None:
    file.write_text("".join(line_for(secret, role) + "\n" for secret, role in keys))


def routes_of(service) -> set[tuple[str, str]]:
    """Path and method of every route of the application."""
    return set(flat(service.application._routes))


def flat(routes):
    for route in routes:
        if hasattr(route, "original_router"):  # FastAPI's way of keeping an included router
            yield from flat(route.original_router.routes)
        else:
            yield from ((route.path, method) for method in route.methods)


async def on_the_page(service) -> set[tuple[str, str]]:
    page = (await service.client.get("/openapi.json", headers=BEARER)).json()
    return {(path, method.upper()) for path, operations in page["paths"].items() for method in operations}


def filled(path: str) -> str:
    for name, value in {
        "{layer}": "small",
        "{model}": "tiny",
        "{version}": "1",
        "{asset}": "swagger-ui.css",
        "{file}": "explore.css",
    }.items():
        path = path.replace(name, value)
    assert "{" not in path, "a new parameter: give it a value"
    return path


def without_id(answer) -> tuple:
    body = answer.json()
    body.pop("request_id", None)
    headers = {name: value for name, value in answer.headers.items() if name != "x-request-id"}
    headers.pop("content-length")
    return answer.status_code, body, headers


def refused(samples, code: str = "unauthorized") -> tuple[float, float]:
    """How often it stands in requests_total and in rejected_total."""
    status = {"bad_request": 400, "unauthorized": 401, "forbidden": 403, "rate_limited": 429}[code]
    answered = sum(
        value for name, value in samples.items() if name.startswith("attention_requests") and f'"{status}"' in name
    )
    return answered, samples.get(f'attention_rejected_total{{reason="{code}"}}', 0)


def test_A2_every_route_of_the_application_and_of_the_page_needs_a_key_but_the_open_list(served, keys, tmp_path):
    models.store(tmp_path)

    async def story(service):
        found = routes_of(service) | await on_the_page(service)
        assert {path for path, _ in found} >= CLOSED | OPEN | {METRICS}
        for path, method in sorted(found):
            for asked in {method, "HEAD", "OPTIONS", "GET", "POST"}:
                answer = await service.client.request(asked, filled(path))
                assert (answer.status_code == 401) == (path not in OPEN | PAGES), (asked, path)
            with_key = await service.client.request(method, filled(path), headers={**BEARER, "accept": "text/html"})
            assert with_key.status_code in ((403,) if (method, path) in ADMIN else (200, 307, 400, 415)), (method, path)
        for path in (
            "/nothing",
            "/docsx",
            "/explorex",
            "http://service//explore",
            "/openapi.jsonx",
            "/healthz/",
            "http://service//healthz",
            "/%68ealthz%00",
            "/healthz%0a",
        ):
            for method in ("GET", "HEAD", "OPTIONS", "DELETE", "FOO"):
                assert (await service.client.request(method, path)).status_code == 401, (method, path)
        wrong_body = await service.client.post("/v1/layers/nobody/attend", content=b"x" * 5000)
        assert wrong_body.status_code == 401, "the key is checked before anything else of a request"

    served(story, api_keys_file=keys, max_body_bytes=4096, layers=[*LAYERS, *models.LAYERS])


def test_A2_every_changing_route_is_in_the_table_of_admin_routes(served, keys):
    async def story(service):
        changing = {(method, path) for path, method in routes_of(service) if method in ("PUT", "DELETE", "PATCH")}
        assert changing <= set(ADMIN)

    served(story, api_keys_file=keys)


WRONG = {"authorization": f"Basic {USER}"}, [("authorization", f"Bearer {USER}")] * 2, {**BEARER, "x-api-key": ROOT}


@pytest.mark.parametrize("path", ["/v1/layers", "/v2/models/small", "/nothing"])
def test_A1_A5_every_wrong_key_gets_the_same_answer(served, keys, path):
    async def story(service):
        plain = await service.client.get(path)
        assert plain.status_code == 401
        assert plain.headers["www-authenticate"] == "Bearer"
        if path.startswith("/v2"):
            assert set(plain.json()) == {"error"}
        else:
            assert plain.json()["code"] == "unauthorized"
            assert plain.headers["content-type"] == "application/problem+json"
        answers = [await service.client.get(path, headers=headers) for headers in WRONG]
        answers += [await service.client.get(path, params={name: USER}) for name in ("key", "api_key", "x-api-key")]
        assert [without_id(answer) for answer in answers] == [without_id(plain)] * len(answers)
        assert all(USER not in answer.text for answer in answers)
        samples = await metrics(service)
        assert refused(samples) == (len(answers) + 1, len(answers) + 1)
        assert samples["attention_received_total"] == len(answers) + 1
        assert samples["attention_in_flight_requests"] == 0

    served(story, api_keys_file=keys)


async def metrics(service):
    return processes.samples((await service.client.get("/metrics", headers=BEARER)).text)


def test_A8_an_infer_key_may_not_change_layers(served, keys):
    async def story(service):
        for method in ("PUT", "DELETE"):
            answer = await service.client.request(method, "/v1/layers/small", headers=BEARER)
            assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
            assert "www-authenticate" not in answer.headers
            admin = await service.client.request(method, "/v1/layers/small", headers={"x-api-key": ROOT})
            assert admin.status_code not in (401, 403)
        assert refused(await metrics(service), "forbidden") == (2, 2)

    served(story, api_keys_file=keys)


def test_A9_keys_overlap_and_a_removed_one_is_refused_without_a_restart(served, keys, monkeypatch):
    monkeypatch.setattr("service.api.auth.key_ring.CHECK_S", 0.01)

    async def may(service, key: str) -> bool:
        answer = await service.client.get("/v1/layers", headers={"x-api-key": key})
        return bool(answer.status_code == 200)

    async def until(service, key: str, *, is_in: bool) -> None:
        async with asyncio.timeout(5):
            while await may(service, key) != is_in:  # noqa: ASYNC110 (what is waited for is state, not an event)
                await asyncio.sleep(0.005)

    async def story(service):
        assert await may(service, USER)
        await asyncio.to_thread(write, keys, (USER, Role.INFER), ("new", Role.INFER))
        await until(service, "new", is_in=True)
        assert await may(service, USER), "both work"
        await asyncio.to_thread(write, keys, ("new", Role.INFER))
        await until(service, USER, is_in=False)
        assert await may(service, "new")
        await asyncio.to_thread(keys.write_text, "nonsense")
        stale = "attention_api_keys_stale"
        async with asyncio.timeout(5):
            while not (await service.samples())[stale]:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert await may(service, "new"), "the earlier keys stay"
        await asyncio.to_thread(write, keys, (USER, Role.INFER))
        await until(service, USER, is_in=True)
        assert (await service.samples())[stale] == 0

    served(story, api_keys_file=keys, open_metrics=True)


def test_a_bad_keys_file_refuses_the_start(served, keys):
    keys.write_text("\nnonsense here\n")

    async def story(service):
        assert service.refusals == [
            "ATTENTION_API_KEYS_FILE: line 2 is not a SHA-256 digest (64 hex digits) and a role (infer or admin)"
        ]
        assert (await service.client.get("/v1/layers", headers=BEARER)).status_code == 401
        assert (await service.client.get("/healthz")).status_code == 200

    served(story, api_keys_file=keys, wait=False)


@in_service()
async def test_A12_by_default_no_key_is_required_and_admin_is_off(service):
    assert (await service.attend(X)).status_code == 200
    for method in ("PUT", "DELETE"):
        answer = await service.client.request(method, "/v1/layers/small", headers={"x-api-key": ROOT})
        assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
        assert "keys file" in answer.json()["detail"]
    page = (await service.client.get("/openapi.json")).json()
    assert "securitySchemes" not in page["components"]
    plain = await service.attend(X, headers={"origin": "https://app.example"})
    assert not [name for name in plain.headers if name.startswith("access-control")]


def test_A14_the_page_is_off_by_a_setting(served, keys):
    async def story(service):
        for path in ("/docs", "/openapi.json", "/docs/swagger-ui.css"):
            assert (await service.client.get(path)).status_code == 401
            assert (await service.client.get(path, headers=BEARER)).status_code == 404
        for path in ("/redoc", "/debug", "/debug/pprof", "/admin", "/console"):
            assert (await service.client.get(path, headers=BEARER)).status_code == 404

    served(story, api_keys_file=keys, docs=False)


def test_openapi_lists_which_operations_need_a_key(served, keys):
    async def story(service):
        page = (await service.client.get("/openapi.json", headers=BEARER)).json()
        assert set(page["components"]["securitySchemes"]) == {"bearer", "header"}
        for path, operations in page["paths"].items():
            for operation in operations.values():
                assert ("security" in operation) == (path not in OPEN), path
                assert path in OPEN or {"401", "403"} <= set(operation["responses"])

    served(story, api_keys_file=keys)


@pytest.mark.long
def test_R5_ten_thousand_keys_paths_and_ids_make_no_series(served, keys):
    async def story(service):
        async def ask(number: int) -> None:
            headers = {
                "x-api-key": f"key-{number}",
                "x-request-id": f"id-{number}",
                "origin": f"https://{number}.example",
            }
            answer = await service.client.get(f"/v1/layers/layer-{number}", headers=headers)
            assert answer.status_code == 401
            assert answer.headers["x-request-id"] == f"id-{number}"

        await ask(-1)
        before = set(await metrics(service))
        for number in range(10_000):
            await ask(number)
        samples = await metrics(service)
        assert set(samples) == before
        assert refused(samples) == (10_001, 10_001)

    served(story, api_keys_file=keys, rate_limit_per_s=1e6, cors_origins="https://1.example")


def test_one_key_at_its_rate_limit_affects_no_other_key(served, keys):
    async def story(service):
        answers = [await service.client.get("/v1/layers", headers=BEARER) for _ in range(5)]
        assert [answer.status_code for answer in answers] == [200, 200, 429, 429, 429]
        last = answers[-1]
        assert last.json()["code"] == "rate_limited"
        assert 900 < int(last.headers["retry-after"]) <= 1000
        told = await service.client.get("/v2/models/small", headers=BEARER)
        assert (told.status_code, set(told.json())) == (429, {"error"})
        assert told.headers["retry-after"]
        assert (await service.client.get("/v1/layers", headers={"x-api-key": ROOT})).status_code == 200
        for path in (*OPEN, METRICS) * 3:
            assert (await service.client.get(path, headers=BEARER)).status_code == 200
        assert refused(await metrics(service), "rate_limited") == (4, 4)

    served(story, api_keys_file=keys, rate_limit_per_s=0.001, rate_burst=2)


APP = "https://app.example:8443"
PREFLIGHT = {
    "origin": APP,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}
ATTEND = "/v1/layers/small/attend"


def test_a_preflight_from_an_allowed_origin_needs_no_key_and_is_counted(served, keys):
    async def story(service):
        answer = await service.client.options(ATTEND, headers=PREFLIGHT)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == APP
        assert {"POST", "PUT"} <= set(answer.headers["access-control-allow-methods"].split(", "))
        assert {"Authorization", "X-API-Key", "Content-Type"} <= set(
            answer.headers["access-control-allow-headers"].split(", ")
        )
        assert answer.headers["x-request-id"]
        assert answer.headers["cache-control"] == "no-store"
        samples = await metrics(service)
        assert samples["attention_received_total"] == 1
        assert samples['attention_requests_total{route="unmatched",status="200"}'] == 1

    served(story, api_keys_file=keys, cors_origins=f" {APP} , http://localhost:3000")


def test_a_preflight_from_a_forbidden_origin_is_an_ordinary_request(served, keys):
    async def story(service):
        for headers in (
            {"origin": "https://evil.example"},
            {"origin": "null"},
            {"origin": APP + "."},
            {"origin": "https://APP.example:8443"},
            {"access-control-request-method": "FOO"},
            {"access-control-request-headers": "x-unheard-of"},
        ):
            answer = await service.client.options(ATTEND, headers=PREFLIGHT | headers)
            assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized")
            allowed = await service.client.options(ATTEND, headers=PREFLIGHT | headers | BEARER)
            assert (allowed.status_code, allowed.headers["allow"]) == (204, "OPTIONS, POST")
            if "origin" in headers:
                assert "access-control-allow-origin" not in answer.headers
        plain = {name: value for name, value in PREFLIGHT.items() if name != "access-control-request-method"}
        assert (await service.client.options(ATTEND, headers=plain)).status_code == 401

    served(story, api_keys_file=keys, cors_origins=APP)


def test_pages_of_an_allowed_origin_may_read_answers_and_refusals(served, keys):
    async def story(service):
        for headers, status in ((BEARER, 200), ({}, 401), (BEARER | {"content-type": "text/plain"}, 415)):
            answer = await service.client.post(ATTEND, json=X, headers=headers | {"origin": APP})
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == APP
            assert {"X-Request-ID", "Server-Timing", "Retry-After"} <= set(
                answer.headers["access-control-expose-headers"].split(", ")
            )
            assert "access-control-allow-credentials" not in answer.headers
        other = await service.client.post(ATTEND, json=X, headers=BEARER | {"origin": "https://evil.example"})
        assert other.status_code == 200
        assert "access-control-allow-origin" not in other.headers
        assert "Origin" in other.headers["vary"]

    served(story, api_keys_file=keys, cors_origins=APP)


@in_service(cors_origins="*")
async def test_a_star_allows_any_origin(service):
    answer = await service.attend(X, headers={"origin": "https://anything.example"})
    assert answer.headers["access-control-allow-origin"] == "*"
    preflight = await service.client.options(ATTEND, headers=PREFLIGHT)
    assert preflight.headers["access-control-allow-origin"] == "*"


def test_the_python_client_sends_its_key(served, keys):
    async def story(service):
        async with AsyncClient("http://service", api_key=USER, transport=service.transport) as client:
            assert [layer.name for layer in await client.layers()] == ["cross", "small", "zero"]
            assert (await client.attend_json("small", X))["masked_rows"] == 0
        for key in (None, "wrong"):
            async with AsyncClient("http://service", api_key=key, transport=service.transport) as client:
                with pytest.raises(Unauthorized) as refused:
                    await client.layers()
                assert refused.value.status == 401

    served(story, api_keys_file=keys)


EVIL = {"host": "evil.example:8000", "origin": "http://evil.example:8000"}


@in_service()
async def test_D9_a_page_that_names_a_loopback_address_by_its_own_host_is_refused_in_each_form(service):
    for path in ("/v1/layers", "/docs", "/nothing"):
        answer = await service.client.get(path, headers=EVIL)
        assert (answer.status_code, answer.json()["code"]) == (400, "bad_request")
        assert answer.headers["content-type"] == "application/problem+json"
        assert "evil" not in answer.text
    for path in ("/v2/models/small", "/v2/health/live"):
        answer = await service.client.get(path, headers=EVIL)
        assert (answer.status_code, set(answer.json())) == (400, {"error"})
    assert (await service.attend(X, headers=EVIL)).status_code == 400
    samples = await metrics(service)
    assert refused(samples, "bad_request") == (6, 6), "each once, that of health too"
    assert samples["attention_received_total"] == 6
    assert (await service.attend(X, headers={"host": "evil.example"})).status_code == 200
    for host in ("localhost:8000", "127.0.0.1", "[::1]:1"):
        assert (await service.attend(X, headers=EVIL | {"host": host})).status_code == 200


def test_a_refused_request_has_the_route_that_it_would_have_if_it_were_answered(served):
    paths = ("/", "/nothing", "/docs", "/v1/layers", "/v1/layers/small", ATTEND, "/v2/", "/v2/models/small/infer")

    before: dict[str, float] = {}

    async def counted(service, *request, **headers) -> str:
        await service.client.request(*request, headers={"accept": "text/html", **headers})
        after = await metrics(service)
        names = [
            name for name in after if name.startswith("attention_requests_total") and after[name] != before.get(name)
        ]
        before.update(after)
        assert len(names) == 1, (request, names)
        return str(names[0].partition(",status")[0])

    async def story(service):
        before.update(await metrics(service))
        for method, path in itertools.product(("GET", "HEAD", "POST", "PUT", "OPTIONS"), paths):
            answered = await counted(service, method, path)
            assert await counted(service, method, path, **EVIL) == answered, (method, path)
        assert await counted(service, "GET", "/") == 'attention_requests_total{route="/"'

    served(story)


def test_A2_below_the_prefix_of_a_host_the_same_paths_need_a_key_and_the_same_role(served, keys):
    async def story(service):
        transport = httpx2.ASGITransport(app=service.application, root_path="/below")
        async with httpx2.AsyncClient(transport=transport, base_url="http://service") as client:
            for path in ("/healthz", "/docs", "/explore", "/"):
                assert (await client.get(f"/below{path}")).status_code in (200, 307), path
            for path in ("/v1/layers", "/v1/models"):
                assert (await client.get(f"/below{path}")).status_code == 401
            assert (await client.put("/below/v1/layers/small", headers=BEARER)).status_code == 403
            assert (await client.post("/below/v1/layers/small/attend", json=X, headers=BEARER)).status_code == 200
            samples = processes.samples((await client.get("/below/metrics", headers=BEARER)).text)
            assert samples['attention_requests_total{route="/v1/layers/{layer}/attend",status="200"}'] == 1

    served(story, api_keys_file=keys)
