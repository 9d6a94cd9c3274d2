"""Bench: what every measurement needs: the layer, each subject's requests, started servers, one timed run of load.

Laws: answers are looked at before anything is timed, all of them in the first round and a few in later ones; nothing but
the subject and its load runs while it is timed; a subject that fails makes a sample that says so, and the run goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

from benchmarks import process_tree
from benchmarks.bodies import Bodies, write_bodies
from benchmarks.bound_process import BoundProcess
from benchmarks.kept import Kept
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
    """`seconds` of each timed run of the table, `sweep_seconds` of those of a sweep, `warm_s` of load before them.

    The table's rounds are many and short, so that what is compared is seconds apart; after `fresh_every` of them its
    servers are started anew, for a start has its luck too. `subjects` are ours, by name; `peers` come besides.
    """

    rounds: int = 20
    seconds: float = 2
    fresh_every: int = 5
    sweep_rounds: int = 3
    sweep_seconds: float = 4
    warm_s: float = 1
    subjects: tuple[str, ...] = (BOUND, SERVICE, ECHO)
    peers: tuple[str, ...] = ()


class Bench:
    """`with Bench(directory, options) as bench`; `directory` is its own and empty."""

    def __init__(self, directory: Path, options: Options) -> None:
        self.options = options
        self.directory = directory
        self.layers, self.source = directory / "layers", directory / "source.safetensors"
        self._bodies: dict[str, Bodies] = {}
        self._sizes: dict[str, list[int]] = {}
        self._kept = Kept(self.started)
        self._bound = BoundProcess(self.source, usable_cores(), directory / f"{BOUND}.log")
        self.round = 0
        self._import_layer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._kept.end()
        finally:
            self._bound.end()

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
        if number % self.options.fresh_every == 0:
            self._kept.end()
            self._bound.end()

    def subjects(self) -> list[Subject]:
        """The servers that were asked for."""
        ours = [subject for subject in (service(), echo()) if subject.name in self.options.subjects]
        return [*ours, *(peers()[name] for name in self.options.peers)]

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
        return self._told(running.subject.name, work.name, lambda: self._figures(running, work, load), point)

    def sample_in_turn(self, subject: Subject, work: Workload, load: Load) -> Sample:
        """The same of a server that stays up and rests while others are timed; one that failed is started anew."""

        def figures() -> dict[str, Any]:
            with self._kept.awake(subject, work.form) as running:
                return self._figures(running, work, load)

        return self._told(subject.name, work.name, figures)

    def bound_sample(self, asked: str, seconds: float) -> Sample:
        """Of the bound's work as `bound.py` names it."""
        return self._told(BOUND, asked.partition("/")[0], lambda: self._bound.figures(asked, seconds))

    def _told(self, subject: str, workload: str, figures: Callable[[], dict[str, Any]], point: object = None) -> Sample:
        try:
            return {**self.keys(subject, workload, point), **figures()}
        except FAILURES as failure:
            return self.failed(failure, subject, workload, point)

    def _figures(self, running: Running, work: Workload, load: Load) -> dict[str, Any]:
        error = self.check(running, work)
        return {**self.timed(running, work, load), "max_abs_error": error}

    def timed(self, running: Running, work: Workload, load: Load) -> dict[str, Any]:
        bodies = self.bodies(running.subject, work)
        if (work.name, load.concurrency) not in running.warm_for:
            run_wrk(running.port, bodies, dataclasses.replace(load, seconds=self.options.warm_s))
            running.warm_for.add((work.name, load.concurrency))
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
