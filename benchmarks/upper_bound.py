"""Upper bound: the packed forward pass on a workload's requests in plain torch in one process, without a server.

Results and pages call it the bound. `measure` runs in a process of its own (`Bench.run_apart`).
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.packed import PackedLayer
from benchmarks.subjects import SubjectFailed
from benchmarks.workloads import TOLERANCE, Workload, correct_answers, flat

# Warm-up of a workload before its first measurement, as a share of the measurement.
WARM_UP = 0.3
Batches = list[list[torch.Tensor]]
Forward = Callable[[list[torch.Tensor]], list[tuple[torch.Tensor, ...]]]


def measure(layer: Path, threads: int, work: Workload, batch: int, seconds: float) -> dict[str, float]:
    """Return rps, tok_s and p50_ms, the median time of `batch` requests, over whole passes through the requests.

    Raises SubjectFailed if an answer is wrong: a fast wrong answer is no bound.
    """
    forward, batches = _prepared(layer, threads, work, batch, seconds * WARM_UP)
    num, times, started = sum(map(len, batches)), list[float](), time.perf_counter()
    while (began := time.perf_counter()) < started + seconds or len(times) % len(batches):
        forward(batches[len(times) % len(batches)])
        times.append(time.perf_counter() - began)
    rps = len(times) / len(batches) * num / (time.perf_counter() - started)
    return {"rps": rps, "tok_s": rps * work.tokens_a_request, "p50_ms": statistics.median(times) * 1e3}


@functools.cache
def _prepared(layer: Path, threads: int, work: Workload, batch: int, warm_s: float) -> tuple[Forward, Batches]:
    """Return the checked and warm forward pass and its batches."""
    torch.set_num_threads(threads)
    forward = functools.partial(PackedLayer.load(layer).forward, with_weights=work.form == "weights")
    xs = [torch.from_numpy(x) for x in work.inputs()]
    for answer, correct in zip(forward(xs), correct_answers(work), strict=True):
        if not np.abs(flat(answer) - correct).max() <= TOLERANCE:
            raise SubjectFailed(f"bound, {work.name}: wrong answer")
    batches = [xs[start : start + batch] for start in range(0, len(xs), batch)]
    end = time.perf_counter() + warm_s
    while time.perf_counter() < end:
        forward(batches[0])
    return forward, batches
