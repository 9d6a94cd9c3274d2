"""Telemetry: each event changes exactly its series."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.api.outer_middleware import RequestRecord
from service.attention.engine import Fingerprint
from service.attention.progress import Progress
from service.batching.job import BatchInfo
from service.errors import LayerError
from service.observability.metrics import Metrics
from service.observability.shared_values import SharedValues
from service.observability.telemetry import Telemetry
from tests.doubles import lone_metrics
from tests.unit.observability.test_metrics import ROUTE, samples

LANE = ("minilm-l0", "sha256:0", "light")
NUMERICS = Fingerprint("AVX2", "2.13.0", 1, "float32", "cpu")


class Readable:
    """Telemetry whose series a test can read by name."""

    def __init__(self):
        self.telemetry = Telemetry(lone_metrics())

    def value(self, name, **labels):
        return samples(self.telemetry.metrics.render()).get((f"attention_{name}", tuple(sorted(labels.items()))))

    def changed_by(self, act):
        before = samples(self.telemetry.metrics.render())
        act(self.telemetry)
        after = samples(self.telemetry.metrics.render())
        return {
            name: value - before.get((name, labels), 0.0)
            for (name, labels), value in after.items()
            if value != before.get((name, labels), 0.0) and not name.endswith("_bucket")
        }


@pytest.fixture
def readable():
    return Readable()


def record(route=ROUTE, status=200, **facts):
    return RequestRecord("id", "POST", "/x", 0.0, route=route, status=status, **facts)


def engine(device_bytes=0):
    options = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    return SimpleNamespace(device_bytes=device_bytes, options=options)


def loaded(seconds):
    return SimpleNamespace(seconds=seconds, is_sequential=False, least_rows=4)


def build(telemetry):
    telemetry.built(NUMERICS, 256, 4096, 2)


def test_a_request_is_counted_once_on_arrival_and_once_at_its_end(readable):
    assert readable.changed_by(lambda t: t.received(record())) == {
        "attention_received_total": 1,
        "attention_in_flight_requests": 1,
    }
    end = record(layer="minilm-l0", queue_s=0.125)
    assert readable.changed_by(lambda t: t.answered(end, 0.25)) == {
        "attention_in_flight_requests": -1,
        "attention_requests_total": 1,
        "attention_request_seconds_count": 1,
        "attention_request_seconds_sum": 0.25,
        "attention_queue_seconds_count": 1,
        "attention_queue_seconds_sum": 0.125,
    }


def test_a_refusal_is_counted_with_its_reason_and_its_time(readable):
    readable.telemetry.received(record())
    changed = readable.changed_by(lambda t: t.answered(record("unmatched", 404, code="not_found"), 0.5))
    assert changed["attention_rejected_total"] == changed["attention_request_seconds_count"] == 1
    assert readable.value("rejected_total", reason="not_found") == 1
    assert readable.value("requests_total", route="unmatched", status="404") == 1


def test_a_cancelled_request_is_no_answer(readable):
    readable.telemetry.received(record())
    assert readable.changed_by(lambda t: t.abandoned(record(stage="queued"), 0.1)) == {
        "attention_cancelled_total": 1,
        "attention_in_flight_requests": -1,
    }


@given(st.lists(st.sampled_from(["answered", "refused", "cancelled"]), max_size=30))
def test_at_rest_received_is_answers_plus_cancelled(ends):
    readable = Readable()
    for _ in ends:
        readable.telemetry.received(record())
    for end in ends:
        if end == "cancelled":
            readable.telemetry.abandoned(record(stage="running"), 0.01)
        else:
            code = "queue_full" if end == "refused" else None
            readable.telemetry.answered(record(status=429 if code else 200, code=code), 0.01)
    found = samples(readable.telemetry.metrics.render())

    def total(name):
        return sum(value for (series, _), value in found.items() if series == name)

    answered, cancelled = total("attention_requests_total"), total("attention_cancelled_total")
    assert total("attention_received_total") == len(ends) == answered + cancelled
    assert total("attention_rejected_total") == ends.count("refused")
    assert total("attention_in_flight_requests") == 0


def test_a_batch_updates_every_series_about_batches(readable):
    batch = BatchInfo(requests=3, sequences=5, tokens=640, weights_bytes=4096)
    assert readable.changed_by(lambda t: t.batch_done(LANE, batch, 0.5)) == {
        "attention_compute_seconds_count": 1,
        "attention_compute_seconds_sum": 0.5,
        "attention_batch_requests_count": 1,
        "attention_batch_requests_sum": 3,
        "attention_batch_sequences_count": 1,
        "attention_batch_sequences_sum": 5,
        "attention_batch_tokens_count": 1,
        "attention_batch_tokens_sum": 640,
        "attention_returned_weights_bytes_total": 4096,
    }


@pytest.mark.parametrize(
    ("act", "name", "value"),
    [
        (lambda t: t.retried_apart(LANE, 2, "ValueError"), "batch_retries_total", 1),
        (lambda t: t.batch_split(LANE, 2), "batch_split_total", 1),
        (lambda t: t.computed(Progress(seconds=0.5)), "compute_busy_seconds_total", 0.5),
        (lambda t: t.computed(Progress(filler_rows=7)), "filler_rows_total", 7),
        (lambda t: t.sample(engine(device_bytes=4096)), "device_memory_bytes", 4096),
        (lambda t: t.queue_changed(4, 0), "queued_requests", 4),
        (lambda t: t.queue_changed(0, 1024), "queued_bytes", 1024),
        (lambda t: t.overload_changed(is_overloaded=True), "queue_standing", 1),
        (lambda t: t.readiness_changed(is_ready=True, num_ready=2), "ready", 1),
        (lambda t: t.readiness_changed(is_ready=True, num_ready=2), "ready_processes", 2),
        (build, "queue_capacity_requests", 256),
        (build, "queue_capacity_bytes", 4096),
        (build, "expected_processes", 2),
        (build, "build_info", 1),
        (lambda t: t.layer_loaded("minilm-l0", loaded(1.5)), "layer_load_seconds", 1.5),
        (lambda t: t.layer_refused("minilm-l0", LayerError("damaged")), "layer_load_failures_total", 1),
        (lambda t: t.layer_not_loaded("no memory", "layer_not_loaded"), "layer_load_failures_total", 1),
        (lambda t: t.answered(record(masked_rows=2), 0.0), "masked_rows_total", 2),
    ],
)
def test_each_event_updates_its_series(readable, act, name, value):
    assert readable.changed_by(act)[f"attention_{name}"] == value


def test_resident_memory_is_that_of_this_process(readable):
    readable.telemetry.sample(engine())
    assert 2**20 < readable.value("process_resident_bytes") < 2**40


def test_a_served_layer_has_its_series_before_its_first_request(readable):
    readable.telemetry.layer_loaded("minilm-l0", loaded(0.1))
    assert readable.value("queue_seconds_count", layer="minilm-l0") == 0
    assert readable.value("compute_seconds_count", layer="minilm-l0") == 0
    assert readable.value("layer_requests_total", layer="minilm-l0", outcome="failure") == 0
    assert readable.value("layer_phase_seconds_total", layer="minilm-l0", phase="encode") == 0
    assert readable.value("layer_batches_total", layer="minilm-l0") == 0


def test_known_reasons_have_their_series_before_the_first_event(readable):
    build(readable.telemetry)
    for reason in ("queue_full", "invalid", "bad_shape", "engine_down", "rate_limited"):
        assert readable.value("rejected_total", reason=reason) == 0
    assert readable.value("rejected_total", reason="rejected") is None, "a branch is no reason"
    assert readable.value("layer_load_failures_total", reason="layer_error") == 0
    assert readable.value("cancelled_total", stage="killed") == 0


def test_health_checks_and_scrapes_are_not_counted():
    records = [RequestRecord("id", "GET", path, 0.0) for path in ("/metrics", "/readyz", "/v1/layers", "/nothing")]
    assert [record.path for record in records if record.is_counted] == ["/v1/layers", "/nothing"]


def received_and_ended(telemetry):
    found = samples(telemetry.metrics.render())
    return {
        name: sum(value for (series, _), value in found.items() if series == f"attention_{name}_total")
        for name in ("received", "requests", "cancelled")
    }


def receive_and_end(telemetry):
    for _ in range(3):
        telemetry.received(record())
    telemetry.answered(record("/r"), 0.1)
    telemetry.abandoned(record(stage="queued"), 0.1)


COUNTED = {"received": 3, "requests": 1, "cancelled": 1}


def test_requests_of_a_loop_tick_are_in_the_files_once_at_its_end_or_at_a_sample(tmp_path):
    async def story():
        telemetry = Telemetry(Metrics(tmp_path, 0))
        receive_and_end(telemetry)
        assert set(received_and_ended(telemetry).values()) == {0}
        telemetry.sample(engine())
        assert received_and_ended(telemetry) == COUNTED
        await asyncio.sleep(0)
        assert received_and_ended(telemetry) == COUNTED
        receive_and_end(telemetry)
        await asyncio.sleep(0)
        assert received_and_ended(telemetry) == {name: 2 * number for name, number in COUNTED.items()}
        telemetry.metrics.values.close()

    asyncio.run(story())


def test_requests_of_an_unfinished_loop_tick_are_counted_at_the_end_of_the_process(tmp_path):
    telemetry = Telemetry(Metrics(tmp_path, 0))

    async def story():
        receive_and_end(telemetry)
        raise SystemExit

    with pytest.raises(SystemExit):
        asyncio.run(story())
    telemetry.metrics.values.close()
    with contextlib.closing(SharedValues(tmp_path, 0)) as found:
        assert {name: found.left[f"attention_{name}_total"] for name in COUNTED} == COUNTED
