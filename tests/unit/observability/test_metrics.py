"""Metrics: the values of several processes add up, and survive lost, damaged and missing files."""

import math
import os
import struct
import subprocess
import sys

import pytest
from prometheus_client.parser import text_string_to_metric_families

from service.observability.metrics import TIME_BUCKETS
from service.observability.shared_values import KINDS, RESERVED_BYTES
from tests.doubles import lone_metrics

ROUTE = "/v1/layers/{layer}/attend"


def samples(text):
    """Parse the text of /metrics: (name, labels) → value."""
    families = text_string_to_metric_families(text.decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_times_begin_at_a_hundred_microseconds_and_end_above_the_longest_default_deadline():
    assert TIME_BUCKETS[0] == 1e-4
    assert TIME_BUCKETS[-1] > 10
    assert len(TIME_BUCKETS) == 18


def test_every_series_has_our_prefix_and_its_unit():
    names = {name for name, _ in samples(lone_metrics().render())}
    assert all(name.startswith("attention_") for name in names)
    assert not any(name.endswith("_created") for name in names)


def busy(metrics):
    """Record six layers, with every route and status that has a series."""
    for layer in range(6):
        name = f"minilm-l{layer}"
        metrics.load_seconds.labels(name).set(0.1)
        metrics.compute_seconds.labels(name).observe(0.001)
        for series in (metrics.batch_requests, metrics.batch_sequences, metrics.batch_tokens):
            series.observe(1)
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
                metrics.received.inc()
                metrics.requests.labels(route, str(status)).inc()
                metrics.request_seconds.labels(route).observe(0.01)
                metrics.rejected.labels(f"code_{status}").inc()
                metrics.queue_seconds.labels(name).observe(0.1)


WORKER = """
import sys
from pathlib import Path
from service.api.outer_middleware import LayerTotals
from service.observability.metrics import Metrics
from tests.unit.observability.test_metrics import busy
metrics = Metrics(Path(sys.argv[1]), int(sys.argv[2]))
exec(sys.argv[3])
sys.stdout.buffer.write(metrics.render())
metrics.values.close()
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


FIRST_READY = "metrics.received.inc(); metrics.in_flight.set(1); metrics.ready.set(1); metrics.ready_processes.set(1)"
SECOND_NOT_READY = (
    "metrics.received.inc(2); metrics.in_flight.set(2); metrics.ready.set(0); metrics.ready_processes.set(1)"
)


def test_processes_add_up_and_a_replacement_continues_the_counts_of_the_dead_one(tmp_path):
    run_worker(tmp_path, 0, FIRST_READY)
    run_worker(tmp_path, 1, SECOND_NOT_READY)
    found = samples(run_worker(tmp_path, 0, FIRST_READY))
    assert found["attention_received_total", ()] == 4
    assert found["attention_in_flight_requests", ()] == 3, "a new process begins with its gauges at zero"
    assert found["attention_ready", ()] == 0, "one process that is not ready is enough"
    assert found["attention_ready_processes", ()] == 1, "each process counts all of them, so they do not add up"
    assert found["attention_process_replacements_total", ()] == 1, "the second process in the first slot"
    assert len(list(tmp_path.glob("counter_*.db"))) == 2


COUNTED_IN_A_TICK = """
import asyncio
from service.api.outer_middleware import LayerTotals

async def story():
    metrics.add_layer_totals({"a": LayerTotals(successes=3)})
    assert metrics.layer_totals()["a"].successes == 0, "it is deferred to the end of the tick"
    metrics.values.write()
    assert metrics.layer_totals()["a"].successes == 3

asyncio.run(story())
"""


def test_counts_of_a_loop_tick_can_be_read_before_its_end(tmp_path):
    run_worker(tmp_path, 0, COUNTED_IN_A_TICK)


LEFT_IN_A_TICK = """
import asyncio, os

async def story():
    metrics.compute_busy.inc()
    asyncio.get_running_loop().call_soon({end})
    metrics.received.inc()
    metrics.cancelled.labels("receiving").inc()
    await asyncio.sleep(1)

try:
    asyncio.run(story())
except asyncio.CancelledError:
    pass
"""


def test_a_process_that_exits_in_mid_tick_writes_its_counts(tmp_path):
    run_worker(tmp_path, 0, LEFT_IN_A_TICK.format(end="asyncio.current_task().cancel"))
    assert samples(run_worker(tmp_path, 0, ""))["attention_received_total", ()] == 1


def test_a_process_that_is_killed_in_mid_tick_leaves_its_slot_usable(tmp_path):
    run_worker(tmp_path, 0, LEFT_IN_A_TICK.format(end="os._exit, 0"))
    found = samples(run_worker(tmp_path, 0, "metrics.received.inc()"))
    assert found["attention_received_total", ()] in (1, 2)
    assert found.get(("attention_cancelled_total", (("stage", "killed"),)), 0) == 0


def test_a_replacement_counts_the_unanswered_requests_of_a_killed_process(tmp_path):
    run_worker(tmp_path, 0, "busy(metrics); metrics.received.inc(3); metrics.cancelled.labels('queued').inc()")
    for _ in range(2):
        found = samples(run_worker(tmp_path, 0, ""))
        assert found["attention_cancelled_total", (("stage", "killed"),)] == 2
        assert found["attention_cancelled_total", (("stage", "queued"),)] == 1


def test_a_half_written_file_is_reset(tmp_path):
    run_worker(tmp_path, 0, "metrics.received.inc()")
    path = tmp_path / "counter_0.db"
    path.write_bytes(path.read_bytes()[:12] + b"\xff" * 500)
    assert samples(run_worker(tmp_path, 0, "metrics.received.inc()"))["attention_received_total", ()] == 1


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_file_with_an_impossible_number_is_reset(tmp_path, number):
    run_worker(tmp_path, 0, "metrics.received.inc()")
    path = tmp_path / "counter_0.db"
    path.write_bytes(path.read_bytes().replace(struct.pack("d", 1.0), struct.pack("d", number)))
    assert samples(run_worker(tmp_path, 0, "metrics.received.inc()"))["attention_received_total", ()] == 1


def test_two_busy_processes_stay_within_the_size_limit(tmp_path):
    run_worker(tmp_path, 0, "busy(metrics)")
    text = run_worker(tmp_path, 1, "busy(metrics)")
    assert samples(text)["attention_received_total", ()] == 2 * 420
    assert len(text) <= 256 * 1024


def test_every_file_of_a_process_has_its_space_before_it_is_written_to(tmp_path):
    """A write to a mapped page without disk space raises SIGBUS."""
    run_worker(tmp_path, 0, "busy(metrics); metrics.add_layer_totals({'a': LayerTotals(1, last_answer_s=1.0)})")
    files = [path.stat() for path in tmp_path.iterdir()]
    assert len(files) == 6
    assert all(file.st_blocks * 512 >= file.st_size == RESERVED_BYTES for file in files)


WITHOUT_SPACE = """
import resource
metrics.values.close()
limit, most = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (2**10, most))
metrics = Metrics(Path(sys.argv[1]), 7)
metrics.received.inc()
assert b"attention_received_total 1.0" in metrics.render(), "for itself alone"
try:
    metrics.values.restore()
