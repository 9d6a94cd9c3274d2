"""Summary: medians and quartiles of samples over the rounds, and ratios of two subjects within a round.

Invariants: functions are pure; a ratio is formed within a round and its median taken over the rounds, because a slow minute of
the machine slows both subjects; a failed sample is counted and enters no figure.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

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
