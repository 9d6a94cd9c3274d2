"""One torch thread, as the engine's default is, where a test does not ask for more: bits depend on the number."""

from __future__ import annotations

import pytest

from tests.engine_room import torch_threads


@pytest.fixture(autouse=True)
def one_thread():
    with torch_threads(1):
        yield
