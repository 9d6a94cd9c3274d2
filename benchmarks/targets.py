"""Targets: the speed and memory that this service aims at, and whether the results meet them.

Invariants: functions are pure; a target that was not measured is neither met nor missed; the median decides. Memory counts
every process that was started, the supervisor too; MB are read as MiB, as in the first measurements of the peers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from benchmarks.summary import Samples, good, ratio, spread


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """The figure of subject `of`, divided by that of `over` if given, is at least or at most `limit`."""

    part: str
    what: str
    sign: str
    limit: float
    over: str | None = None
    figure: str = "tok_s"
    of: str = "service"

    def judge(self, samples: Samples) -> dict[str, Any]:
        """Return part, what, target, measured (median and quartiles, or None) and is_met (None if not measured)."""
        if self.over is not None:
            measured = ratio(samples, self.figure, self.of, self.over)
        else:
            values = [x[self.figure] for x in good(samples, subject=self.of)]
            measured = spread(values) if values else None
        is_met = None
        if measured is not None:
            is_met = measured[0] >= self.limit if self.sign == "≥" else measured[0] <= self.limit
        target = f"{self.sign} {self.limit:g}" + (f" × {self.over}" if self.over else "")
        return {"part": self.part, "what": self.what, "target": target, "measured": measured, "is_met": is_met}


_W1, _W2, _W3 = "W1, mixed lengths", "W2, 16 tokens", "W3, mixed lengths with weights"
_LISTS, _P50 = "W2 as nested-list JSON", "one client, 16 tokens: p50"
_RESIDENT, _PSS = "one process, resident at peak", "two processes, PSS at peak"
TARGETS = (
    Target("w1", _W1, "≥", 0.90, "bound"),
    Target("w1", _W1, "≥", 1.05, "mosec"),
    Target("w2", _W2, "≥", 0.75, "bound"),
    Target("w2", _W2, "≥", 1.10, "mosec"),
    Target("w3", _W3, "≥", 0.70, "bound"),
    Target("w3", _W3, "≥", 1.10, "mosec"),
    Target("w2json", _LISTS, "≥", 1.7, "triton"),
    Target("w2json", _LISTS, "≥", 6, "naive"),
    Target("w2c1", _P50, "≤", 1.15, "naive", "p50_ms"),
    Target("w2c1", _P50, "≤", 0.3, "mosec", "p50_ms"),
    Target("w2c1", _P50, "≤", 0.3, "triton", "p50_ms"),
    Target("bfloat16", "W1 in bfloat16", "≥", 1.4, "service", of="service bfloat16"),
    Target("attention", "attention without a layer, 16 tokens", "≥", 1.0, "attend", "rps"),
    Target("memory", f"{_RESIDENT} (MiB)", "≤", 350, None, "peak_rss_mib", "service x1"),
    Target("memory", f"{_PSS} (MiB)", "≤", 650, None, "peak_pss_mib", "service x2"),
    Target("memory", _PSS, "≤", 1, "mosec", "peak_pss_mib", "service x2"),
    Target("memory", _PSS, "≤", 1, "triton", "peak_pss_mib", "service x2"),
    Target("memory", _PSS, "≤", 1, "litserve", "peak_pss_mib", "service x2"),
)


def judged(parts: Mapping[str, Samples]) -> list[dict[str, Any]]:
    return [target.judge(parts.get(target.part, ())) for target in TARGETS]
