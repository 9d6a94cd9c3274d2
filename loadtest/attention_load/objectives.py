"""Objectives: what a stage measured, whether it keeps its limits, the knee of a ramp, and the verdict of a run.

Pure, without Locust or a clock. What was not measured is not met: a stage without answers has no latency.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from attention_load.schedule import Stage

REFUSED, RETRIED = "REFUSED", "RETRIED"
"""Request types in Locust's statistics, of refusals and of attempts that another followed: rows of their own keep their
latency out of the answers'."""


@dataclasses.dataclass(frozen=True, slots=True)
class Counts:
    """Totals of a run so far, or of a part of it. Locust rounds the latencies to two digits."""

    seconds: float = 0.0
    requests: int = 0
    failures: int = 0
    refusals: int = 0
    latencies_ms: Counter[int] = dataclasses.field(default_factory=Counter)
    retries: int = 0

    @classmethod
    def read(cls, seconds: float, entries: Iterable[Any]) -> Counts:
        """From Locust's statistics entries, this many seconds into the run."""
        found = list(entries)
        rows = [row for row in found if row.method != RETRIED]
        sent = [row for row in rows if row.method != REFUSED]
        requests, answered = (sum(row.num_requests for row in some) for some in (rows, sent))
        latencies_ms = sum((Counter(row.response_times) for row in sent), Counter[int]())
        failures, retries = sum(row.num_failures for row in sent), sum(row.num_requests for row in found) - requests
        return cls(seconds, requests, failures, requests - answered, latencies_ms, retries)

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, x.name) + getattr(other, x.name) for x in dataclasses.fields(self)))

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, x.name) - getattr(other, x.name) for x in dataclasses.fields(self)))

    def percentile_ms(self, percent: int) -> int | None:
        rank, seen = math.ceil(self.latencies_ms.total() * percent / 100), 0
        for latency_ms, count in sorted(self.latencies_ms.items()):
            seen += count
            if seen >= rank:
                return latency_ms
        return None

    @property
    def rps(self) -> float:
        """Correct answers a second."""
        return (self.requests - self.failures - self.refusals) / self.seconds if self.seconds > 0 else 0.0

    def to_report(self) -> dict[str, Any]:
        figures = {name: getattr(self, name) for name in ("requests", "failures", "refusals", "retries")}
        latencies = {f"p{percent}_ms": self.percentile_ms(percent) for percent in (50, 95, 99)}
        return {"seconds": round(self.seconds, 2), **figures, "rps": round(self.rps, 2), **latencies}


class StageResult(NamedTuple):
    stage: Stage
    counts: Counts

    def to_report(self) -> dict[str, Any]:
        return {"name": self.stage.name, "users": self.stage.users, **self.counts.to_report()}


class Objective(NamedTuple):
    name: str
    wanted: str
    measured: float | str | None
    is_met: bool


def at_most(name: str, measured: float | None, limit: float) -> Objective:
    return Objective(name, f"<= {limit:g}", measured, measured is not None and measured <= limit)


def check(options: argparse.Namespace, judged: Counts, whole: Counts) -> list[Objective]:
    """Latency, refusals and throughput of the judged stages; errors of the whole run."""
    limits = [(percent, getattr(options, f"max_p{percent}_ms")) for percent in (50, 95, 99)]
    found = [at_most(f"p{percent}_ms", judged.percentile_ms(percent), limit) for percent, limit in limits if limit]
    for name, counts, count in (("error", whole, whole.failures), ("refusal", judged, judged.refusals)):
        share = count / counts.requests if counts.requests else None
        found.append(at_most(f"{name}_share", share, getattr(options, f"max_{name}_share")))
    if options.min_rps:
        found.append(Objective("rps", f">= {options.min_rps:g}", round(judged.rps, 2), judged.rps >= options.min_rps))
    return found


def is_within(options: argparse.Namespace, counts: Counts) -> bool:
    """Whether a step of a ramp keeps the objectives. Throughput is left out: the first steps have few users."""
    return all(objective.is_met for objective in check(options, counts, counts) if objective.name != "rps")


def find_knee(options: argparse.Namespace, steps: Sequence[StageResult]) -> StageResult | None:
    """The last step before the first that breaks an objective; None if the first step does."""
    kept = list(itertools.takewhile(lambda step: is_within(options, step.counts), steps))
    return kept[-1] if kept else None


def judge(
    options: argparse.Namespace, results: Sequence[StageResult], whole: Counts, bits: Mapping[str, int], fault: str
) -> dict[str, Any]:
    """The verdict and its figures. A ramp is judged at its knee; a fault of the run itself fails it."""
    judged = [result for result in results if result.stage.is_judged]
    knee = find_knee(options, results) if options.scenario == "ramp" else None
    if options.scenario == "ramp":
        judged = [knee] if knee else judged[:1]
    counts = sum((result.counts for result in judged), Counts())
    compared, wrong = bits.get("compared", 0), bits.get("wrong", 0)
    objectives = check(options, counts, whole)
    if options.check_every:  # a run that compared nothing shows nothing
        objectives.append(Objective("wrong_bits", f"0 of {compared} compared", wrong, compared > 0 and wrong == 0))
    if options.scenario == "ramp":
        at = f"{knee.stage.users} users" if knee else "none"
        objectives.append(Objective("knee", "a step within the objectives", at, knee is not None))
    if fault:
        objectives.append(Objective("run", "no fault", fault, is_met=False))
    missed = [objective.name for objective in objectives if not objective.is_met]
    return {
        "verdict": f"failed: {', '.join(missed)}" if missed else "passed",
        "missed": missed,
        "objectives": [objective._asdict() for objective in objectives],
        "judged": counts.to_report(),
        "whole": whole.to_report(),
        "stages": [result.to_report() for result in results],
        # Without a later step that broke an objective the ramp ended too early to show the knee.
        "knee": knee and {**knee.to_report(), "is_passed": knee is not results[-1]},
        "bits": {"compared": compared, "wrong": wrong},
    }


def lines(report: Mapping[str, Any]) -> list[str]:
    """The report for the terminal; the verdict is the last line."""
    found = [" ".join(f"{name}={figure}" for name, figure in report["judged"].items())]
    if knee := report["knee"]:
        early = "" if knee["is_passed"] else " (the last step still kept the objectives: raise --peak-users)"
        found.append(f"knee: {knee['users']} users, {knee['rps']:g} correct answers/s, p99 {knee['p99_ms']} ms{early}")
    for name, wanted, measured, is_met in (objective.values() for objective in report["objectives"]):
        found.append(f"{'met   ' if is_met else 'MISSED'} {name}: {measured} (wanted {wanted})")
    # A fault may hold a server's text, which must not control the terminal.
    return ["".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in line) for line in (*found, report["verdict"])]
