"""Metrics: each event changes exactly its series, and the values of several processes add up."""

import asyncio
import math
import os
import struct
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from service.batching.engine_protocol import BatchEvent
from service.errors import Failed, LayerError, Refused, Rejected, codes_of
from service.events import Answered, Capacity
from service.observability.metrics import Metrics, is_counted
from service.observability.series import TIME_BUCKETS
from service.observability.shared_values import KINDS, RESERVED_BYTES

ROUTE = "/v1/layers/{layer}/attend"


def samples(text):
    """Parse the text of /metrics: (name, labels) → value."""
    families = text_string_to_metric_families(text.decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


class Readable:
    """Metrics whose series a test can read by name."""

    def __init__(self):
        self.metrics = Metrics()

    def value(self, name, **labels):
        return samples(self.metrics.render()).get((f"attention_{name}", tuple(sorted(labels.items()))))

    def changed_by(self, act):
        before = samples(self.metrics.render())
        act(self.metrics)
        after = samples(self.metrics.render())
        return {
            name: value - before.get((name, labels), 0.0)
            for (name, labels), value in after.items()
            if value != before.get((name, labels), 0.0) and not name.endswith("_bucket")
        }


@pytest.fixture
def readable():
    return Readable()


def test_a_request_is_counted_once_on_arrival_and_once_at_its_end(readable):
    assert readable.changed_by(lambda m: m.received()) == {
        "attention_received_total": 1,
        "attention_in_flight_requests": 1,
    }
    end = Answered(ROUTE, 200, 0.25, layer="minilm-l0", queue_s=0.125)
    assert readable.changed_by(lambda m: m.answered(end)) == {
        "attention_in_flight_requests": -1,
        "attention_requests_total": 1,
        "attention_request_seconds_count": 1,
        "attention_request_seconds_sum": 0.25,
        "attention_queue_seconds_count": 1,
        "attention_queue_seconds_sum": 0.125,
    }


def test_a_refusal_is_counted_with_its_reason_and_its_time(readable):
    readable.metrics.received()
    rollout = readable.changed_by(lambda m: m.answered(Answered("unmatched", 404, 0.5, code="not_found")))
    assert rollout["attention_rejected_total"] == rollout["attention_request_seconds_count"] == 1
    assert readable.value("rejected_total", reason="not_found") == 1
    assert readable.value("requests_total", route="unmatched", status="404") == 1


def test_a_cancelled_request_is_no_answer(readable):
    readable.metrics.received()
    assert readable.changed_by(lambda m: m.cancelled("queued")) == {
        "attention_cancelled_total": 1,
        "attention_in_flight_requests": -1,
    }


@given(st.lists(st.sampled_from(["answered", "refused", "cancelled"]), max_size=30))
def test_at_rest_received_is_answers_plus_cancelled(ends):
    readable = Readable()
    for _ in ends:
        readable.metrics.received()
    for end in ends:
        if end == "cancelled":
            readable.metrics.cancelled("running")
        else:
            code = "queue_full" if end == "refused" else None
            readable.metrics.answered(Answered(ROUTE, 429 if code else 200, 0.01, code=code))
    found = samples(readable.metrics.render())

    def total(name):
        return sum(value for (series, _), value in found.items() if series == name)

    answered, cancelled = total("attention_requests_total"), total("attention_cancelled_total")
    assert total("attention_received_total") == len(ends) == answered + cancelled
    assert total("attention_rejected_total") == ends.count("refused")
    assert total("attention_in_flight_requests") == 0


def test_a_batch_updates_every_series_about_batches(readable):
    batch = BatchEvent("lane", requests=3, sequences=5, tokens=640, compute_s=0.5, weights_bytes=4096)
    assert readable.changed_by(lambda m: m.batch_done("minilm-l0", batch)) == {
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
        (lambda m: m.batch_retried(), "batch_retries_total", 1),
        (lambda m: m.batch_split(), "batch_split_total", 1),
        (lambda m: m.engine_worked(0.5, 7), "compute_busy_seconds_total", 0.5),
        (lambda m: m.engine_worked(0.0, 7), "filler_rows_total", 7),
        (lambda m: m.queue_changed(4, 0), "queued_requests", 4),
        (lambda m: m.queue_changed(0, 1024), "queued_bytes", 1024),
        (lambda m: m.queue_stands(is_so=True), "queue_standing", 1),
        (lambda m: m.readiness_changed(is_ready=True, num_ready=2), "ready", 1),
        (lambda m: m.readiness_changed(is_ready=True, num_ready=2), "ready_processes", 2),
        (lambda m: m.sized(Capacity(256, 4096, 2)), "queue_capacity_requests", 256),
        (lambda m: m.sized(Capacity(256, 4096, 2)), "queue_capacity_bytes", 4096),
        (lambda m: m.sized(Capacity(256, 4096, 2)), "expected_processes", 2),
        (lambda m: m.layer_loaded("minilm-l0", 1.5), "layer_load_seconds", 1.5),
        (lambda m: m.layer_load_failed("layer_error"), "layer_load_failures_total", 1),
        (lambda m: m.built("0.1.0", "2.13.0", "cpu", "float32"), "build_info", 1),
        (lambda m: m.device_memory_measured("cuda:0", 4096), "device_memory_bytes", 4096),
        (lambda m: m.answered(Answered(ROUTE, 200, 0.0, masked_rows=2)), "masked_rows_total", 2),
    ],
)
def test_each_event_updates_its_series(readable, act, name, value):
    assert readable.changed_by(act)[f"attention_{name}"] == value


