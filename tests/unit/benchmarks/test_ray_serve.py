"""The section of docs/ray.md is written from the results alone."""

from benchmarks.ray_serve import PROXY, RAY, SERVE
from benchmarks.results import load
from tests.unit.benchmarks.doubles import part, sample


def test_a_row_has_its_share_of_serve():
    rps = {SERVE: 1000.0, PROXY: 250.0}
    text = RAY.section(
        {"ray": part("ray", [sample(0, name, 0) | {"workload": "w2", "rps": x} for name, x in rps.items()])}
    )
    row = next(line for line in text.splitlines() if line.startswith(f"| {PROXY} "))
    assert row.startswith(f"| {PROXY} | 250 |")
    assert row.endswith("| 0.25 |")


def test_the_page_has_the_last_results():
    """`make bench-ray` writes both."""
    parts = load(RAY.results)
    assert RAY.section({}) == RAY.nothing
    assert f"<!-- ray -->\n{RAY.section(parts)}\n<!-- /ray -->" in RAY.path.read_text(encoding="utf-8")
