"""docs/gpu.md is generated from the last results of `make gpu`, and names every part with its limit."""

import re

from benchmarks.gpu import LIMITS
from benchmarks.gpu_page import PAGE, load, section
from benchmarks.report import with_section

TEXT = PAGE.read_text(encoding="utf-8")


def test_the_page_matches_the_results():
    """`make gpu-page` writes it."""
    assert with_section(TEXT, "gpu", section(load())) == TEXT


def test_results_are_of_a_card_and_of_a_clean_commit():
    found = load()
    assert found is None or (not found["dry"] and re.fullmatch(r"[0-9a-f]{7,}", found["commit"]))


def test_the_page_names_every_part_with_its_limit():
    limits = dict(re.findall(r"^\| `(\w+)` \|.*\| (\d+) \|$", TEXT, re.MULTILINE))
    served = [limit for name, limit in LIMITS.items() if name.startswith("serve-")]
    assert {name: int(limit) for name, limit in limits.items()} == {
        name: limit for name, limit in LIMITS.items() if not name.startswith("serve-")
    }
    assert f"| {', '.join(map(str, served))} |" in TEXT
