"""Knee: the last step of a ramp at which goodput still grew and the latency objective held.

Laws: pure; a step that held the objective without growth, or grew without holding it, is beyond the knee; after two such
steps in a row nothing that follows counts, since noise would find growth again sooner or later.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

LEAST_GROWTH = 0.05
"""Steps add more users than that, and two runs of one load differ by less."""

MISSES_THAT_END = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """`latency_ms`: the quantile that the objective is about; None where nothing was answered."""

    users: int
    goodput: float
    latency_ms: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class Knee:
    """`number` of the step; `is_passed`: a later step showed that it is the knee and not just the end of the ramp."""

    number: int
    is_passed: bool


def find_knee(steps: Sequence[Step], objective_ms: float) -> Knee | None:
    """None: not even the first steps held the objective."""
    knee, best, misses = None, 0.0, 0
    for number, step in enumerate(steps):
        holds = step.latency_ms is not None and step.latency_ms <= objective_ms
        if holds and step.goodput > best * (1 + LEAST_GROWTH):
            knee, best, misses = number, step.goodput, 0
        else:
            misses += 1
        if misses == MISSES_THAT_END:
            break
    return None if knee is None else Knee(knee, is_passed=misses > 0)


def is_beyond(steps: Sequence[Step], objective_ms: float) -> bool:
    """Whether the ramp has seen enough and may stop."""
    knee = find_knee(steps, objective_ms)
    return len(steps) - (0 if knee is None else knee.number + 1) >= MISSES_THAT_END
