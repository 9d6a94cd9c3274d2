"""Figure 14: the run directory is lost while the service serves: all of it, parts of it, single files. What was lost is made
again within ten seconds, no request fails and the counters of living processes go on; a worker that dies later is replaced;
what a killed supervisor leaves is removed by the next start. With the old fault planted (nothing is made again) the check fails.

Invariants: a service is well once `/readyz` says so, `/metrics` has every process, and each has its files again; what is lost
is drawn from the seed, and each kind of loss comes at least once.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.torture import at_rest
from tests.torture.at_rest import total
from tests.torture.canary import Song, singing
from tests.torture.figure import Form
from tests.torture.report import Row, at_most, fails, none_of
from tests.torture.subject import Subject

LOSSES = 10
HEAL_S = 10.0
REPLACE_S = 90.0
WORKERS = 2
PER_SECOND = 50.0


def measure(form: Form) -> Iterator[Row]:
    shared = form.room("shared") / "run"
    songs: list[Song] = []
    with Subject(form.room("run_directory"), workers=WORKERS, run_dir=shared) as subject:
        before = subject.baseline()
        with singing(subject.port, songs, per_second=PER_SECOND):
            slowest_s, wrong = _lose_all(subject, shared, form)
        yield none_of(
            14, f"{_count(form)} losses under {PER_SECOND:.0f} requests/s: answers other than 200", songs[0].wrong
        )
        yield none_of(14, "losses that were not repaired in time, or that cost a living process its counters", wrong)
        yield at_most(14, "ready, with every process in the metrics (slowest)", slowest_s, HEAL_S, " s")
        yield none_of(
            14, "descriptors, threads and counts that are not back afterwards", at_rest.not_back(subject, before)
        )
        yield none_of(14, "a worker killed after a loss: not replaced", _kill_a_worker(subject, shared))
    with Subject(form.room("next"), workers=1, run_dir=shared):
        left = len(list(shared.iterdir())) - 1
        yield at_most(14, "directories of a killed supervisor after the next start", left, 0)
    planted = form.room("planted") / "run"
    plants = {"modules": [__name__]}
    with Subject(planted.parent, plants=plants, workers=WORKERS, run_dir=planted) as subject:
        _remove(_run_directory(planted))
        is_found = _seconds_until_well(subject, planted) is None
        told = "not well in time" if is_found else "the check found nothing"
        yield fails(14, "a planted fault (nothing lost is made again) fails the check", told, is_found)


def plant() -> None:
    """What is lost stays lost."""
    from service.observability.shared_values import SharedValues
    from service.supervisor.run_directory import RunDirectory

    SharedValues.restore = RunDirectory.restore = lambda _: False  # type: ignore[method-assign, assignment]


def _count(form: Form) -> int:
    return form.count(LOSSES, len(_LOSSES))


def _lose_all(subject: Subject, shared: Path, form: Form) -> tuple[float, list[str]]:
    """How long the slowest took, and which did not come back."""
    rng = form.random("losses")
    names = list(_LOSSES) + rng.choices(list(_LOSSES), k=_count(form) - len(_LOSSES))
    slowest_s, wrong = 0.0, []
    for name in rng.sample(names, len(names)):
        counted = total(subject.samples(), "received_total")
        _LOSSES[name](_run_directory(shared), rng)
        seconds = _seconds_until_well(subject, shared)
        slowest_s = max(slowest_s, HEAL_S if seconds is None else seconds)
        if seconds is None:
            wrong.append(f"{name}: {subject.get('/readyz')[1].decode()}")
        elif total(subject.samples(), "received_total") < counted:
            wrong.append(f"{name}: counters fell")
    return slowest_s, wrong


def _run_directory(shared: Path) -> Path:
    return next(shared.iterdir())


def _is_well(subject: Subject, shared: Path) -> bool:
    if subject.get("/readyz")[0] != 200 or len(list(shared.glob("*/metrics/counter_*.db"))) != WORKERS:
        return False
    samples = subject.samples()
    return samples.get("attention_ready_processes") == samples.get("attention_expected_processes") == WORKERS


def _seconds_until_well(subject: Subject, shared: Path) -> float | None:
    """None where that takes too long. A loss shows only when a process looks, so it has to last for two heartbeats."""
    started = lasting_since = time.monotonic()
    while time.monotonic() < started + HEAL_S:
        time.sleep(0.05)
        if not _is_well(subject, shared):
            lasting_since = time.monotonic()
        elif time.monotonic() > lasting_since + 2.5:
            return lasting_since - started
    return None


def _kill_a_worker(subject: Subject, shared: Path) -> list[str]:
    pid = subject.pids[0]
    os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + REPLACE_S
    while time.monotonic() < end:
        deaths = [line for line in subject.lines() if line["event"] == "worker_died"]
        if [line["pid"] for line in deaths] == [pid] and _is_well(subject, shared):
            return []
        time.sleep(0.1)
    return [f"{len(deaths)} deaths; {subject.get('/readyz')[1].decode()}"]


def _remove(directory: Path) -> None:
    """Also where a process writes to it meanwhile."""
    while directory.exists():
        shutil.rmtree(directory, ignore_errors=True)


def _remove_some(run: Path, rng: random.Random) -> None:
    files = [path for path in sorted(run.rglob("*")) if path.is_file()]
    for path in rng.sample(files, rng.randint(1, len(files))):
        path.unlink(missing_ok=True)


_LOSSES: dict[str, Callable[[Path, random.Random], object]] = {
    "all of it": lambda run, _: _remove(run),
    "with its parent": lambda run, _: _remove(run.parent),
    "moved away": lambda run, rng: run.rename(run.parent.parent / f"away-{rng.getrandbits(32)}"),
    "the metrics": lambda run, _: _remove(run / "metrics"),
    "some files": _remove_some,
    "one counter file": lambda run, _: (run / "metrics" / "counter_0.db").unlink(),
    "one gauge file": lambda run, _: (run / "metrics" / "gauge_livesum_1.db").unlink(),
}