except OSError as error:
    assert error.strerror == "File too large"
else:
    raise AssertionError("there is no space")
assert not list(Path(sys.argv[1]).glob("*_7.db")), "nothing half made takes space from others"
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
assert metrics.values.restore()
assert not metrics.values.restore()
metrics.received.inc()
"""


def test_without_space_a_process_counts_for_itself_until_there_is_some(tmp_path):
    run_worker(tmp_path, 0, "metrics.received.inc()")
    assert samples(run_worker(tmp_path, 1, WITHOUT_SPACE))["attention_received_total", ()] == 3


MANY_LAYERS = """
import resource
limit, most = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (2**19, most))
for layer in range(200):
    metrics.load_seconds.labels(f"layer-{layer}").set(0.5)
    metrics.queue_seconds.labels(f"layer-{layer}")
assert not metrics.values.restore()
assert b'layer_load_seconds{layer="layer-199"} 0.5' in metrics.render()
Path(sys.argv[1], "counter_0.db").unlink()
try:
    metrics.values.restore()
except OSError:
    assert b'queue_seconds_sum{layer="layer-199"} 0.0' in metrics.render(), "this process has them all"
else:
    raise AssertionError("there is no space for all of them")
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
assert metrics.values.restore()
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
    assert metrics.values.restore()
    assert not metrics.values.restore()
    assert shown() == whole
metrics.received.inc()
"""


def test_lost_files_are_created_again_with_all_counts_of_the_process(tmp_path):
    directory = tmp_path / "metrics"
    directory.mkdir()
    run_worker(directory, 0, LOSSES)
    assert samples(run_worker(directory, 1, ""))["attention_received_total", ()] == 421, "for all to read"


BESIDE_DAMAGED = """
metrics.received.inc()
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
        found = samples(run_worker(tmp_path, 0, "metrics.received.inc()"))
        assert found["attention_received_total", ()] >= 1
