"""The in-process bound: the packed forward pass in plain torch on the same requests, in a process of its own.

python -m benchmarks.bound LAYER SECONDS THREADS WORK …    prints one line of JSON, {work: figures}

WORK is a workload's name, `l<length>` for one length, with `/1` behind it for one request at a time (p50 of single calls).
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.packed import PackedLayer
from benchmarks.workloads import BATCH, NAMED, TOLERANCE, Workload, of_length, right_answers

WARM_UP_SHARE = 0.3


def workload(name: str) -> Workload:
    return NAMED[name] if name in NAMED else of_length(int(name.removeprefix("l")))


def figures(layer: PackedLayer, work: Workload, batch: int, seconds: float) -> dict[str, float]:
    """tok_s, rps and the median time of a batch."""
    xs = [torch.from_numpy(x) for x in work.inputs()]
    run: Callable[[list[torch.Tensor]], Sequence[torch.Tensor | tuple[torch.Tensor, ...]]] = layer.outputs
    if work.form == "weights":
        run = layer.outputs_and_weights
    _check(work, run(xs))
    batches = [xs[start : start + batch] for start in range(0, len(xs), batch)]
    end = time.perf_counter() + seconds * WARM_UP_SHARE
    run(batches[0])
    while time.perf_counter() < end:
        run(batches[0])
    times: list[float] = []
    requests, started = 0, time.perf_counter()
    while (began := time.perf_counter()) < started + seconds or requests % len(xs):
        part = batches[len(times) % len(batches)]
        run(part)
        times.append(time.perf_counter() - began)
        requests += len(part)
    rps = requests / (time.perf_counter() - started)
    return {"rps": rps, "tok_s": rps * work.tokens_a_request, "p50_ms": statistics.median(times) * 1e3}


def _check(work: Workload, answers: Sequence[torch.Tensor | tuple[torch.Tensor, ...]]) -> None:
    """What is fast and wrong is no bound."""
    for answer, right in zip(answers, right_answers(work), strict=True):
        parts = (answer,) if isinstance(answer, torch.Tensor) else answer
        found = np.concatenate([part.numpy().ravel() for part in parts])
        if not np.abs(found - right).max() <= TOLERANCE:
            raise SystemExit(f"the bound's answers to {work.name} are wrong")


def main(path: str, seconds: str, threads: str, *works: str) -> None:
    torch.set_num_threads(int(threads))
    layer = PackedLayer.load(Path(path))
    found = {}
    for asked in works:
        name, _, batch = asked.partition("/")
        found[asked] = figures(layer, workload(name), int(batch or BATCH), float(seconds))
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
