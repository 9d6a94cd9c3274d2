"""README, `docs/internals/performance.md` and the pictures are generated from the last results."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.plots import PLOTS, digest, drawn, heading
from benchmarks.report import ROOT, stale
from benchmarks.results import LATEST, as_text, load

PARTS = load(LATEST)


def test_the_pages_match_the_results():
    """`make report` writes them."""
    assert [str(page.relative_to(ROOT)) for page in stale(PARTS)] == []


def test_the_file_of_results_is_as_the_benchmark_writes_it():
    assert LATEST.read_text(encoding="utf-8") == as_text(PARTS)


def test_results_name_a_commit_and_come_from_a_full_run():
    for part in PARTS.values():
        assert re.fullmatch(r"[0-9a-f]{7,}", part.commit), f"{part.name}: {part.commit}"
        assert part.rounds >= 3, part.name


@pytest.mark.parametrize("name", PLOTS)
def test_a_picture_draws_the_current_results(name):
    path, rows = ROOT / "docs" / "plots" / PLOTS[name].file, drawn(PARTS, name)
    assert path.exists() == bool(rows)
    if rows:
        assert f"figures {digest(rows, heading(PARTS, name))}" in path.read_text(encoding="utf-8")


def test_a_differing_page_is_detected(tmp_path):
    """The comparison can fail: other results, other pages."""
    document = json.loads(LATEST.read_text(encoding="utf-8"))
    part = {"measured_at": "2026-11-21 10:00 UTC", "commit": "abc1234", "settings": {"seconds": 1}, "subjects": {}}
    machine = {
        "cpu": "",
        "cores": 1,
        "memory_gib": 1,
        "system": "",
        "python": "",
        "versions": {},
        "wrk": "",
        "load_before": 0,
    }
    samples = [
        {
            "round": 0,
            "subject": "service",
            "workload": "w1",
            "rps": 123456.0,
            "tok_s": 1.0,
            "p50_ms": 1.0,
            "p99_ms": 1.0,
        }
    ]
    document["parts"]["w1"] = {**part, "machine": machine, "samples": samples}
    other = tmp_path / "other.json"
    other.write_text(json.dumps(document), encoding="utf-8")
    assert {Path(page).name for page in stale(load(other))} == {"README.md", "performance.md"}
