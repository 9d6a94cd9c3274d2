"""Plan: what a run is to do, read once from Locust's parsed options; the one table of our options.

Laws: every option has an environment name, so that a container needs no command line; a plan is plain values, so that the
master sends its own to the workers; the key never reaches a report.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, Protocol

from attention_load.phases import SHAPES, Phase, shape_phases, total_seconds

SLOTS = 2000
"""As many spans of time as a run is cut into at most: what a soak keeps in memory does not grow with its length."""


@dataclasses.dataclass(frozen=True, slots=True)
class Objectives:
    """0 of a latency or of goodput: not asked for. Ratios are the most that is permitted."""

    p50_ms: float
    p95_ms: float
    p99_ms: float
    error_ratio: float
    refusal_ratio: float
    goodput: float
    good_within_ms: float

    @property
    def limit_ms(self) -> float:
        """An answer within it counts as goodput; of a ramp the 99th percentile must keep it."""
        return self.good_within_ms or self.p99_ms or float("inf")


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    shape: str
    peak_users: int
    base_users: int
    hold_s: float
    steps: int
    layer_names: str
    layers_dir: str
    long_tokens: int
    check_every: int
    pace: float
    request_timeout_s: float
    api_key: str
    seed: int
    slo_p50_ms: float
    slo_p95_ms: float
    slo_p99_ms: float
    slo_error_ratio: float
    slo_refusal_ratio: float
    slo_goodput: float
    good_within_ms: float
    json_report: str
    run: int = 0
    """Which run of this master it is; tells late messages of an earlier one apart."""

    @classmethod
    def read(cls, options: argparse.Namespace) -> Plan:
        """Raises ValueError that names the option."""
        given: dict[str, Any] = {field.name: getattr(options, field.name, 0) for field in dataclasses.fields(cls)}
        plan = cls(**given)
        for option, kind, _, _ in OPTIONS:
            if kind is not str and getattr(plan, option) < 0:
                raise ValueError(f"{flag(option)} must not be negative")
        for option in ("peak_users", "base_users", "steps", "long_tokens"):
            if getattr(plan, option) < 1:
                raise ValueError(f"{flag(option)} must be at least 1")
        if plan.shape == "ramp" and plan.objectives.limit_ms == float("inf"):
            raise ValueError("a ramp needs --slo-p99-ms or --good-within-ms: the knee is where it breaks")
        return plan

    def to_message(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def to_report(self) -> dict[str, Any]:
        return {name: value for name, value in self.to_message().items() if name not in {"api_key", "run"}}

    @property
    def phases(self) -> tuple[Phase, ...]:
        return shape_phases(
            self.shape, peak=self.peak_users, base=self.base_users, hold_s=self.hold_s, steps=self.steps
        )

    @property
    def slot_s(self) -> float:
        return max(0.5, total_seconds(self.phases) / SLOTS)

    @property
    def objectives(self) -> Objectives:
        return Objectives(
            self.slo_p50_ms,
            self.slo_p95_ms,
            self.slo_p99_ms,
            self.slo_error_ratio,
            self.slo_refusal_ratio,
            self.slo_goodput,
            self.good_within_ms,
        )


OPTIONS: tuple[tuple[str, type[int | float | str], Any, str], ...] = (
    ("shape", str, "smoke", "smoke, ramp, spike or soak"),
    ("peak_users", int, 8, "users at the top of the shape"),
    ("base_users", int, 2, "users before and after a spike"),
    ("hold_s", float, 0.0, "seconds that the load is held, of a ramp each step; 0 = the shape's own"),
    ("steps", int, 8, "steps of a ramp"),
    ("layer_names", str, "", "layers to ask, by comma; empty = all that the target serves"),
    ("layers_dir", str, "", "directory of the stored layers, to check references against float64; empty = no check"),
    ("long_tokens", int, 512, "rows of a long request"),
    ("check_every", int, 5, "of each kind one answer in so many is compared bit for bit; 0 = none"),
    ("pace", float, 0.0, "requests a second of each user (constant throughput); 0 = the next one after each answer"),
    ("request_timeout_s", float, 30.0, "how long a user waits for an answer"),
    ("api_key", str, "", "key of the target"),
    ("seed", int, 20261121, "of tensors and of the order of requests"),
    ("slo_p50_ms", float, 0.0, "objective: median latency of right answers; 0 = none"),
    ("slo_p95_ms", float, 0.0, "objective: 95th percentile; 0 = none"),
    ("slo_p99_ms", float, 1000.0, "objective: 99th percentile; 0 = none"),
    ("slo_error_ratio", float, 0.0, "objective: errors and wrong answers of all requests, at most"),
    ("slo_refusal_ratio", float, 0.01, "objective: 429 and 503 of all requests, at most"),
    ("slo_goodput", float, 0.0, "objective: right answers in time a second, at least; 0 = none"),
    ("good_within_ms", float, 0.0, "latency within which an answer counts as goodput; 0 = --slo-p99-ms"),
    ("json_report", str, "", "file for the report of objectives and verdict; empty = none"),
)


def flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


class Parser(Protocol):
    def add_argument(self, name: str, /, **settings: Any) -> Any: ...


def add_options(parser: Parser) -> None:
    """Each also as `LOADTEST_…` in the environment; Locust's page shows all but the key and the report's path."""
    for option, kind, default, meaning in OPTIONS:
        choices = {"choices": list(SHAPES)} if option == "shape" else {}
        parser.add_argument(
            flag(option),
            type=kind,
            default=default,
            env_var=f"LOADTEST_{option.upper()}",
            help=meaning,
            include_in_web_ui=option not in {"api_key", "json_report"},
            **choices,
        )
