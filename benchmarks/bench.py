"""Bench: what every measurement needs: the layer, each subject's requests, a started server, one timed run of load.

Laws: answers are looked at before anything is timed, all of them in the first round and a few in later ones; nothing of
ours computes while a subject is timed; a subject that fails makes a sample that says so, and the run goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import process_tree
from benchmarks.bodies import Bodies, write_bodies
from benchmarks.packed import HEADS
from benchmarks.results import Sample
from benchmarks.running import Running, SubjectFailed
from benchmarks.subjects import BOUND, ECHO, LAYER, SERVICE, Subject, echo, peers, service
from benchmarks.workloads import Workload, save_layer
from benchmarks.wrk import Load, WrkFailed, run_wrk
from service.settings import usable_cores

FEW = 4
FAILURES = (SubjectFailed, WrkFailed, OSError, subprocess.SubprocessError)


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """`seconds` of each timed run of the table, `sweep_seconds` of the many runs of a sweep, `warm_s` before each.

    `subjects` are ours, by name; `peers` come besides.
    """

    rounds: int = 5
    seconds: float = 8
    sweep_rounds: int = 3
    sweep_seconds: float = 4
    warm_s: float = 1
    subjects: tuple[str, ...] = (BOUND, SERVICE, ECHO)
    peers: tuple[str, ...] = ()


class Bench:
    """`directory` is its own and empty."""

    def __init__(self, directory: Path, options: Options) -> None:
        self.options = options
        self.directory = directory
        self.layers, self.source = directory / "layers", directory / "source.safetensors"
        self._bodies: dict[str, Bodies] = {}
        self._sizes: dict[str, list[int]] = {}
        self.round = 0
        self._import_layer()

    def _import_layer(self) -> None:
        """Through the command that users have."""
        self.layers.mkdir()
        save_layer(self.source)
        arguments = ["--name", LAYER, "--heads", str(HEADS), "--layers-dir", str(self.layers)]
        subprocess.run(
            [sys.executable, "-m", "service", "layers", "import", str(self.source), *arguments],
            check=True,
            stdout=subprocess.DEVNULL,
        )

    def begin_round(self, number: int) -> None:
        self.round = number

    def subjects(self) -> list[Subject]:
        """The servers that were asked for, in an order that every round turns by one."""
        ours = [subject for subject in (service(), echo()) if subject.name in self.options.subjects]
        found = [*ours, *(peers()[name] for name in self.options.peers)]
        turn = self.round % max(1, len(found))
        return found[turn:] + found[:turn]

    @contextlib.contextmanager
    def started(self, subject: Subject, form: str = "binary") -> Iterator[Running]:
        log = self.directory / f"{subject.name}.log"
        named = {"layers": str(self.layers), "source": str(self.source)}
        with Running(subject, named, log, form) as running:
            yield running

    def bodies(self, subject: Subject, work: Workload) -> Bodies:
        """Written once; the echo is asked for answers of the service's sizes, so the service is asked first."""
        wire = subject.forms[work.form]
        is_echo = subject.name == ECHO
        key = re.sub(r"\W+", "-", f"{ECHO if is_echo else wire.name} {wire.path} {work.name}")
        if key not in self._bodies:
            directory = self.directory / "bodies" / key
            if is_echo:
                self._bodies[key] = self.bodies(service(), work).asking_for(self._answer_sizes(work), directory)
            else:
                self._bodies[key] = write_bodies(directory, wire, work)
        return self._bodies[key]

    def _answer_sizes(self, work: Workload) -> list[int]:
        if work.name not in self._sizes:
            subject = service()
            with self.started(subject) as running:
                self._sizes[work.name] = running.answer_sizes(self.bodies(subject, work))
        return self._sizes[work.name]

    def check(self, running: Running, work: Workload) -> float:
        """The largest error of the answers that were looked at."""
        subject, bodies = running.subject, self.bodies(running.subject, work)
        num = FEW if self.round else bodies.num
        if subject.name == ECHO:
            running.check_sizes(bodies, num)
            return 0.0
        if subject.name == SERVICE and ECHO in self.options.subjects and work.name not in self._sizes:
            self._sizes[work.name] = running.answer_sizes(bodies)
        return running.largest_error(work, bodies, subject.forms[work.form], num)

    def sample(self, running: Running, work: Workload, load: Load, point: object = None) -> Sample:
        """Looked at, warmed up, timed."""
        keys = self.keys(running.subject.name, work.name, point)
        try:
            error = self.check(running, work)
            return {**keys, **self.timed(running, work, load), "max_abs_error": error}
        except FAILURES as failure:
            return {**keys, "failed": f"{type(failure).__name__}: {failure}"[:300]}

    def timed(self, running: Running, work: Workload, load: Load) -> dict[str, Any]:
        bodies = self.bodies(running.subject, work)
        run_wrk(running.port, bodies, dataclasses.replace(load, seconds=self.options.warm_s))
        pids = running.pids
        before, began = process_tree.cpu_seconds(pids), time.monotonic()
        figures = run_wrk(running.port, bodies, load)
        elapsed, after = time.monotonic() - began, process_tree.cpu_seconds(pids)
        spent = sum(seconds - before[pid] for pid, seconds in after.items())
        tok_s = figures["rps"] * work.tokens_a_request
        return {**figures, "tok_s": tok_s, "server_cores": spent / elapsed}

    def keys(self, subject: str, workload: str, point: object = None) -> Sample:
        found = {"round": self.round, "subject": subject, "workload": workload}
        return found if point is None else {**found, "point": point}

    def failed(self, failure: Exception, subject: str, workload: str, point: object = None) -> Sample:
        return {**self.keys(subject, workload, point), "failed": f"{type(failure).__name__}: {failure}"[:300]}

    def bound(self, works: Sequence[str], seconds: float, threads: int = 0) -> dict[str, dict[str, float]]:
        """Figures of the bound by work, as `bound.py` names them."""
        command = [
            sys.executable,
            "-m",
            "benchmarks.bound",
            str(self.source),
            str(seconds),
            str(threads or usable_cores()),
        ]
        told = subprocess.run([*command, *works], check=True, capture_output=True, text=True, timeout=600)
        found: dict[str, dict[str, float]] = json.loads(told.stdout)
        return found

    def bound_samples(self, works: dict[str, str], seconds: float) -> Iterator[tuple[str, Sample]]:
        """(part, sample) for {part: work}; nothing where the bound is not asked for."""
        if BOUND not in self.options.subjects or not works:
            return
        try:
            found = self.bound(list(works.values()), seconds)
        except FAILURES as failure:
            for part, work in works.items():
                yield part, self.failed(failure, BOUND, work)
            return
        for part, work in works.items():
            yield part, {**self.keys(BOUND, work.partition("/")[0]), **found[work]}
