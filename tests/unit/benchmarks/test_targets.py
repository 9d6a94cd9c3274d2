"""Targets are met, missed or not measured."""

import pytest

from benchmarks.targets import TARGETS, judged
from tests.unit.benchmarks.doubles import sample


def verdict(parts, part, target):
    return next(row for row in judged(parts) if (row["part"], row["target"]) == (part, target))


def test_an_unmeasured_target_is_neither_met_nor_missed():
    rows = judged({})
    assert len(rows) == len(TARGETS)
    assert {row["is_met"] for row in rows} == {None}


@pytest.mark.parametrize(("tok_s", "is_met"), [(90, True), (89, False)])
def test_a_least_ratio_is_met_at_its_limit(tok_s, is_met):
    row = verdict({"w1": [sample(0, "service", tok_s), sample(0, "bound", 100)]}, "w1", "≥ 0.9 × bound")
    assert row["is_met"] is is_met
    assert row["measured"] == [tok_s / 100] * 3


@pytest.mark.parametrize(("p50_ms", "is_met"), [(1.1, True), (1.2, False)])
def test_a_latency_is_compared_with_that_of_another_subject(p50_ms, is_met):
    samples = [sample(0, "service", 1, p50_ms=p50_ms), sample(0, "naive", 1, p50_ms=1.0)]
    assert verdict({"w2c1": samples}, "w2c1", "≤ 1.15 × naive")["is_met"] is is_met


@pytest.mark.parametrize(("mib", "is_met"), [(350, True), (351, False)])
def test_memory_has_an_absolute_limit(mib, is_met):
    samples = [{"round": 0, "subject": "service x1", "workload": "w1", "peak_rss_mib": mib}]
    assert verdict({"memory": samples}, "memory", "≤ 350")["is_met"] is is_met


def test_the_median_decides():
    samples = [sample(n, "service", tok_s) for n, tok_s in enumerate((95, 80, 91))]
    samples += [sample(n, "bound", 100) for n in range(3)]
    assert verdict({"w1": samples}, "w1", "≥ 0.9 × bound")["is_met"] is True


def test_a_failed_subject_leaves_its_target_unmeasured():
    samples = [sample(0, "service", 90), {"round": 0, "subject": "mosec", "workload": "w1", "failed": "no answer"}]
    assert verdict({"w1": samples}, "w1", "≥ 1.05 × mosec")["is_met"] is None
