"""The scenarios as data: each is a list of stages, and the stage at a moment is a pure function of the elapsed time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

HOLD_S = {"smoke": 20.0, "ramp": 10.0, "spike": 20.0, "soak": 3600.0}
SCENARIOS = tuple(HOLD_S)


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """`settle_s` comes first and is not measured. `is_judged`: latency, refusals and throughput have objectives."""

    name: str
    users: int
    settle_s: float
    hold_s: float
    is_judged: bool = True


def stages(scenario: str, *, peak: int, base: int, hold_s: float, steps: int, settle_s: float) -> tuple[Stage, ...]:
    """`settle_s`: how long after a change of users the figures still show the stage before."""
    hold_s = hold_s or HOLD_S.get(scenario, 0.0)
    match scenario:
        case "smoke":
            return (Stage("steady", peak, settle_s + min(3.0, hold_s / 4), hold_s),)
        case "ramp":
            return tuple(Stage(f"{users} users", users, settle_s, hold_s) for users in ramp_users(peak, steps))
        case "spike":
            spike = Stage("spike", peak, settle_s, hold_s, is_judged=False)
            return Stage("before", base, settle_s, hold_s), spike, Stage("after", base, settle_s + hold_s / 4, hold_s)
        case "soak":
            warm_up_s = settle_s + min(30.0, hold_s / 20)
            return tuple(Stage(f"quarter {n}", peak, warm_up_s if n == 1 else 0.0, hold_s / 4) for n in (1, 2, 3, 4))
    raise ValueError(f"--scenario must be one of {', '.join(SCENARIOS)}")


def ramp_users(peak: int, steps: int) -> list[int]:
    """Users of each step: they grow by the same factor up to `peak`; steps that round to the same number are one."""
    return sorted({max(1, round(peak ** (step / steps))) for step in range(1, steps + 1)})


def position(schedule: Sequence[Stage], elapsed_s: float) -> tuple[int, float] | None:
    """The number of the current stage and the seconds since it began; None after the last."""
    for number, stage in enumerate(schedule):
        if elapsed_s < stage.settle_s + stage.hold_s:
            return number, elapsed_s
        elapsed_s -= stage.settle_s + stage.hold_s
    return None
