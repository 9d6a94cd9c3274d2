"""The API page in a real browser: Authorize, and the examples by "Try it out"."""

import json
import shutil
import subprocess
from pathlib import Path

import httpx2
import pytest

from service.api.auth.key_ring import Role, line_for
from tests.contract.test_error_table import CONTRACT
from tests.e2e.started import Started
from tests.integration.models import small_model, store
from tests.integration.running import LAYERS, prepare, small_layer

ROOT = Path(__file__).parents[2]
MODULES = ROOT / ".npm-browser" / "node_modules"
KEY = "a-key-for-the-page"
OPERATIONS = {
    "attend": "/v1/layers/{layer}/attend",
    "attention": "/v1/attention",
    "infer": "/v2/models/{layer}/infer",
    "attend_text": "/v1/models/{model}/attend",
    "states": "/v1/models/{model}/states",
}
MISSING = [name for name in ("chromium", "node") if shutil.which(name) is None]

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        bool(MISSING) or not (MODULES / "playwright-core").exists(),
        reason="no browser or no driver: apt-get install chromium nodejs npm, make install-browser",
    ),
]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """A service that wants a key."""
    directory = tmp_path_factory.mktemp("page")
    layers = [small_layer(f"minilm-l{n}") for n in range(4)]
    prepare(directory, [*LAYERS, *layers])
    store(directory, small_model("minilm", layers, max_tokens=64))
    (directory / "keys").write_text(line_for(KEY, Role.INFER), encoding="ascii")
    service = Started(directory / "layers", workers=1, api_keys_file=directory / "keys")
    try:
        service.wait_ready()
        yield service.url
    finally:
        service.end()


def opened(url: str, most: int, timeout_s: float) -> dict:
    """What the browser saw with the first `most` examples of each operation."""
    program, chromium = ROOT / "tests" / "e2e" / "browser" / "docs_page.mjs", shutil.which("chromium") or ""
    ran = subprocess.run(
        ["node", program, MODULES, chromium, url, KEY, str(most), *OPERATIONS],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    seen: dict = json.loads(ran.stdout)
    return seen


def examples(url: str) -> list[tuple[str, str]]:
    paths = httpx2.get(f"{url}/openapi.json").json()["paths"]
    return [
        (operation, name)
        for operation, path in OPERATIONS.items()
        for name in paths[path]["post"]["requestBody"]["content"]["application/json"]["examples"]
    ]


@pytest.mark.long
@pytest.mark.timeout(180)
def test_authorize_opens_what_needs_a_key(url):
    seen = opened(url, 1, 170)
    assert seen["title"].startswith("attention-service")
    assert seen["tags"] == 6
    assert seen["faults"] == []
    assert seen["hosts"] == [url.removeprefix("http://")], "the page fetches nothing from another host"
    assert seen["without_key"] == 401
    assert [(tried["id"], tried["status"]) for tried in seen["tried"]] == [(operation, 200) for operation in OPERATIONS]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_every_example_of_the_page_gives_a_200_or_the_status_of_its_error(url):
    seen = opened(url, 1000, 390)
    assert [(tried["id"], tried["name"]) for tried in seen["tried"]] == examples(url)
    wrong = [tried for tried in seen["tried"] if tried["status"] != CONTRACT.get(tried["name"], 200)]
    assert wrong == []
    assert seen["faults"] == []
