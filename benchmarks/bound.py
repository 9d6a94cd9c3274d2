"""The in-process bound: the packed forward pass in plain torch on the same requests, in a process of its own.

python -m benchmarks.bound LAYER THREADS    answers each line `WORK SECONDS` of its input with one line of JSON, the figures

WORK is a workload's name, `l<length>` for one length, with `/1` behind it for one request at a time (p50 of single calls).
Between two lines it sleeps, so it may stay up while servers are timed.
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

WARM_UP_SHARE = 0.3  # of the time asked for, once for each work


def workload(name: str) -> Workload:
    return NAMED[name] if name in NAMED else of_length(int(name.removeprefix("l")))


class Timed:
    """One work, in batches of `batch` requests; its answers are looked at before anything is timed."""

    def __init__(self, layer: PackedLayer, work: Workload, batch: int) -> None:
        xs = [torch.from_numpy(x) for x in work.inputs()]
        run: Callable[[list[torch.Tensor]], Sequence[torch.Tensor | tuple[torch.Tensor, ...]]] = layer.outputs
        if work.form == "weights":
            run = layer.outputs_and_weights
        _check(work, run(xs))
        self._work, self._run, self._num = work, run, len(xs)
        self._batches = [xs[start : start + batch] for start in range(0, len(xs), batch)]

    def warm_up(self, seconds: float) -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            self._run(self._batches[0])

    def figures(self, seconds: float) -> dict[str, float]:
        """tok_s, rps and the median time of a batch, over whole passes through the requests."""
        times: list[float] = []
        requests, started = 0, time.perf_counter()
        while (began := time.perf_counter()) < started + seconds or requests % self._num:
            part = self._batches[len(times) % len(self._batches)]
            self._run(part)
            times.append(time.perf_counter() - began)
            requests += len(part)
        rps = requests / (time.perf_counter() - started)
        return {"rps": rps, "tok_s": rps * self._work.tokens_a_request, "p50_ms": statistics.median(times) * 1e3}


def _check(work: Workload, answers: Sequence[torch.Tensor | tuple[torch.Tensor, ...]]) -> None:
    """What is fast and wrong is no bound."""
    for answer, right in zip(answers, right_answers(work), strict=True):
        parts = (answer,) if isinstance(answer, torch.Tensor) else answer
        found = np.concatenate([part.numpy().ravel() for part in parts])
        if not np.abs(found - right).max() <= TOLERANCE:
            raise SystemExit(f"the bound's answers to {work.name} are wrong")


def main(path: str, threads: str) -> None:
    torch.set_num_threads(int(threads))
    layer = PackedLayer.load(Path(path))
    timed: dict[str, Timed] = {}
    for line in sys.stdin:
        asked, seconds = line.split()
        if asked not in timed:
            name, _, batch = asked.partition("/")
            timed[asked] = Timed(layer, workload(name), int(batch or BATCH))
            timed[asked].warm_up(float(seconds) * WARM_UP_SHARE)
        print(json.dumps(timed[asked].figures(float(seconds))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
