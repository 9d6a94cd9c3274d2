"""Figure: one thing the service owes, measured; what every figure gets, and how large a form of it is asked for.

Invariants: a figure starts what it needs and ends it; it draws everything random from the seed that it is given; it answers with
rows, never with an exception for what the service did wrong.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.torture.report import Row


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """How much of a figure to run: `share` of its full count."""

    share: float
    soak_s: float
    seed: int
    directory: Path
    schema_tool: Path | None = None

    def count(self, full: int, least: int = 1) -> int:
        return max(least, round(full * self.share))

    def seconds(self, full: float, least: float) -> float:
        return max(least, full * self.share)

    def random(self, name: str) -> random.Random:
        return random.Random(f"{self.seed} {name}")

    def room(self, name: str) -> Path:
        """A directory of its own for one start of the service."""
        path = self.directory / name
        number = 1
        while path.exists():
            number += 1
            path = self.directory / f"{name}-{number}"
        path.mkdir(parents=True)
        return path


Figure = Callable[[Form], Iterator[Row]]
"""Measures one of them; yields its rows as they become known."""
