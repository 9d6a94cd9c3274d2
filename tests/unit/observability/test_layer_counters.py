"""Layer counters: from single requests to totals over all processes."""

import time

import pytest

from service.api.outer_middleware import LayerTotals, RequestRecord
from service.batching.job import BatchInfo
from service.observability.telemetry import Telemetry
from tests.doubles import lone_metrics
from tests.unit.observability.test_telemetry import engine

PASS = dict(batch=BatchInfo(requests=2, sequences=3, tokens=9), compute_s=0.3)


@pytest.fixture
def telemetry():
    return Telemetry(lone_metrics())


def record(status: int = 200, layer: str | None = "small") -> RequestRecord:
    found = RequestRecord("id", "POST", "/x", 0.0, status=status, layer=layer)
    found.decode_s, found.queue_s, found.compute_s, found.encode_s = 0.1, 0.2, 0.3, 0.4
    return found


def test_requests_and_passes_add_up_once(telemetry, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    telemetry.answered(record(), 1.0)
    telemetry.answered(record(), 2.0)
    telemetry.answered(record(422), 0.5)
    telemetry.batch_done(("small", "light"), **PASS)
    assert telemetry.metrics.layer_totals() == {}, "they are added at the heartbeat"
    for _ in range(2):
        telemetry.sample(engine())
        assert telemetry.metrics.layer_totals() == {
            "small": LayerTotals(
                successes=2, success_s=3.0, failures=1, failure_s=0.5, decode_s=0.2, queue_s=0.4, compute_s=0.6, encode_s=0.8,
                sequences=3, batches=1, last_answer_s=1000.0,
            )
        }  # fmt: skip


def test_a_request_to_no_layer_counts_nowhere(telemetry):
    telemetry.answered(record(404, layer=None), 1.0)
    telemetry.sample(engine())
    assert telemetry.metrics.layer_totals() == {}


def test_totals_equal_the_sum_of_all_deltas(telemetry):
    before = time.time()
    for _ in range(2):
        telemetry.answered(record(), 1.5)
        telemetry.batch_done(("small", "light"), **PASS)
        telemetry.answered(record(500, layer="other"), 1.0)
        telemetry.sample(engine())
    totals = telemetry.metrics.layer_totals()
    assert set(totals) == {"small", "other"}
    assert (totals["small"].successes, totals["small"].success_s) == (2, 3.0)
    assert (totals["small"].sequences, totals["small"].batches) == (6, 2)
    assert (totals["other"].failures, totals["other"].successes) == (2, 0)
    assert totals["small"].last_answer_s >= before
    text = telemetry.metrics.render().decode()
    assert 'attention_layer_requests_total{layer="small",outcome="success"} 2.0' in text
    assert 'attention_layer_phase_seconds_total{layer="small",phase="encode"} 0.8' in text
