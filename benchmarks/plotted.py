"""Plotted: which rows each plot draws, and their digest, which the picture carries so that a test sees an old picture.

Must not know: how they are drawn (`plots.py`, in an environment of its own).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from benchmarks.results import Part
from benchmarks.summary import rows


@dataclasses.dataclass(frozen=True, slots=True)
class Plot:
    file: str
    figures: tuple[str, ...]


PLOTS = {
    "offered": Plot("latency-over-load.svg", ("offered_rps", "p50_ms", "p99_ms")),
    "batch": Plot("throughput-by-batch.svg", ("tok_s",)),
    "concurrency": Plot("throughput-by-callers.svg", ("rps", "p99_ms")),
}


def drawn(parts: Mapping[str, Part], name: str) -> list[dict[str, Any]]:
    """The rows of one plot, with the figures that it draws."""
    part = parts.get(name)
    kept = ("workload", "point", *PLOTS[name].figures)
    found = [] if part is None else [row for row in rows(part.samples) if row["subject"] == "service"]
    return [{key: row[key] for key in kept} for row in found if all(key in row for key in kept)]


def digest(found: list[dict[str, Any]]) -> str:
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]
