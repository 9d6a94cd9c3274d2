"""Targets: the speed that this service is to have, and whether it has.

Laws: pure; a target that was not measured is neither met nor missed and says so; medians decide, the spread is shown.
Memory is of everything that was started, the supervisor included; MB are read as MiB, as the first measurements of the
peers wrote them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from benchmarks.summary import Samples, good, ratio, spread


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """Ours (`of`) over another subject's figure, or, where `over` is None, the figure itself."""

    part: str
    what: str
    figure: str
    of: str
    over: str | None
    is_least: bool
    limit: float


@dataclasses.dataclass(frozen=True, slots=True)
class Judged:
    """`measured` is median, lower and upper quartile over the rounds; `is_met` None: not measured."""

    part: str
    what: str
    target: str
    measured: list[float] | None
    is_met: bool | None


def _least(part: str, what: str, over: str, limit: float) -> Target:
    return Target(part, what, "tok_s", "service", over, is_least=True, limit=limit)


def _p50(over: str, limit: float) -> Target:
    return Target("w2c1", "one client, 16 tokens: p50", "p50_ms", "service", over, is_least=False, limit=limit)


_W1, _W2, _W3 = "W1, mixed lengths", "W2, 16 tokens", "W3, mixed lengths with weights"
_LISTS = "W2 as nested-list JSON"
TARGETS = (
    _least("w1", _W1, "bound", 0.90),
    _least("w1", _W1, "mosec", 1.05),
    _least("w2", _W2, "bound", 0.75),
    _least("w2", _W2, "mosec", 1.10),
    _least("w3", _W3, "bound", 0.70),
    _least("w3", _W3, "mosec", 1.10),
    _least("w2json", _LISTS, "triton", 1.7),
    _least("w2json", _LISTS, "naive", 6),
    _p50("naive", 1.15),
    _p50("mosec", 0.3),
    _p50("triton", 0.3),
    Target("bfloat16", "W1 in bfloat16", "tok_s", "service bfloat16", "service", is_least=True, limit=1.4),
    Target(
        "memory", "one process, resident at peak (MiB)", "peak_rss_mib", "service x1", None, is_least=False, limit=350
    ),
    Target("memory", "two processes, PSS at peak (MiB)", "peak_pss_mib", "service x2", None, is_least=False, limit=650),
    *(
        Target("memory", "two processes, PSS at peak", "peak_pss_mib", "service x2", peer, is_least=False, limit=1)
        for peer in ("mosec", "triton", "litserve")
    ),
)


def judged(parts: Mapping[str, Samples]) -> list[Judged]:
    return [_judged(target, parts.get(target.part, ())) for target in TARGETS]


def _judged(target: Target, samples: Samples) -> Judged:
    sign = "≥" if target.is_least else "≤"
    over = f" × {target.over}" if target.over else ""
    told = f"{sign} {target.limit:g}{over}"
    if target.over is None:
        values = [x[target.figure] for x in good(samples, subject=target.of)]
        measured = spread(values) if values else None
    else:
        measured = ratio(samples, target.figure, target.of, target.over)
    if measured is None:
        return Judged(target.part, target.what, told, None, None)
    is_met = measured[0] >= target.limit if target.is_least else measured[0] <= target.limit
    return Judged(target.part, target.what, told, measured, is_met)
