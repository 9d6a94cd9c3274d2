"""Samples become medians and ratios within a round."""

from benchmarks.summary import ratio, rows, spread
from tests.unit.benchmarks.doubles import sample


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
