"""python -m benchmarks.report: write the generated sections of `docs/performance.md` and README.md from the results.

Invariant: only what stands between the markers is replaced.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from benchmarks.claims import claims
from benchmarks.results import LATEST, Part, load
from benchmarks.tables import performance

ROOT = Path(__file__).parents[1]
# Page, name of its markers, and the function that writes the section.
PAGES = ((ROOT / "docs" / "performance.md", "bench", performance), (ROOT / "README.md", "claims", claims))


def with_section(text: str, marker: str, section: str) -> str:
    """Return the page with `section` between its markers; ValueError if it has none."""
    before, start, rest = text.partition(f"<!-- {marker} -->\n")
    _, end, after = rest.partition(f"<!-- /{marker} -->")
    if not end:
        raise ValueError(f"the page has no markers <!-- {marker} --> … <!-- /{marker} -->")
    return f"{before}{start}{section}\n{end}{after}"


def stale(parts: Mapping[str, Part]) -> dict[Path, str]:
    """Return the new text of each page that differs from the results."""
    pages = {page: page.read_text(encoding="utf-8") for page, _, _ in PAGES}
    new = {page: with_section(pages[page], marker, section(parts)) for page, marker, section in PAGES}
    return {page: text for page, text in new.items() if text != pages[page]}


def printed(parts: Mapping[str, Part]) -> str:
    """Return the section of `docs/performance.md` without its pictures, for a terminal."""
    return re.sub(r"!\[.*\n\n", "", performance(parts))


if __name__ == "__main__":
    for path, text in stale(load(LATEST)).items():
        path.write_text(text, encoding="utf-8")
        print(f"{path.relative_to(ROOT)} written")
