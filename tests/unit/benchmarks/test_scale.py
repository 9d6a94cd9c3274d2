"""The section of docs/scale.md is written from the results alone."""

import pytest

from benchmarks.results import load
from benchmarks.scale import SCALE, SETUPS, costs
from benchmarks.workloads import W2
from tests.unit.benchmarks.doubles import part, sample


class Measured:
    """A bench on which everything takes half a core."""

    def figures(self, server, work, concurrency):
        return {"rps": 1000.0, "server_cores": 0.5}


def test_costs_are_processor_time_not_the_time_of_a_machine():
    found = costs(Measured(), None, W2)  # type: ignore[arg-type]
    assert found["rps_a_core"] == 2000
    assert found["hours_a_million"] == pytest.approx(1_000_000 / 2000 / 3600)


def test_a_row_has_the_medians_of_its_rounds_and_says_what_failed():
    first, *_, last = SETUPS
    measured = [sample(n, last, 0) | {"workload": "w2", "rps": rps} for n, rps in enumerate((100.0, 300.0, 200.0))]
    memory = [sample(0, last, 0) | {"workload": "memory", "pss_mib": 250.0}]
    failed = [{"round": 0, "subject": first, "workload": "w2", "failed": "it did not start"}]
    text = SCALE.section({"scale": part("scale", [*measured, *memory, *failed])})
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in text.partition("\n\n")[2].splitlines()[:7]}
    assert rows[last].startswith(f"| {last} | 200 |")
    assert rows[last].endswith("| 250 |")
    assert rows[first].count("failed") == 8
    assert "Abacus 9, 2 cores, code abc1234" in text


def test_without_results_the_section_says_so():
    assert SCALE.section({}) == SCALE.nothing


def test_the_page_has_the_last_results():
    """`make bench-scale` writes both."""
    parts = load(SCALE.results)
    assert f"<!-- scale -->\n{SCALE.section(parts)}\n<!-- /scale -->" in SCALE.path.read_text(encoding="utf-8")
    assert not parts or not parts["scale"].commit.endswith("+")