def test_resident_memory_is_that_of_this_process(readable):
    readable.metrics.memory_measured()
    assert 2**20 < readable.value("process_resident_bytes") < 2**40


def test_a_served_layer_has_its_series_before_its_first_request(readable):
    readable.metrics.layer_loaded("minilm-l0", 0.1)
    assert readable.value("queue_seconds_count", layer="minilm-l0") == 0
    assert readable.value("compute_seconds_count", layer="minilm-l0") == 0


def test_known_reasons_have_their_series_before_the_first_event(readable):
    readable.metrics.reasons_known(codes_of(Rejected, Refused, Failed), codes_of(LayerError))
    for reason in ("queue_full", "invalid", "bad_shape", "engine_down", "rate_limited"):
        assert readable.value("rejected_total", reason=reason) == 0
    assert readable.value("rejected_total", reason="rejected") is None, "a branch is no reason"
    assert readable.value("layer_load_failures_total", reason="layer_error") == 0
    assert readable.value("cancelled_total", stage="killed") == 0


def test_health_checks_and_scrapes_are_not_counted():
    assert [path for path in ("/metrics", "/readyz", "/v1/layers", "/nothing") if is_counted(path)] == [
        "/v1/layers",
        "/nothing",
    ]


def test_times_begin_at_a_hundred_microseconds_and_end_above_the_longest_default_deadline():
    assert TIME_BUCKETS[0] == 1e-4
    assert TIME_BUCKETS[-1] > 10
    assert len(TIME_BUCKETS) == 18


def test_every_series_has_our_prefix_and_its_unit(readable):
    names = {name for name, _ in samples(readable.metrics.render())}
    assert all(name.startswith("attention_") for name in names)
    assert not any(name.endswith("_created") for name in names)


def busy(metrics):
    """Record six layers, with every route and status that has a series."""
    for layer in range(6):
        metrics.layer_loaded(f"minilm-l{layer}", 0.1)
        metrics.batch_done(f"minilm-l{layer}", BatchEvent("lane", 1, 1, 16, 0, 0.001))
        for status in (200, 400, 404, 413, 415, 422, 429, 500, 503, 504):
            for route in (
                ROUTE,
                "/v1/attention",
                "/v1/layers",
                "/v1/layers/{layer}",
                "unmatched",
                "/docs",
                "/openapi.json",
            ):
                metrics.received()
                metrics.answered(
                    Answered(route, status, 0.01, code=f"code_{status}", layer=f"minilm-l{layer}", queue_s=0.1)
                )


WORKER = """
import sys
from pathlib import Path
from service.events import LayerTotals
from service.observability.metrics import Metrics
from service.observability.shared_values import Shared
from tests.unit.observability.test_metrics import busy
metrics = Metrics(Shared(Path(sys.argv[1]), int(sys.argv[2])))
exec(sys.argv[3])
sys.stdout.buffer.write(metrics.render())
metrics.close()
"""


def run_worker(directory, slot, code):
    """Run `code` in its own process, because the library shares values by process."""
    done = subprocess.run(
        [sys.executable, "-c", WORKER, str(directory), str(slot), code],
        check=True,
        capture_output=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": "."},
    )
    return done.stdout


def test_processes_add_up_and_a_replacement_continues_the_counts_of_the_dead_one(tmp_path):
    run_worker(tmp_path, 0, "metrics.received(); metrics.readiness_changed(is_ready=True, num_ready=1)")
    run_worker(
        tmp_path, 1, "metrics.received(); metrics.received(); metrics.readiness_changed(is_ready=False, num_ready=1)"
    )
    found = samples(
        run_worker(tmp_path, 0, "metrics.received(); metrics.readiness_changed(is_ready=True, num_ready=1)")
    )
    assert found["attention_received_total", ()] == 4
    assert found["attention_in_flight_requests", ()] == 3, "a new process begins with its gauges at zero"
    assert found["attention_ready", ()] == 0, "one process that is not ready is enough"
    assert found["attention_ready_processes", ()] == 1, "each process counts all of them, so they do not add up"
    assert found["attention_process_replacements_total", ()] == 1, "the second process in the first slot"
    assert len(list(tmp_path.glob("counter_*.db"))) == 2


