"""python -m benchmarks.report [--check] [RESULTS]: the results as text: the section of `docs/performance.md` and the README's.

Laws: what stands between the markers is generated and nothing else is touched; `--check` writes nothing and fails where a
page differs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.claims import claims
from benchmarks.results import LATEST, Part, load
from benchmarks.tables import performance

ROOT = Path(__file__).parents[1]
# Page, marker, what stands between.
PAGES: tuple[tuple[Path, str, Callable[[Mapping[str, Part]], str]], ...] = (
    (ROOT / "docs" / "performance.md", "bench", performance),
    (ROOT / "README.md", "claims", claims),
)


def printed(parts: Mapping[str, Part]) -> str:
    """For the terminal: the page without its pictures."""
    return re.sub(r"!\[.*\n\n", "", performance(parts))


def with_section(text: str, marker: str, section: str) -> str:
    """The page with this between its markers; ValueError where it has none."""
    pattern = re.compile(rf"(<!-- {marker} -->\n).*?(<!-- /{marker} -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"there are no markers <!-- {marker} --> … <!-- /{marker} -->")
    return pattern.sub(lambda found: f"{found[1]}{section}\n{found[2]}", text)


def stale(parts: Mapping[str, Part]) -> dict[Path, str]:
    """What each page that differs would have to be."""
    found = {}
    for page, marker, section in PAGES:
        text = page.read_text(encoding="utf-8")
        right = with_section(text, marker, section(parts))
        if right != text:
            found[page] = right
    return found


def main(arguments: list[str]) -> int:
    paths = [Path(argument) for argument in arguments if argument != "--check"]
    found = stale(load(paths[0] if paths else LATEST))
    for page, right in found.items():
        if "--check" in arguments:
            print(f"{page.relative_to(ROOT)} is not what the results say: `make report`")
        else:
            page.write_text(right, encoding="utf-8")
            print(f"{page.relative_to(ROOT)} written")
    return 1 if found and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
