"""One service for all tests that only ask, `url`, and services of a test's own, which `serve` starts and ends."""

import contextlib

import pytest

from tests.e2e.started import Started
from tests.integration.models import small_model, store
from tests.integration.running import LAYERS, prepare, small_layer

MINILM = dict(
    **dict.fromkeys(("query_width", "key_width", "value_width", "out_width"), 384),
    **dict.fromkeys(("num_heads", "num_kv_heads"), 12),
    **dict.fromkeys(("head_width", "value_head_width"), 32),
)


@pytest.fixture(scope="session")
def url(tmp_path_factory):
    """A service of small layers, and of a model and layers of the names and widths that the pages of docs/ speak of."""
    directory = tmp_path_factory.mktemp("service")
    layers = [small_layer(f"minilm-l{n}", **MINILM) for n in range(4)]
    prepare(directory, [*LAYERS, *layers])
    store(directory, small_model("minilm", layers, max_tokens=64))
    service = Started(directory / "layers", workers=1)
    service.wait_ready()
    yield service.url
    service.end()


@pytest.fixture
def serve(tmp_path):
    """Start services over `tmp_path / "layers"` or another directory, each of which ends with the test."""
    prepare(tmp_path, LAYERS)
    with contextlib.ExitStack() as stack:

        def start(directory=tmp_path / "layers", *, kind=Started, **settings):
            service = kind(directory, **settings)
            stack.callback(service.end)
            return service

        yield start
