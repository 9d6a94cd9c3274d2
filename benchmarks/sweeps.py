"""Sweeps: throughput and latency over one variable: callers, processes, length, batch, offered load.

Invariants: a sweep is one round of a part, and each sample has its point; only the service is swept, and the upper bound over
lengths; refused requests are reported beside the throughput, which counts answers only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

from benchmarks.bench import Bench, run_apart
from benchmarks.comparison import CONCURRENCY
from benchmarks.load_generators import open_loop
from benchmarks.results import Sample
from benchmarks.server import Server
from benchmarks.subjects import BOUND, SERVICE, Subject, service
from benchmarks.workloads import W1, W2, of_length

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
PROCESSES = (1, 2, 3, 4)
LENGTHS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
BATCHES = (1, 2, 4, 8, 16, 32)
# Shares of the requests/s that a closed loop of 32 callers reaches.
OFFERED = (0.1, 0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.2)
# Most rows in flight: more would be refused for a long queue, and refusals are not the cost of length.
_MAX_ROWS = 2**12


def concurrency(bench: Bench, _: str) -> Iterator[Sample]:
    """1 to 512 callers."""
    with bench.start(service()) as server:
        for work in (W1, W2):
            for num in CONCURRENCIES:
                figures = partial(bench.figures, server, work, num)
                yield bench.sample(SERVICE, work.name, figures, num)


def processes(bench: Bench, _: str) -> Iterator[Sample]:
    """1 to 4 processes, on any number of cores."""
    for num in PROCESSES:
        yield from _both(bench, service(workers=num), num)


def batch(bench: Bench, _: str) -> Iterator[Sample]:
    """At most 1 to 32 requests in one forward pass, with the mean number."""
    for num in BATCHES:
        yield from _both(bench, service(max_batch_requests=num), num)


def _both(bench: Bench, subject: Subject, point: int) -> Iterator[Sample]:
    """Measure the service with other settings on W1 and W2."""
    with bench.start(subject) as server:
        for work in (W1, W2):
            before = _batches(server)
            sample = bench.sample(SERVICE, work.name, partial(bench.figures, server, work, CONCURRENCY), point)
            requests, batches = (b - a for a, b in zip(before, _batches(server), strict=True))
            yield {**sample, "mean_batch": requests / max(1, batches)}


def _batches(server: Server) -> list[float]:
    """Return how many requests the batches had so far, and how many batches there were."""
    text, pattern = server.ask("/metrics").text, r"^attention_batch_requests_{}(?:{{.*}})? (\S+)$"
    found = (re.findall(pattern.format(end), text, re.MULTILINE) for end in ("sum", "count"))
    return [sum(map(float, values)) for values in found]


def length(bench: Bench, _: str) -> Iterator[Sample]:
    """8 to 4,096 rows a request, and the upper bound on the same."""
    works = {num: of_length(num) for num in LENGTHS}
    for num, work in works.items():
        figures = partial(bench.bound_figures, work, CONCURRENCY, bench.seconds / 2)
        yield bench.sample(BOUND, "length", figures, num)
    with bench.start(service()) as server:
        for num, work in works.items():
            callers = max(2, min(CONCURRENCY, _MAX_ROWS // num))
            sample = bench.sample(SERVICE, "length", partial(bench.figures, server, work, callers), num)
            yield {**sample, "callers": callers}


def offered(bench: Bench, _: str) -> Iterator[Sample]:
    """Latency under load that does not wait for answers, at shares of the throughput of 32 callers."""
    with bench.start(service()) as server:
        for work in (W1, W2):
            capacity = bench.figures(server, work, CONCURRENCY)["rps"]
            requests = bench.requests(server.subject, work)
            for share in OFFERED:
                arguments = (server.port, requests, capacity * share, bench.seconds, bench.round)
                sample = bench.sample(SERVICE, work.name, partial(run_apart, open_loop, *arguments), share)
                yield {**sample, "capacity_rps": capacity}


SWEEPS = {sweep.__name__: sweep for sweep in (concurrency, processes, length, batch, offered)}
