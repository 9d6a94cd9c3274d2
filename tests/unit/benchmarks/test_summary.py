"""Samples become medians and ratios within a round; targets are met, missed or not measured."""

import pytest

from benchmarks.summary import TARGETS, judged, ratio, rows, spread
from tests.unit.benchmarks.doubles import MACHINE, part, sample


def test_a_spread_is_the_median_and_the_quartiles():
    assert spread([3, 1, 10, 2, 4]) == [3, 2, 4]
    assert spread([1, 2]) == [1.5, 1.25, 1.75]
    assert spread([7]) == [7, 7, 7]


def test_each_subject_workload_and_point_has_a_row():
    found = rows(
        [sample(0, "service", 10, point=1), sample(1, "service", 30, point=1), sample(0, "service", 7, point=2)]
    )
    assert [(row["subject"], row["point"], row["rounds"], row["tok_s"]) for row in found] == [
        ("service", 1, 2, [20, 15, 25]),
        ("service", 2, 1, [7, 7, 7]),
    ]


def test_subjects_are_sorted_by_name_and_points_keep_the_order_of_measurement():
    found = rows(
        [sample(0, "service", 10, point=8), sample(0, "service", 10, point=1), sample(0, "bound", 10, point=8)]
    )
    assert [(row["subject"], row["point"]) for row in found] == [("bound", 8), ("service", 8), ("service", 1)]


def test_a_failed_sample_is_counted_and_left_out():
    found = rows([sample(0, "mosec", 10), {"round": 1, "subject": "mosec", "workload": "w1", "failed": "no answer"}])
    assert [(row["rounds"], row["failed"], row["tok_s"]) for row in found] == [(1, 1, [10, 10, 10])]


def test_a_figure_of_some_rounds_summarises_those():
    found = rows([sample(0, "service", 10), sample(1, "service", 10, mean_batch=4.0)])
    assert found[0]["mean_batch"] == [4, 4, 4]


def test_a_ratio_is_formed_within_a_round():
    """The machine was half as fast in the second round: the ratio is the same, that of medians would not be."""
    samples = [sample(0, "service", 80), sample(0, "bound", 100), sample(1, "service", 40), sample(1, "bound", 50)]
    assert ratio(samples, "tok_s", "service", "bound") == [0.8, 0.8, 0.8]
    assert ratio([*samples, sample(2, "service", 1)], "tok_s", "service", "bound") == [0.8, 0.8, 0.8]


def test_without_a_common_round_there_is_no_ratio():
    assert ratio([sample(0, "service", 80), sample(1, "bound", 100)], "tok_s", "service", "bound") is None


def test_a_ratio_can_be_of_one_point():
    samples = [sample(0, name, tok_s, point=point) for name, tok_s, point in [("service", 8, 1), ("bound", 10, 1)]]
    samples += [sample(0, "service", 3, point=2), sample(0, "bound", 10, point=2)]
    assert ratio(samples, "tok_s", "service", "bound", point=2) == [0.3, 0.3, 0.3]


def verdict(samples, name, target, **machine):
    found = judged({name: part(name, samples, machine=MACHINE | machine)})
    return next(row for row in found if (row["part"], row["target"]) == (name, target))


def test_an_unmeasured_target_is_neither_met_nor_missed():
    rows = judged({})
    assert len(rows) == sum(not target.on for target in TARGETS)
    assert {row["is_met"] for row in rows} == {None}


@pytest.mark.parametrize(
    ("cpu", "isa", "expected"),
    [
        ("AMD EPYC", "avx512_bf16", {"≥ 0.9 × bound", "≥ 1.5 × mosec"}),
        ("Intel Xeon", "amx_bf16", {"≥ 0.9 × bound", "≥ 1.25 × mosec"}),
        ("Abacus 9", "", {"≥ 0.9 × bound"}),
    ],
)
def test_a_processor_has_its_own_targets(cpu, isa, expected):
    parts = {"w1": part("w1", [], machine=MACHINE | {"cpu": cpu, "isa": isa})}
    found = judged(parts)
    assert {row["target"] for row in found if row["part"] == "w1"} == expected
    assert any(row["part"] == "w2bfloat16" for row in found) is (isa == "amx_bf16")


@pytest.mark.parametrize(("tok_s", "is_met"), [(90, True), (89, False)])
def test_a_least_ratio_is_met_at_its_limit(tok_s, is_met):
    row = verdict([sample(0, "service", tok_s), sample(0, "bound", 100)], "w1", "≥ 0.9 × bound")
    assert row["is_met"] is is_met
    assert row["measured"] == [tok_s / 100] * 3


@pytest.mark.parametrize(("p50_ms", "is_met"), [(0.9, True), (1.0, False)])
def test_a_latency_is_compared_with_that_of_another_subject(p50_ms, is_met):
    samples = [sample(0, "service", 1, p50_ms=p50_ms), sample(0, "naive", 1, p50_ms=1.0)]
    assert verdict(samples, "w2c1", "≤ 0.9 × naive")["is_met"] is is_met


@pytest.mark.parametrize(("mib", "is_met"), [(350, True), (351, False)])
def test_memory_has_an_absolute_limit(mib, is_met):
    samples = [{"round": 0, "subject": "service x1", "workload": "w1", "peak_rss_mib": mib}]
    assert verdict(samples, "memory", "≤ 350")["is_met"] is is_met


def test_the_median_decides():
    samples = [sample(n, "service", tok_s) for n, tok_s in enumerate((95, 80, 91))]
    samples += [sample(n, "bound", 100) for n in range(3)]
    assert verdict(samples, "w1", "≥ 0.9 × bound")["is_met"] is True


def test_a_failed_subject_leaves_its_target_unmeasured():
    samples = [sample(0, "service", 90), {"round": 0, "subject": "mosec", "workload": "w1", "failed": "no answer"}]
    assert verdict(samples, "w1", "≥ 1.5 × mosec", cpu="AMD EPYC")["is_met"] is None