TOLD_IN_A_TURN = """
import asyncio
from service.events import LayerTotals

async def story():
    metrics.layers_worked({"a": LayerTotals(successes=3)})
    assert metrics.layer_totals()["a"].successes == 0, "it is put off to the end of the turn"
    metrics.tell_now()
    assert metrics.layer_totals()["a"].successes == 3

asyncio.run(story())
"""


def test_counts_of_a_loop_tick_can_be_read_before_its_end(tmp_path):
    run_worker(tmp_path, 0, TOLD_IN_A_TURN)


def test_requests_of_a_loop_tick_are_counted_once_at_its_end_or_at_a_read(tmp_path):
    counted = {"received": 3, "requests": 1, "cancelled": 1}

    def told(metrics):
        found = samples(metrics.render())
        return {
            name: sum(value for (series, _), value in found.items() if series == f"attention_{name}_total")
            for name in counted
        }

    def count(metrics):
        for _ in range(3):
            metrics.received()
        metrics.answered(Answered("/r", 200, 0.1))
        metrics.cancelled("queued")

    async def story():
        metrics = Metrics()
        count(metrics)
        assert set(told(metrics).values()) == {0}
        metrics.tell_now()
        assert told(metrics) == counted
        await asyncio.sleep(0)
        assert told(metrics) == counted
        count(metrics)
        await asyncio.sleep(0)
        assert told(metrics) == {name: 2 * number for name, number in counted.items()}

    asyncio.run(story())


LEFT_IN_A_TURN = """
import asyncio, os

async def story():
    metrics.engine_worked(1.0, 1)  # something else of the same turn is told before
    asyncio.get_running_loop().call_soon({end})
    metrics.received()
    metrics.cancelled("receiving")
    await asyncio.sleep(1)

try:
    asyncio.run(story())
except asyncio.CancelledError:
    pass
"""


def test_a_process_that_exits_in_mid_tick_writes_its_counts(tmp_path):
    run_worker(tmp_path, 0, LEFT_IN_A_TURN.format(end="asyncio.current_task().cancel"))
    assert samples(run_worker(tmp_path, 0, ""))["attention_received_total", ()] == 1


def test_a_process_that_is_killed_in_mid_tick_leaves_its_slot_usable(tmp_path):
    run_worker(tmp_path, 0, LEFT_IN_A_TURN.format(end="os._exit, 0"))
    found = samples(run_worker(tmp_path, 0, "metrics.received()"))
    assert found["attention_received_total", ()] in (1, 2)
    assert found.get(("attention_cancelled_total", (("stage", "killed"),)), 0) == 0


def test_a_replacement_counts_the_unanswered_requests_of_a_killed_process(tmp_path):
    run_worker(tmp_path, 0, "busy(metrics); [metrics.received() for _ in range(3)]; metrics.cancelled('queued')")
    for _ in range(2):
        found = samples(run_worker(tmp_path, 0, ""))
        assert found["attention_cancelled_total", (("stage", "killed"),)] == 2
        assert found["attention_cancelled_total", (("stage", "queued"),)] == 1


def test_a_half_written_file_is_reset(tmp_path):
    run_worker(tmp_path, 0, "metrics.received()")
    path = tmp_path / "counter_0.db"
    path.write_bytes(path.read_bytes()[:12] + b"\xff" * 500)
    assert samples(run_worker(tmp_path, 0, "metrics.received()"))["attention_received_total", ()] == 1


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_file_with_an_impossible_number_is_reset(tmp_path, number):
    run_worker(tmp_path, 0, "metrics.received()")
    path = tmp_path / "counter_0.db"
    path.write_bytes(path.read_bytes().replace(struct.pack("d", 1.0), struct.pack("d", number)))
    assert samples(run_worker(tmp_path, 0, "metrics.received()"))["attention_received_total", ()] == 1


def test_two_busy_processes_stay_within_the_size_limit(tmp_path):
    run_worker(tmp_path, 0, "busy(metrics)")
    text = run_worker(tmp_path, 1, "busy(metrics)")
    assert samples(text)["attention_received_total", ()] == 2 * 420
    assert len(text) <= 256 * 1024


