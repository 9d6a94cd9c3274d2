"""Summary: samples become medians over the rounds, and ratios of two subjects that were measured in the same round.

Laws: pure; a ratio is formed within a round and its median taken over the rounds, for what slows a machine for a minute
slows both; a sample that failed is counted and takes no part.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Samples = Sequence[Mapping[str, Any]]
# What tells samples of one part apart; everything else in a sample is a figure.
KEYS = ("subject", "workload", "point")
_NO_FIGURES = {*KEYS, "round", "failed"}
DIGITS = 6


def spread(values: Iterable[float]) -> list[float]:
    """Median, lower and upper quartile: of many short rounds the outermost say how the machine stumbled, no more."""
    found = list(values)
    lower, median, upper = statistics.quantiles(found * 2 if len(found) == 1 else found, n=4, method="inclusive")
    return [_rounded(x) for x in (median, lower, upper)]


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def good(samples: Samples, **wanted: object) -> list[Mapping[str, Any]]:
    """The samples with these keys that did not fail."""
    return [x for x in samples if "failed" not in x and all(x.get(key) == value for key, value in wanted.items())]


def rows(samples: Samples) -> list[dict[str, Any]]:
    """One row for each thing measured: its keys, how many rounds, how many failed, and each figure's spread; by subject, whoever
    had the first turn.
    """
    found: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for sample in samples:
        found.setdefault(tuple(sample.get(key) for key in KEYS), []).append(sample)
    return [_row(key, found[key]) for key in sorted(found, key=lambda key: key[0])]


def _row(key: tuple[Any, ...], group: list[Mapping[str, Any]]) -> dict[str, Any]:
    kept = good(group)
    row = {**dict(zip(KEYS, key, strict=True)), "rounds": len(kept), "failed": len(group) - len(kept)}
    names = list(dict.fromkeys(name for sample in kept for name in sample if name not in _NO_FIGURES))
    for name in names:
        values = [sample[name] for sample in kept if isinstance(sample.get(name), int | float)]
        if values:
            row[name] = spread(values)
    return row


def ratio(samples: Samples, figure: str, one: str, other: str, **wanted: object) -> list[float] | None:
    """Spread of one subject's figure over another's, round by round; None where no round has both."""
    values = {
        name: {x["round"]: x[figure] for x in good(samples, subject=name, **wanted) if figure in x}
        for name in (one, other)
    }
    both = [n for n in values[one] if values[other].get(n)]
    return spread(values[one][n] / values[other][n] for n in both) if both else None


def ratios(parts: Mapping[str, Samples], subject: str = "service") -> list[dict[str, Any]]:
    """Of the parts without points: our figures over everybody else's."""
    found = []
    for name, samples in parts.items():
        for other in sorted({x["subject"] for x in samples if x.get("point") is None} - {subject}):
            for figure in ("tok_s", "p50_ms", "p99_ms"):
                value = ratio(samples, figure, subject, other)
                if value is not None:
                    found.append({"part": name, "figure": figure, "of": subject, "over": other, "ratio": value})
    return found
