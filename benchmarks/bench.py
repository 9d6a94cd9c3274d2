"""Bench: what every measurement needs: the layer, each subject's requests, its servers, and one timed run of load.

Invariants: answers are checked before anything is timed, all of them in the first round and a few in later ones; while a subject
is timed, only it and its load run; a subject that fails gives a sample that says so.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import httpx2
import numpy as np
import torch
from safetensors.numpy import save_file

from benchmarks import process_tree
from benchmarks.load_generators import closed_loop
from benchmarks.packed import HEADS, PackedLayer
from benchmarks.results import Sample
from benchmarks.server import Server
from benchmarks.subjects import LAYER, PEERS, Subject, SubjectFailed, again, echo, service
from benchmarks.wires import write_requests
from benchmarks.workloads import TOLERANCE, Workload, correct_answers, flat
from examples.make_demo_layer import demo_tensors
from service.settings import usable_cores

# The table's servers are started anew after so many rounds, because starts differ too.
FRESH_EVERY = 5
WARM_S = 1.0
# Warm-up before a measurement of the upper bound, as a share of it.
WARM_UP = 0.3
# Answers checked in later rounds.
FEW = 4
FAILURES = (SubjectFailed, OSError, subprocess.SubprocessError, httpx2.HTTPError, BrokenExecutor)

P = ParamSpec("P")
T = TypeVar("T")


def run_apart(function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Call the function in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments, **named).result()


def upper_bound(layer: Path, threads: int, work: Workload, batch: int, seconds: float) -> dict[str, float]:
    """Run the packed forward pass in plain torch, without a server; in a process of its own (`run_apart`).

    Return rps, tok_s and p50_ms, the median time of `batch` requests, over whole passes through the requests. Raises
    SubjectFailed if an answer is wrong: a fast wrong answer is no bound.
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


class Bench(contextlib.AbstractContextManager["Bench"]):
    """`with Bench(…) as bench`; `directory` is its own and empty, `seconds` is the length of a timed run."""

    def __init__(self, directory: Path, seconds: float, peers: tuple[str, ...] = ()) -> None:
        self.seconds = seconds
        self.peers = [PEERS[name] for name in peers]
        self.round = 0
        self._directory = directory
        self._source, self._layers = directory / "source.safetensors", directory / "layers"
        self._servers: dict[tuple[str, str], Server] = {}
        self._import_layer()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _import_layer(self) -> None:
        """Import the layer by the command that users have."""
        self._layers.mkdir()
        save_file(demo_tensors(), self._source)
        arguments = ["--name", LAYER, "--heads", str(HEADS), "--layers-dir", str(self._layers)]
        command = [sys.executable, "-m", "service", "layers", "import", str(self._source), *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    def close(self) -> None:
        """End all servers, even if one raises at its end."""
        with contextlib.ExitStack() as stack:
            while self._servers:
                stack.callback(self._servers.popitem()[1].close)

    def begin_round(self, number: int) -> None:
        self.round = number
        if number % FRESH_EVERY == 0:
            self.close()

    def subjects(self) -> list[Subject]:
        return [service(), again(), echo(), *self.peers]

    def start(self, subject: Subject, form: str = "binary") -> Server:
        paths = {"layers": str(self._layers), "source": str(self._source)}
        return Server(subject, form, paths, self._directory / f"{subject.name}.log")

    @contextlib.contextmanager
    def running(self, subject: Subject, form: str) -> Iterator[Server]:
        """Yield the subject's server, which stays up and idle afterwards; one that fails, or polls while idle, is ended."""
        if subject.polls:
            with self.start(subject, form) as server:
                yield server
            return
        key = (subject.name, form if subject.one_form else "")
        if key not in self._servers:
            self._servers[key] = self.start(subject, form)
        try:
            yield self._servers[key]
            self._servers[key].await_idle()
        except BaseException:
            self._servers.pop(key).close()
            raise

    def requests(self, subject: Subject, work: Workload) -> Path:
        """Return the directory of the HTTP requests, written once for all subjects with the same path."""
        wire = subject.wires[work.form]
        directory = self._directory / re.sub(r"\W+", "-", f"requests {wire.path} {work.name}")
        return directory if directory.exists() else write_requests(directory, wire, work.inputs())

    def figures(self, server: Server, work: Workload, concurrency: int) -> Sample:
        """Check, warm up and time a closed loop; returns its figures, tok_s, server_cores and max_abs_error."""
        error = server.largest_error(work, FEW if self.round else len(work.lengths))
        requests = self.requests(server.subject, work)
        if (work.name, concurrency) not in server.warm_for:
            closed_loop(server.port, requests, concurrency, WARM_S)
            server.warm_for.add((work.name, concurrency))
        pids = server.pids
        before, began = process_tree.cpu_seconds(pids), time.monotonic()
        found = closed_loop(server.port, requests, concurrency, self.seconds)
        elapsed_s, after = time.monotonic() - began, process_tree.cpu_seconds(pids)
        cores = sum(seconds - before[pid] for pid, seconds in after.items()) / elapsed_s
        return {**found, "tok_s": found["rps"] * work.tokens_a_request, "server_cores": cores, "max_abs_error": error}

    def bound_figures(self, work: Workload, batch: int, seconds: float) -> Sample:
        """Return the upper bound's rps, tok_s and p50_ms, one thread a core."""
        return {**run_apart(upper_bound, self._source, usable_cores(), work, batch, seconds)}

    def sample(
        self, subject: str, workload: str, figures: Callable[[], dict[str, Any]], point: object = None
    ) -> Sample:
        """Return the figures with what they are of, or the failure."""
        keys = {"round": self.round, "subject": subject, "workload": workload}
        keys |= {} if point is None else {"point": point}
        try:
            return {**keys, **figures()}
        except FAILURES as failure:
            return {**keys, "failed": f"{type(failure).__name__}: {failure}"[:300]}
