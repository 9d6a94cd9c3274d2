"""Attention without a layer near its limit of scores: many query heads that share one key stay within their bytes."""

import json

import httpx2
import numpy as np
import pytest
import safetensors.numpy

from service.settings import load_settings
from tests.e2e.started import Started
from tests.torture import process_tree

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(120)]

HEADS, WIDTH = 4096, 8
# The copies of one sequence in float32 and a block of scores take less; a copy of each key for each query head takes 8 GiB.
MAX_GROWTH_MIB = 160


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """A service over an empty layer directory."""
    service = Started(tmp_path_factory.mktemp("layers"), workers=1)
    service.wait_ready()
    yield service
    service.end()


def peak_mib(started: Started) -> float:
    return process_tree.peak_bytes(started.line(event="worker_started")["pid"]) / 2**20


@pytest.mark.parametrize(
    ("rows", "value_width", "fields"),
    [
        (1, WIDTH, {}),
        (16, WIDTH, {"masks": [{"kind": "causal", "align": "bottom_right"}]}),
        (16, WIDTH + 1, {}),
        (16, WIDTH, {"softcap": 3.0, "lse": True}),
    ],
    ids=["one-row", "causal", "unequal-widths", "softcap"],
)
def test_4096_heads_that_share_one_key_stay_within_their_bytes(started, rows, value_width, fields):
    limits = load_settings()
    keys = min(limits.max_request_cells // (HEADS * rows), limits.max_request_tokens - rows)
    shapes = {"query": (1, HEADS, rows, WIDTH), "key": (1, 1, keys, WIDTH), "value": (1, 1, keys, value_width)}
    body = safetensors.numpy.save(
        {name: np.zeros(shape, np.float16) for name, shape in shapes.items()}, {"request": json.dumps(fields)}
    )
    before = peak_mib(started)
    reply = httpx2.post(
        f"{started.url}/v1/attention", content=body, headers={"content-type": "application/vnd.safetensors"}, timeout=60
    )
    assert reply.status_code == 200, reply.text
    assert peak_mib(started) - before <= MAX_GROWTH_MIB
