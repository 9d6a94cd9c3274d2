"""The application is plain ASGI: another server, here uvicorn with its own protocol, serves it with every route working."""

import gzip
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import numpy as np
import pytest
from safetensors.numpy import load, save

from service.api.auth.key_ring import Role, line_for
from tests import processes
from tests.integration import models
from tests.integration.running import ADMIN_KEY, LAYERS, prepare

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

X = np.random.default_rng(1).standard_normal((2, 16)).astype(np.float32)
ATTEND = "/v1/layers/small/attend"
JSON_TYPE = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A service under stock uvicorn; each batch waits 0.5 s for more requests, so that one can be left in the queue."""
    directory: Path = tmp_path_factory.mktemp("plain")
    prepare(directory, [*LAYERS, *models.LAYERS])
    models.store(directory, models.small_model())
    (directory / "keys").write_text(line_for(ADMIN_KEY, Role.ADMIN), encoding="ascii")
    settings = dict(layers_dir=directory / "layers", api_keys_file=directory / "keys", max_wait_ms=500, device="cpu")
    port = processes.free_port()
    command = [sys.executable, "-m", "uvicorn", "--factory", "service.app:create", "--port", str(port)]
    process = subprocess.Popen(command, env=processes.environment(**settings))
    try:
        found = f"http://127.0.0.1:{port}"
        processes.eventually(lambda: processes.is_ready(found), "the service is ready", within_s=60)
        yield found
    finally:
        process.terminate()
        assert process.wait(30) in (0, -15)


@pytest.fixture
def client(url: str) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=url, headers={"x-api-key": ADMIN_KEY}, timeout=30) as found:
        yield found


def test_every_form_of_a_request_has_the_same_answer(client):
    body = json.dumps({"query": X.tolist(), "encoding": "list"}).encode()
    expected = client.post(ATTEND, content=body, headers=JSON_TYPE).json()["output"]
    packed = client.post(ATTEND, content=gzip.compress(body), headers=JSON_TYPE | {"content-encoding": "gzip"})
    assert packed.json()["output"] == expected
    in_parts = client.post(ATTEND, content=iter([body[:9], body[9:]]), headers=JSON_TYPE)
    assert in_parts.json()["output"] == expected
    binary = client.post(ATTEND, content=save({"query": X}), headers={"content-type": "application/vnd.safetensors"})
    assert (load(binary.content)["output"] == np.array(expected, np.float32)).all()
    tensor = {"name": "query", "shape": [1, *X.shape], "datatype": "FP32", "data": X.ravel().tolist()}
    inferred = client.post("/v2/models/small/infer", json={"inputs": [tensor]}).json()["outputs"][0]["data"]
    assert inferred == np.array(expected).ravel().tolist()
    versioned = client.post("/v2/models/small/versions/1/infer", json={"inputs": [tensor]}).json()
    assert versioned["outputs"][0]["data"] == inferred
    assert client.post("/v1/attention", json={"query": X.tolist(), "key": X.tolist(), "value": X.tolist()}).is_success
    assert client.post(ATTEND, json={"query": 1}).json()["code"] == "bad_shape"


def test_every_other_route_answers(client):
    """Those of the API's description, and those that it leaves out."""
    paths = client.get("/openapi.json").json()["paths"]
    names = {"layer": "small", "model": "tiny", "version": "1"}
    described = {path.format(**names) for path, methods in paths.items() if "get" in methods}
    assert {"/healthz", "/v2/models/stats", "/v2/models/small/versions/1/config"} <= described
    others = {"/v2/", "/openapi.json", "/docs", "/docs/errors", "/docs/swagger-ui.css", "/explore"}
    for path in sorted(described | others):
        statuses = [client.request(method, path).status_code for method in ("GET", "HEAD", "OPTIONS")]
        assert statuses == [200, 200, 204], path
    assert client.post("/v2/repository/index").status_code == 200
    root = [client.request(m, "/", headers={"accept": "text/html"}).status_code for m in ("GET", "HEAD", "OPTIONS")]
    assert root == [307, 307, 204]


def test_layers_are_unloaded_and_loaded(client):
    assert client.delete("/v1/layers/zero").status_code == 204
    assert client.get("/v1/layers/zero").status_code == 404
    assert client.put("/v1/layers/zero").status_code == 201
    assert client.put("/v1/layers/zero", headers={"x-api-key": "nobody's"}).status_code == 401


def test_a_disconnect_in_the_queue_ends_the_request(client):
    with pytest.raises(httpx2.ReadTimeout):
        client.post(ATTEND, json={"query": X.tolist()}, timeout=0.1)

    def was_noticed() -> bool:
        found = processes.samples(client.get("/metrics").text)
        return any("cancelled" in name and 'stage="queued"' in name and found[name] for name in found)

    processes.eventually(was_noticed, "the disconnect is noticed in the queue")
