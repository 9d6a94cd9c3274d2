"""Verdict: measured against objectives; one word in the end, and which objectives it was that failed.

Laws: pure; what was not measured is not met (a phase without answers has no latency to praise); latency, goodput and refusals
hold where the shape is judged, errors and bits everywhere; a ramp is judged at its knee.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from attention_load.course import Window
from attention_load.knee import Knee, Step, find_knee
from attention_load.plan import Plan
from attention_load.tally import Slot, Tally


@dataclasses.dataclass(frozen=True, slots=True)
class Objective:
    name: str
    wanted: str
    measured: float | str | None
    is_met: bool


@dataclasses.dataclass(slots=True)
class Measured:
    """A span of the run; latencies in milliseconds, None where nothing was answered."""

    slot: Slot = dataclasses.field(default_factory=Slot)
    seconds: float = 0.0

    def merge(self, other: Measured) -> None:
        self.slot.merge(other.slot)
        self.seconds += other.seconds

    @property
    def goodput(self) -> float:
        return self.slot.counts["good"] / self.seconds if self.seconds else 0.0

    def share(self, count: int) -> float | None:
        return count / self.slot.total if self.slot.total else None

    def to_report(self) -> dict[str, Any]:
        counts = self.slot.counts
        return {
            "seconds": round(self.seconds, 2),
            "requests": self.slot.total,
            "right": counts["right"],
            "good": counts["good"],
            "refused": counts["refused"],
            "failed": self.slot.failed,
            "requests_per_s": round(self.slot.total / self.seconds, 2) if self.seconds else None,
            "goodput_per_s": round(self.goodput, 2),
            **{f"p{p}_ms": rounded(self.slot.quantile_ms(p / 100)) for p in (50, 95, 99)},
        }


@dataclasses.dataclass(slots=True)
class Verdict:
    objectives: list[Objective]
    phases: list[tuple[Window, Measured]]
    judged: Measured
    whole: Measured
    knee: Knee | None

    @property
    def missed(self) -> list[str]:
        return [objective.name for objective in self.objectives if not objective.is_met]

    @property
    def word(self) -> str:
        return "failed" if self.missed else "passed"


def measure(windows: Sequence[Window], tally: Tally) -> list[tuple[Window, Measured]]:
    """Every window that has ended."""
    return [
        (window, Measured(*tally.between(window.begin_s, window.end_s)))
        for window in windows
        if window.end_s is not None
    ]


def steps_of(phases: Sequence[tuple[Window, Measured]]) -> list[Step]:
    return [Step(window.phase.users, found.goodput, found.slot.quantile_ms(0.99)) for window, found in phases]


def judge(plan: Plan, windows: Sequence[Window], tally: Tally, faults: Sequence[str]) -> Verdict:
    """`faults`: what went wrong with the run itself, each of which fails it."""
    phases = measure(windows, tally)
    knee = find_knee(steps_of(phases), plan.objectives.limit_ms) if plan.shape == "ramp" else None
    judged = Measured()
    for number, (window, measured) in enumerate(phases):
        if number == knee.number if plan.shape == "ramp" and knee else window.phase.is_judged:
            judged.merge(measured)
    whole = Measured(*tally.whole())
    objectives = [*_objectives(plan, judged, whole), _bits(plan, tally)]
    if plan.shape == "ramp":
        at = f"{phases[knee.number][0].phase.users} users" if knee else "none"
        objectives.append(
            Objective("knee", f"a step with p99 <= {plan.objectives.limit_ms:g} ms", at, knee is not None)
        )
    objectives += [Objective("run", "without a fault", fault, is_met=False) for fault in faults]
    return Verdict(objectives, phases, judged, whole, knee)


def _objectives(plan: Plan, judged: Measured, whole: Measured) -> list[Objective]:
    wanted = plan.objectives
    latencies = [(50, wanted.p50_ms), (95, wanted.p95_ms), (99, wanted.p99_ms)]
    found = [_at_most(f"p{p}_ms", judged.slot.quantile_ms(p / 100), limit) for p, limit in latencies if limit]
    found.append(_at_most("error_ratio", whole.share(whole.slot.failed), wanted.error_ratio))
    found.append(_at_most("refusal_ratio", judged.share(judged.slot.counts["refused"]), wanted.refusal_ratio))
    if wanted.goodput:
        met = judged.goodput >= wanted.goodput
        found.append(Objective("goodput_per_s", f">= {wanted.goodput:g}", rounded(judged.goodput), met))
    return found


def _at_most(name: str, measured: float | None, limit: float) -> Objective:
    return Objective(name, f"<= {limit:g}", rounded(measured), measured is not None and measured <= limit)


def _bits(plan: Plan, tally: Tally) -> Objective:
    if not plan.check_every:
        return Objective("wrong_bits", "not compared", None, is_met=True)
    # A run that compared nothing shows nothing.
    return Objective("wrong_bits", "0 of those compared", tally.wrong, is_met=tally.checked > 0 and tally.wrong == 0)


def rounded(number: float | None) -> float | None:
    """To four figures: more are noise."""
    return None if number is None else float(f"{number:.4g}")
