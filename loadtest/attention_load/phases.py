"""Shapes as data: a shape is a list of phases, and how many users there are is a pure function of time.

Laws: no clock and no Locust here; a phase lasts as long as its users take to come or go, and then `hold_s`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

SHAPES = ("smoke", "ramp", "spike", "soak")
HOLD_S = {"smoke": 20.0, "ramp": 10.0, "spike": 20.0, "soak": 3600.0}
"""How long a shape holds its load where nothing is said; of a ramp each step, of a spike each of its parts."""

MAX_RATE = 100.0
"""Users that come or go in a second; above it Locust itself warns."""


@dataclasses.dataclass(frozen=True, slots=True)
class Phase:
    """`is_judged`: the objectives of latency, goodput and refusals hold in it; errors and bits count in all."""

    name: str
    users: int
    hold_s: float
    rate: float
    change_s: float
    is_judged: bool

    @property
    def seconds(self) -> float:
        return self.change_s + self.hold_s


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A phase before it is known how many users there were before it."""

    name: str
    users: int
    hold_s: float
    is_judged: bool = True


def shape_phases(shape: str, *, peak: int, base: int, hold_s: float, steps: int) -> tuple[Phase, ...]:
    """`hold_s` of 0 is the shape's own."""
    hold_s = hold_s or HOLD_S.get(shape, 0.0)
    match shape:
        case "smoke":
            parts = [Part("warm-up", peak, min(3.0, hold_s / 4), is_judged=False), Part("steady", peak, hold_s)]
        case "ramp":
            parts = [Part(f"{users} users", users, hold_s) for users in ramp_users(peak, steps)]
        case "spike":
            parts = [
                Part("before", base, hold_s),
                Part("spike", peak, hold_s, is_judged=False),
                Part("recovery", base, hold_s / 4, is_judged=False),
                Part("after", base, hold_s),
            ]
        case "soak":
            quarters = [Part(f"quarter {n}", peak, hold_s / 4) for n in (1, 2, 3, 4)]
            parts = [Part("warm-up", peak, min(30.0, hold_s / 20), is_judged=False), *quarters]
        case _:
            raise ValueError(f"shape must be one of {', '.join(SHAPES)}")
    return tuple(_following(parts))


def ramp_users(peak: int, steps: int) -> list[int]:
    """Users of each step, growing by the same factor up to `peak`; steps that round to the same number are one."""
    return sorted({max(1, round(peak ** (step / steps))) for step in range(1, steps + 1)})


def _following(parts: Iterable[Part]) -> Iterable[Phase]:
    before, rate = 0, 1.0
    for part in parts:
        change = abs(part.users - before)
        if change:  # else the same rate again: Locust takes another one for a change of load
            rate = min(float(change), MAX_RATE)
        yield Phase(part.name, part.users, part.hold_s, rate, math.ceil(change / rate), part.is_judged)
        before = part.users


def phase_at(phases: Sequence[Phase], elapsed_s: float) -> int | None:
    """The number of the phase at this time; None when all are over."""
    end = 0.0
    for number, phase in enumerate(phases):
        end += phase.seconds
        if elapsed_s < end:
            return number
    return None


def total_seconds(phases: Sequence[Phase]) -> float:
    return sum(phase.seconds for phase in phases)
