"""Series of callers: those with fixed labels pass, and a label that a caller could choose is found."""

import json
from typing import Any

import pytest

from tests.torture.series import made_by_callers


class Answering:
    """A service with one layer, `small`, and one route in its OpenAPI page."""

    def get(self, path: str) -> tuple[int, bytes]:
        pages = {
            "/openapi.json": {"paths": {"/v1/layers/{layer}/attend": {}}},
            "/v1/layers": {"layers": [{"name": "small"}]},
        }
        return 200, json.dumps(pages[path]).encode()


def found(name: str) -> list[str]:
    service: Any = Answering()
    return made_by_callers(service, [name])


@pytest.mark.parametrize(
    "name",
    [
        "attention_received_total",
        'attention_requests_total{route="/v1/layers/{layer}/attend",status="200"}',
        'attention_requests_total{route="unmatched",status="404"}',
        'attention_request_seconds_bucket{le="0.0001",route="/openapi.json"}',
        'attention_layer_requests_total{layer="sdpa",outcome="success"}',
        'attention_layer_phase_seconds_total{layer="small",phase="queue"}',
        'attention_device_memory_bytes{device="cpu"}',
    ],
)
def test_a_series_with_fixed_labels_passes(name):
    assert found(name) == []


@pytest.mark.parametrize(
    "name",
    [
        'attention_requests_total{route="/v1/layers/marked/attend",status="200"}',
        'attention_requests_total{route="unmatched",status="299"}',
        'attention_rejected_total{reason="marked"}',
        'attention_queue_seconds_count{layer="marked"}',
        'attention_queue_seconds_count{layer="small\\",layer=\\"small"}',
        'attention_requests_total{path="marked",route="unmatched",status="404"}',
        'attention_requests_total{caller=""}',
    ],
)
def test_a_label_that_a_caller_could_choose_is_found(name):
    assert found(name) == [name]