def test_every_file_of_a_process_has_its_space_before_it_is_written_to(tmp_path):
    """A write to a mapped page without disk space raises SIGBUS."""
    run_worker(tmp_path, 0, "busy(metrics); metrics.layers_worked({'a': LayerTotals(1, last_answer_s=1.0)})")
    files = [path.stat() for path in tmp_path.iterdir()]
    assert len(files) == 6
    assert all(file.st_blocks * 512 >= file.st_size == RESERVED_BYTES for file in files)


WITHOUT_SPACE = """
import resource
metrics.close()
limit, most = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (2**10, most))
metrics = Metrics(Shared(Path(sys.argv[1]), 7))
metrics.received()
assert b"attention_received_total 1.0" in metrics.render(), "for itself alone"
try:
    metrics.restore()
except OSError as error:
    assert error.strerror == "File too large"
else:
    raise AssertionError("there is no space")
assert not list(Path(sys.argv[1]).glob("*_7.db")), "nothing half made takes space from others"
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
assert metrics.restore()
assert not metrics.restore()
metrics.received()
"""


def test_without_space_a_process_counts_for_itself_until_there_is_some(tmp_path):
    run_worker(tmp_path, 0, "metrics.received()")
    assert samples(run_worker(tmp_path, 1, WITHOUT_SPACE))["attention_received_total", ()] == 3


MANY_LAYERS = """
import resource
limit, most = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (2**19, most))
for layer in range(200):
    metrics.layer_loaded(f"layer-{layer}", 0.5)
assert not metrics.restore()
assert b'layer_load_seconds{layer="layer-199"} 0.5' in metrics.render()
Path(sys.argv[1], "counter_0.db").unlink()
try:
    metrics.restore()
except OSError:
    assert b'queue_seconds_sum{layer="layer-199"} 0.0' in metrics.render(), "this process has them all"
else:
    raise AssertionError("there is no space for all of them")
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
assert metrics.restore()
"""


def test_series_without_space_end_no_process_and_appear_once_there_is_space(tmp_path):
    run_worker(tmp_path, 0, MANY_LAYERS)
    found = samples(run_worker(tmp_path, 1, ""))
    assert found["attention_queue_seconds_sum", (("layer", "layer-199"),)] == 0
    files = [path.stat() for path in tmp_path.iterdir()]
    assert all(file.st_blocks * 512 >= file.st_size for file in files)
    assert max(file.st_size for file in files) > RESERVED_BYTES


LOSSES = """
import os, shutil
directory = Path(sys.argv[1])
away = directory.parent / "away"
counters, gauges = directory / "counter_0.db", directory / "gauge_livesum_0.db"
busy(metrics)
shown = lambda: sorted(line for line in metrics.render().splitlines() if not line.startswith(b"#"))
whole = shown()
for loss in (
    lambda: shutil.rmtree(directory),
    lambda: directory.rename(away),
    lambda: [path.unlink() for path in directory.iterdir()],
    lambda: counters.unlink(),
    lambda: gauges.rename(away / "gauges"),
    lambda: os.truncate(counters, 0),
    lambda: (gauges.unlink(), gauges.write_bytes(b"x")),
):
    loss()
    assert shown() == whole, "what this process has"
    directory.mkdir(exist_ok=True)
    assert metrics.restore()
    assert not metrics.restore()
    assert shown() == whole
metrics.received()
"""


def test_lost_files_are_created_again_with_all_counts_of_the_process(tmp_path):
    directory = tmp_path / "metrics"
    directory.mkdir()
    run_worker(directory, 0, LOSSES)
    assert samples(run_worker(directory, 1, ""))["attention_received_total", ()] == 421, "for all to read"


BESIDE_DAMAGED = """
metrics.received()
damages = [b"", b"x", bytes([255]) * 4096, bytes([255, 255, 255, 127] * 1024), (b'@' + bytes(3)) * 1024]
for name in ("counter_9.db", "histogram_9.db", "gauge_livesum_9.db", "gauge.db", "nonsense.db"):
    for text in damages:
        Path(sys.argv[1], name).write_bytes(text)
        assert b"attention_received_total 1.0" in metrics.render(), (name, text[:9])
"""


def test_an_unreadable_file_hides_no_other(tmp_path):
    run_worker(tmp_path, 0, BESIDE_DAMAGED)


@pytest.mark.parametrize("size", [0, 100, RESERVED_BYTES // 2])
def test_a_slot_with_truncated_files_is_usable(tmp_path, size):
    run_worker(tmp_path, 0, "busy(metrics)")
    for kind in KINDS:
        os.truncate(tmp_path / f"{kind}_0.db", size)
        found = samples(run_worker(tmp_path, 0, "metrics.received()"))
        assert found["attention_received_total", ()] >= 1
