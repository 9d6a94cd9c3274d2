"""Sweeps: how throughput and latency go with one thing at a time: callers, processes, length, batch, offered load.

Laws: a sweep is one round of a part; its point goes with each sample; only the service is swept, and the bound where the
length is; refused requests (a full queue says so at once) are told beside the throughput, which counts answers only.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from prometheus_client.multiprocess import MultiProcessCollector

from benchmarks.bench import Bench
from benchmarks.open_loop import LATEST_S, Arrivals
from benchmarks.results import Sample
from benchmarks.running import Running
from benchmarks.subjects import BOUND, SERVICE, Subject, service
from benchmarks.table import CONCURRENCY
from benchmarks.workloads import W1, W2, of_length
from benchmarks.wrk import Load, run_wrk

Point = tuple[str, Sample]
CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
PROCESSES = (1, 2, 3, 4)
LENGTHS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
BATCHES = (1, 2, 4, 8, 16, 32)
# Of what a closed loop of 32 callers gets answered.
OFFERED = (0.1, 0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.2)
EVENNESS = (4, 8, 32, 128)
EVENNESS_TRIES = 3
# Rows under way at most: more would wait longer than the service lets a queue stand, and refusals are not the cost of length.
_MAX_ROWS = 2**12


def concurrency(bench: Bench, _: Sequence[str]) -> Iterator[Point]:
    """1 to 512 callers."""
    for running in _started(bench, service()):
        for work in (W1, W2):
            for num in CONCURRENCIES:
                yield "concurrency", bench.sample(running, work, Load(num, bench.options.sweep_seconds), num)


def processes(bench: Bench, _: Sequence[str]) -> Iterator[Point]:
    """1 to 4 processes, whatever the number of cores."""
    for num in PROCESSES:
        for running in _started(bench, service(workers=num)):
            for work in (W1, W2):
                yield "processes", bench.sample(running, work, Load(CONCURRENCY, bench.options.sweep_seconds), num)


def length(bench: Bench, _: Sequence[str]) -> Iterator[Point]:
    """8 to 4,096 rows a request, and the bound on the same."""
    seconds = bench.options.sweep_seconds
    works = {num: of_length(num) for num in LENGTHS}
    if BOUND in bench.options.subjects:
        for num, work in works.items():
            sample = bench.bound_sample(work.name, seconds / 2)
            yield "length", {**sample, "workload": "length", "point": num}
    for running in _started(bench, service()):
        for num, work in works.items():
            callers = max(2, min(CONCURRENCY, _MAX_ROWS // num))
            sample = bench.sample(running, work, Load(callers, seconds), num)
            yield "length", {**sample, "workload": "length", "callers": callers}


def batch(bench: Bench, _: Sequence[str]) -> Iterator[Point]:
    """At most 1 to 32 requests in one forward pass, and how many there were."""
    for num in BATCHES:
        for running in _started(bench, service(max_batch_requests=num)):
            for work in (W1, W2):
                before = _batches(running)
                sample = bench.sample(running, work, Load(CONCURRENCY, bench.options.sweep_seconds), num)
                requests, batches = (b - a for a, b in zip(before, _batches(running), strict=True))
                yield "batch", {**sample, "mean_batch": requests / max(1, batches)}


def _batches(running: Running) -> tuple[float, float]:
    """Requests that batches took and batches, so far."""
    text = running.get("/metrics")
    found = (
        re.findall(rf"^attention_batch_requests_{end}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
        for end in ("sum", "count")
    )
    requests, batches = (sum(map(float, values)) for values in found)
    return requests, batches


def offered(bench: Bench, _: Sequence[str]) -> Iterator[Point]:
    """Latency at loads that do not wait for answers, as shares of what 32 waiting callers get answered."""
    for running in _started(bench, service()):
        for work in (W1, W2):
            bench.check(running, work)
            capacity = bench.timed(running, work, Load(CONCURRENCY, bench.options.sweep_seconds))["rps"]
            bodies = bench.bodies(running.subject, work)
            for share in OFFERED:
                asked = Arrivals(
                    running.port,
                    str(bodies.directory),
                    bodies.path,
                    bodies.num,
                    per_second=capacity * share,
                    seconds=bench.options.sweep_seconds,
                    seed=bench.round,
                )
                yield "offered", {**bench.keys(SERVICE, work.name, share), **_offer(asked), "capacity_rps": capacity}


def _offer(asked: Arrivals) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.open_loop", json.dumps(dataclasses.asdict(asked))]
    timeout_s = asked.seconds + LATEST_S + 60
    told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=timeout_s)
    found: dict[str, float] = json.loads(told.stdout)
    return found


def evenness(bench: Bench, _: Sequence[str]) -> Iterator[Point]:
    """Which share of the requests each process got, of connections that were opened together."""
    shared = Path("/dev/shm")  # where the service keeps these files by default
    with tempfile.TemporaryDirectory(prefix="bench-", dir=shared if shared.is_dir() else None) as directory:
        for running in _started(bench, dataclasses.replace(service(run_dir=directory), name=SERVICE)):
            bodies = bench.bodies(running.subject, W2)
            for callers in EVENNESS:
                for _try in range(EVENNESS_TRIES):
                    before = _received(Path(directory))
                    figures = run_wrk(running.port, bodies, Load(callers, 1))
                    got = sorted(n - before.get(slot, 0) for slot, n in _received(Path(directory)).items())
                    shares = {"least_share": got[0] / sum(got), "greatest_share": got[-1] / sum(got)}
                    yield "evenness", {**bench.keys(SERVICE, W2.name, callers), **shares, "rps": figures["rps"]}


def _received(directory: Path) -> dict[str, float]:
    """Requests so far by the slot of the process, from the counters that each process writes for `/metrics`."""
    found = {}
    for path in directory.glob("*/metrics/counter_*.db"):
        series = MultiProcessCollector.merge([str(path)])  # type: ignore[no-untyped-call]
        samples = (sample for one in series for sample in one.samples)
        found[path.stem] = float(sum(sample.value for sample in samples if sample.name == "attention_received_total"))
    return found


def _started(bench: Bench, subject: Subject) -> Iterator[Running]:
    """One running service."""
    with bench.started(subject) as running:
        yield running


SWEEPS: dict[str, Callable[[Bench, Sequence[str]], Iterator[Point]]] = {
    sweep.__name__: sweep for sweep in (concurrency, processes, length, batch, offered, evenness)
}
