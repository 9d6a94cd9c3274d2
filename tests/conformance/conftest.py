"""One torch thread, as the engine's default is, where a test does not ask for more: bits depend on the number."""

from __future__ import annotations

import io

import pytest

from service.observability.logs import configure_logs
from tests.attention_fixtures import torch_threads
from tests.conformance.attention_route import attention_route


@pytest.fixture(autouse=True)
def one_thread():
    with torch_threads(1):
        yield


@pytest.fixture(scope="module")
def attention(tmp_path_factory):
    """A client of POST /v1/attention on one service, which all tests of a module share."""
    configure_logs("info", io.BytesIO())
    with attention_route(tmp_path_factory.mktemp("attention")) as route:
        yield route
