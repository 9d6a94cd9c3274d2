"""Report: what was measured, as text. (The table of targets only, so far.)"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.results import Part
from benchmarks.targets import judged


def printed(parts: Mapping[str, Part]) -> str:
    """The targets, for the terminal."""
    rows = judged({name: part.samples for name, part in parts.items()})
    return "\n".join(f"{row.part}: {row.what} {row.target}: {row.measured} {row.is_met}" for row in rows)
