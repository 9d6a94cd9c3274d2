"""Models: a text in, attention and hidden states out, through a whole service."""

import pytest

from tests.integration.models import LAYERS, store
from tests.integration.running import in_service

TEXT = "The animals."


@pytest.fixture(autouse=True)
def _model(tmp_path):
    store(tmp_path)


def attend(service, **body):
    return service.client.post("/v1/models/tiny/attend", json={"text": TEXT, "layer": 1, **body})


@in_service(layers=LAYERS)
async def test_first(service):
    answer = await attend(service, weights="heads")
    print(answer.status_code, answer.text[:600])
    answer = await service.client.post("/v1/models/tiny/states", json={"text": TEXT, "layers": [2, 0]})
    print(answer.status_code, answer.text[:300])
    print((await service.client.get("/v1/models")).text)
    print((await service.client.get("/v1/models/tiny")).text)
    print((await service.client.get("/v1/models/tini")).text)
    for body in (
        {},
        {"text": "a", "layer": 9},
        {"text": "", "layer": 0},
        {"text": "a" * 500, "layer": 0},
        {"text": "the " * 500, "layer": 0},
        {"tokens": ["the", "foo"], "layer": 0},
        {"tokens": ["the"], "text": "a", "layer": 0},
        {"text_pair": "a", "layer": 0},
        {"text": "a", "layer": 0, "lyer": 1},
        {"text": "a", "layer": 0, "weights": {"form": "heads", "heads": [7]}},
        {"text": "\ud800", "layer": 0},
        {"text": "a", "layer": 0, "masks": [{"kind": "lengths", "values": 0}], "masked_rows": "error"},
        {"text": "a", "layer": True},
        {"tokens": "a", "layer": 1},
        {"tokens": [1] * 100, "layer": 1},
        {"tokens": [], "layer": 1},
    ):
        import json

        answer = await service.client.post(
            "/v1/models/tiny/attend", content=json.dumps(body), headers={"content-type": "application/json"}
        )
        print(str(body)[:60], answer.status_code, answer.text[:400])
