"""Summary: medians and quartiles of samples over the rounds, ratios of two subjects within a round, and the targets of both.

Invariants: functions are pure; a ratio is formed within a round and its median taken over the rounds, because a slow minute of
the machine slows both subjects; a failed sample is counted and enters no figure. A target that was not measured is neither met
nor missed. Memory counts every process that was started, the supervisor too; MB are read as MiB.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.results import Part, newest

Samples = Sequence[Mapping[str, Any]]
# These tell samples of one part apart; everything else in a sample is a figure.
KEYS = ("subject", "workload", "point")
DIGITS = 6


def spread(values: Iterable[float]) -> list[float]:
    """Return median, lower and upper quartile. Extremes of many short rounds only show how the machine stumbled."""
    found = list(values)
    lower, median, upper = statistics.quantiles(found * 2 if len(found) == 1 else found, n=4, method="inclusive")
    return [float(f"{x:.{DIGITS}g}") for x in (median, lower, upper)]


def good(samples: Samples, **wanted: object) -> list[Mapping[str, Any]]:
    """Return the samples with these keys that did not fail."""
    return [x for x in samples if "failed" not in x and all(x.get(key) == value for key, value in wanted.items())]


def rows(samples: Samples) -> list[dict[str, Any]]:
    """Return a row for each subject, workload and point: its keys, counts of rounds and failures, each figure's spread.

    Rows are sorted by subject, because each round draws a new order; points keep the order of measurement.
    """
    found: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for sample in samples:
        found.setdefault(tuple(sample.get(key) for key in KEYS), []).append(sample)
    return [_row(key, found[key]) for key in sorted(found, key=lambda key: key[0])]


def _row(key: tuple[Any, ...], group: Samples) -> dict[str, Any]:
    succeeded = good(group)
    row = {**dict(zip(KEYS, key, strict=True)), "rounds": len(succeeded), "failed": len(group) - len(succeeded)}
    figures = dict.fromkeys(name for sample in succeeded for name in sample if name not in (*KEYS, "round"))
    return row | {name: spread(sample[name] for sample in succeeded if name in sample) for name in figures}


def ratio(samples: Samples, figure: str, one: str, other: str, **wanted: object) -> list[float] | None:
    """Return the spread of one subject's figure over another's; None if no round has both."""
    ours, theirs = (
        {x["round"]: x[figure] for x in good(samples, subject=name, **wanted) if figure in x} for name in (one, other)
    )
    both = [number for number in ours if theirs.get(number)]
    return spread(ours[number] / theirs[number] for number in both) if both else None


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """The figure of subject `of`, divided by that of `over` if given, is at least or at most `limit`.

    `on` is in the names of the processors that have this target: a model or an instruction set.
    """

    part: str
    what: str
    sign: str
    limit: float
    over: str | None = None
    figure: str = "tok_s"
    of: str = "service"
    on: str = ""

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
    Target("w1", _W1, "≥", 1.5, "mosec", on="AMD"),
    Target("w1", _W1, "≥", 1.25, "mosec", on="Intel"),
    Target("w2", _W2, "≥", 0.75, "bound"),
    Target("w2", _W2, "≥", 1.5, "mosec", on="AMD"),
    Target("w2", _W2, "≥", 1.25, "mosec", on="Intel"),
    Target("w3", _W3, "≥", 0.70, "bound"),
    Target("w3", _W3, "≥", 1.5, "mosec", on="AMD"),
    Target("w3", _W3, "≥", 1.25, "mosec", on="Intel"),
    Target("w2json", _LISTS, "≥", 1.7, "triton"),
    Target("w2json", _LISTS, "≥", 6, "naive"),
    Target("w2c1", _P50, "≤", 0.9, "naive", "p50_ms"),
    Target("w2c1", _P50, "≤", 0.3, "mosec", "p50_ms"),
    Target("w2c1", _P50, "≤", 0.3, "triton", "p50_ms"),
    Target("bfloat16", "W1 in bfloat16", "≥", 1.4, "service", of="service bfloat16"),
    Target("bfloat16", "W1 in bfloat16", "≥", 3, "service", of="service bfloat16", on="amx_bf16"),
    Target("w2bfloat16", "W2 in bfloat16", "≥", 1.5, "service", of="service bfloat16", on="amx_bf16"),
    Target("attention", "attention without a layer, 16 tokens", "≥", 1.0, "attend", "rps"),
    Target("memory", f"{_RESIDENT} (MiB)", "≤", 350, None, "peak_rss_mib", "service x1"),
    Target("memory", f"{_PSS} (MiB)", "≤", 650, None, "peak_pss_mib", "service x2"),
    Target("memory", _PSS, "≤", 1, "mosec", "peak_pss_mib", "service x2"),
    Target("memory", _PSS, "≤", 1, "triton", "peak_pss_mib", "service x2"),
    Target("memory", _PSS, "≤", 1, "litserve", "peak_pss_mib", "service x2"),
)


def judged(parts: Mapping[str, Part]) -> list[dict[str, Any]]:
    """Return the verdict of each target that the part's processor has; of a part that was not measured, the newest one's."""
    processors = {name: part.processor for name, part in parts.items()}
    other = newest(parts).processor if parts else ""
    return [
        target.judge(parts[target.part].samples if target.part in parts else ())
        for target in TARGETS
        if target.on in processors.get(target.part, other)
    ]
