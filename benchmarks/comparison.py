"""Comparison: the workloads that have targets, every subject on every one of them; ours beside ours; and memory.

Invariant: servers stay up, and in each round every subject is timed once on each workload, in a newly drawn order. So what a
ratio compares is seconds apart: on these machines speed changes by more than a tenth within a minute.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import NamedTuple

from benchmarks import process_tree
from benchmarks.bench import FEW, Bench
from benchmarks.load_generators import closed_loop
from benchmarks.results import Sample
from benchmarks.subjects import BOUND, SERVICE, Subject, service
from benchmarks.workloads import W1, W2, W2_LISTS, W2_SDPA, W2_THREE, W3, Workload

CONCURRENCY = 32
REST_S = 2
PSS_EVERY_S = 0.25


class Cell(NamedTuple):
    """One part of the results; `bound_batch` is how many sequences the upper bound runs at once, None without a bound.

    `own` names what is timed instead of all subjects: a service with settings of its own, or another route of one service.
    """

    work: Workload
    concurrency: int = CONCURRENCY
    bound_batch: int | None = CONCURRENCY
    own: Mapping[str, tuple[Subject, Workload]] | None = None


BFLOAT16 = service(f"{SERVICE} bfloat16", tolerance=5e-2, dtype="bfloat16")
CELLS = {
    "w1": Cell(W1),
    "w2": Cell(W2),
    "w3": Cell(W3),
    "w2json": Cell(W2_LISTS, bound_batch=None),
    "w1c1": Cell(W1, 1, 1),
    "w2c1": Cell(W2, 1, 1),
    "bfloat16": Cell(W1, CONCURRENCY, None, {SERVICE: (service(), W1), BFLOAT16.name: (BFLOAT16, W1)}),
    "w2bfloat16": Cell(W2, CONCURRENCY, None, {SERVICE: (service(), W2), BFLOAT16.name: (BFLOAT16, W2)}),
    "attention": Cell(W2_SDPA, CONCURRENCY, None, {SERVICE: (service(), W2_SDPA), "attend": (service(), W2_THREE)}),
}


def measure(bench: Bench, part: str) -> Iterator[Sample]:
    """Measure one round of a cell."""
    cell = CELLS[part]
    all_of_it = {x.name: (x, cell.work) for x in bench.subjects() if cell.work.form in x.wires}
    timings: dict[str, Callable[[], Sample]] = {
        name: partial(_figures, bench, *pair, cell.concurrency) for name, pair in (cell.own or all_of_it).items()
    }
    if cell.bound_batch:
        timings[BOUND] = partial(bench.bound_figures, cell.work, cell.bound_batch, bench.seconds)
    for name in random.sample(list(timings), len(timings)):
        yield bench.sample(name, cell.work.name, timings[name])


def _figures(bench: Bench, subject: Subject, work: Workload, concurrency: int) -> Sample:
    with bench.running(subject, work.form) as server:
        return bench.figures(server, work, concurrency)


def measure_memory(bench: Bench, _: str) -> Iterator[Sample]:
    """Measure the memory of this service with one and two processes, and of the peers; nothing is timed."""
    for subject in (*(service(f"{SERVICE} x{num}", workers=num) for num in (1, 2)), *bench.peers):
        yield bench.sample(subject.name, W1.name, partial(_memory, bench, subject))


def _memory(bench: Bench, subject: Subject) -> Sample:
    """Return MiB at rest, which is ready, after a few answers and two seconds, and at the peak under W1."""
    with bench.start(subject) as server:
        server.largest_error(W1, FEW)
        time.sleep(REST_S)
        pids = server.pids
        rest = {f"rest_{name}_mib": process_tree.memory_mib(pids, x) for name, x in (("rss", "VmRSS"), ("pss", "Pss"))}
        process_tree.reset_peaks(pids)
        pss = [rest["rest_pss_mib"]]  # sampled, because the kernel keeps no peak of it
        with ThreadPoolExecutor(1) as pool:
            load = pool.submit(closed_loop, server.port, bench.requests(subject, W1), CONCURRENCY, bench.seconds)
            while wait([load], PSS_EVERY_S).not_done:
                pss.append(process_tree.memory_mib(pids, "Pss"))
        load.result()
        return {
            "processes": len(pids),
            **rest,
            "peak_pss_mib": max(pss),
            "peak_rss_mib": process_tree.memory_mib(pids, "VmHWM"),
            "largest_process_mib": max(process_tree.memory_mib([pid], "VmHWM") for pid in pids),
        }
