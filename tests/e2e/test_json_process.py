"""The helper process of a worker that parses large JSON bodies: requests do not notice its death, and it ends with its worker."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.integration.running import LAYERS
from tests.processes import eventually, is_alive
from tests.torture.subject import Subject

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
LARGE = json.dumps({"query": [[0.5] * 16] * 20_000}).encode()
TYPE = {"Content-Type": "application/json"}


def helpers(worker: int) -> list[int]:
    """A child belongs to the thread that started it."""
    lists = [path.read_text(encoding="ascii") for path in Path(f"/proc/{worker}/task").glob("*/children")]
    return [int(child) for found in lists for child in found.split()]


@pytest.mark.long
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_helper_process_is_replaced_when_it_dies_and_ends_with_its_worker(tmp_path, signum):
    with Subject(tmp_path, layers=LAYERS, workers=1) as subject:
        (worker,) = subject.pids
        assert helpers(worker) == []
        first = subject.post("/v1/layers/small/attend", LARGE, TYPE)
        assert first[0] in (200, 413)
        (helper,) = helpers(worker)
        os.kill(helper, signal.SIGKILL)
        assert subject.post("/v1/layers/small/attend", LARGE, TYPE)[0] == first[0]
        (helper,) = helpers(worker)
        os.kill(worker, signum)
        eventually(lambda: not is_alive(worker), "the worker has ended")
        eventually(lambda: not is_alive(helper), "so has its helper")
