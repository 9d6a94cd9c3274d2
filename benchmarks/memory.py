"""Memory: what a service needs at rest and at its peak under W1, everything that was started added up.

Laws: nothing here is timed, for looking at memory takes time; at rest means ready, a few requests answered and two seconds
gone by; the peak of the resident size is the kernel's own, that of PSS the largest of the samples.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

from benchmarks import process_tree
from benchmarks.bench import FAILURES, Bench
from benchmarks.process_tree import MIB
from benchmarks.results import Sample
from benchmarks.running import Running
from benchmarks.subjects import SERVICE, peers, service
from benchmarks.table import CONCURRENCY
from benchmarks.workloads import W1
from benchmarks.wrk import Load, run_wrk

REST_S = 2
SAMPLE_S = 0.25


def measure(bench: Bench, _: Sequence[str]) -> Iterator[tuple[str, Sample]]:
    """One round: this service with one and two processes, then the peers."""
    ours = [service(f"{SERVICE} x{num}", workers=num) for num in (1, 2)]
    for subject in (*ours, *(peers()[name] for name in bench.options.peers)):
        try:
            with bench.started(subject) as running:
                yield "memory", {**bench.keys(subject.name, W1.name), **_figures(bench, running)}
        except FAILURES as failure:
            yield "memory", bench.failed(failure, subject.name, W1.name)


def _figures(bench: Bench, running: Running) -> dict[str, float]:
    bench.check(running, W1)
    time.sleep(REST_S)
    pids = running.pids
    resident, shared = process_tree.resident_bytes(pids), process_tree.proportional_bytes(pids)
    process_tree.forget_peaks(pids)
    peak, is_over = shared, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not is_over.wait(SAMPLE_S):
            peak = max(peak, process_tree.proportional_bytes(pids))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        run_wrk(running.port, bench.bodies(running.subject, W1), Load(CONCURRENCY, bench.options.sweep_seconds))
    finally:
        is_over.set()
        watcher.join()
    largest = max(process_tree.peak_resident_bytes([pid]) for pid in pids)
    return {
        "processes": len(pids),
        "rest_rss_mib": resident / MIB,
        "rest_pss_mib": shared / MIB,
        "peak_rss_mib": process_tree.peak_resident_bytes(pids) / MIB,
        "peak_pss_mib": peak / MIB,
        "largest_process_mib": largest / MIB,
    }
