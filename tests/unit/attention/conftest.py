"""Runs each test with one torch thread, the engine's default: bits depend on the number of threads."""

from __future__ import annotations

import pytest

from tests.attention_fixtures import torch_threads


@pytest.fixture(autouse=True)
def one_thread():
    with torch_threads(1):
        yield
