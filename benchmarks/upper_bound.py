"""Upper bound: the packed forward pass on a workload's requests in plain torch in one process, without a server.

Results and pages call it the bound. `measure` runs in a process of its own (`bench.run_apart`).
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.packed import PackedLayer
from benchmarks.subjects import SubjectFailed
from benchmarks.workloads import TOLERANCE, Workload, correct_answers, flat

# Warm-up before a measurement, as a share of it.
WARM_UP = 0.3


def measure(layer: Path, threads: int, work: Workload, batch: int, seconds: float) -> dict[str, float]:
    """Return rps, tok_s and p50_ms, the median time of `batch` requests, over whole passes through the requests.

    Raises SubjectFailed if an answer is wrong: a fast wrong answer is no bound.
    """
    torch.set_num_threads(threads)
    packed, with_weights = PackedLayer.load(layer), work.form == "weights"
    xs = [torch.from_numpy(x) for x in work.inputs()]
    for answer, correct in zip(packed.forward(xs, with_weights=with_weights), correct_answers(work), strict=True):
        if not np.abs(flat(answer) - correct).max() <= TOLERANCE:
            raise SubjectFailed(f"bound, {work.name}: wrong answer")
    batches = [xs[start : start + batch] for start in range(0, len(xs), batch)]
    for duration_s in (seconds * WARM_UP, seconds):
        times, started = list[float](), time.perf_counter()
        while (began := time.perf_counter()) < started + duration_s or len(times) % len(batches):
            packed.forward(batches[len(times) % len(batches)], with_weights=with_weights)
            times.append(time.perf_counter() - began)
    rps = len(times) / len(batches) * len(xs) / (time.perf_counter() - started)
    return {"rps": rps, "tok_s": rps * work.tokens_a_request, "p50_ms": statistics.median(times) * 1e3}
