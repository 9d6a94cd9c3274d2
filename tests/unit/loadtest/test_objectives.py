"""Objectives: each can fail alone, what was not measured is not met, and the knee of a ramp."""

import argparse
from collections import Counter
from types import SimpleNamespace

import pytest

from attention_load.objectives import REFUSED, Counts, StageResult, find_knee, judge, lines
from attention_load.options import OPTIONS
from attention_load.schedule import Stage

STEADY = Stage("steady", 8, 1.0, 10.0)
SPIKE = Stage("spike", 8, 1.0, 10.0, is_judged=False)
COMPARED = {"compared": 10}


def options(**changes) -> argparse.Namespace:
    return argparse.Namespace(**{name: default for name, default, _ in OPTIONS} | changes)


def counts(number=100, *, latency_ms=10, failures=0, refusals=0, seconds=10.0):
    """`number` answers, and failures and refusals beside them."""
    latencies_ms = Counter({latency_ms: number}) if number else Counter()
    return Counts(seconds, number + failures + refusals, failures, refusals, latencies_ms)


def judged(given, found=None, *, stage=STEADY, whole=None, bits=COMPARED, fault=""):
    found = counts() if found is None else found
    return judge(given, [StageResult(stage, found)], found if whole is None else whole, bits, fault)


def test_a_run_that_keeps_everything_passes():
    report = judged(options(max_p50_ms=20, max_p95_ms=20, max_p99_ms=20, min_rps=10))
    assert (report["verdict"], report["missed"]) == ("passed", [])
    assert {objective["name"] for objective in report["objectives"]} == {
        "p50_ms", "p95_ms", "p99_ms", "error_share", "refusal_share", "rps", "wrong_bits",
    }  # fmt: skip


@pytest.mark.parametrize("percentile", ["p50", "p95", "p99"])
def test_each_percentile_fails_by_its_own_name(percentile):
    report = judged(options(**{"max_p99_ms": 0, f"max_{percentile}_ms": 9}))
    assert report["verdict"] == f"failed: {percentile}_ms"


def test_a_percentile_of_zero_is_no_objective():
    assert judged(options(max_p99_ms=0), counts(latency_ms=60_000))["missed"] == []


def test_percentiles_are_the_smallest_latency_that_covers_the_share():
    found = Counts(latencies_ms=Counter({10: 98, 20: 1, 900: 1}))
    assert [found.percentile_ms(percent) for percent in (50, 98, 99, 100)] == [10, 10, 20, 900]
    assert Counts().percentile_ms(99) is None


@pytest.mark.parametrize(("permitted", "missed"), [(0.04, ["error_share"]), (0.05, [])])
def test_errors_fail_above_their_share(permitted, missed):
    assert judged(options(max_error_share=permitted), counts(95, failures=5))["missed"] == missed


def test_an_error_counts_outside_the_judged_stages_too():
    assert judged(options(), whole=counts(1000, failures=1))["missed"] == ["error_share"]


@pytest.mark.parametrize(("permitted", "missed"), [(0.04, ["refusal_share"]), (0.05, [])])
def test_refusals_are_no_errors_and_have_their_own_share(permitted, missed):
    assert judged(options(max_refusal_share=permitted), counts(95, refusals=5))["missed"] == missed


def test_refusals_and_errors_are_no_throughput():
    slow = judged(options(min_rps=10, max_error_share=1, max_refusal_share=1), counts(99, failures=50, refusals=50))
    assert slow["missed"] == ["rps"]
    assert slow["judged"]["rps"] == 9.9


def test_a_wrong_answer_fails_whatever_share_of_errors_is_permitted():
    assert judged(options(max_error_share=1), bits={"compared": 10, "wrong": 1})["missed"] == ["wrong_bits"]


def test_a_run_that_compared_nothing_shows_nothing():
    assert judged(options(), bits={})["missed"] == ["wrong_bits"]
    assert judged(options(check_every=0), bits={})["missed"] == []


def test_without_an_answer_nothing_is_met():
    assert judged(options(), Counts(), bits={})["missed"] == ["p99_ms", "error_share", "refusal_share", "wrong_bits"]
    assert judge(options(), [], counts(), COMPARED, "")["missed"] == ["p99_ms", "refusal_share"]


def test_latency_within_a_spike_is_not_judged_and_beside_it_is():
    slow = counts(latency_ms=5000)
    found = [StageResult(SPIKE, slow), StageResult(STEADY, counts())]
    assert judge(options(), found, counts(), COMPARED, "")["missed"] == []
    found = [StageResult(SPIKE, counts()), StageResult(STEADY, slow)]
    assert judge(options(), found, counts(), COMPARED, "")["missed"] == ["p99_ms"]


def test_judged_stages_are_added_up():
    found = [StageResult(STEADY, counts(50)), StageResult(SPIKE, counts(7)), StageResult(STEADY, counts(50))]
    report = judge(options(), found, counts(), COMPARED, "")
    assert (report["judged"]["requests"], report["judged"]["seconds"]) == (100, 20.0)


def test_a_fault_of_the_run_fails_it_and_is_named():
    report = judged(options(), fault="a worker was lost")
    assert report["missed"] == ["run"]
    assert "MISSED run: a worker was lost (wanted no fault)" in lines(report)
    assert lines(report)[-1] == "failed: run"


def test_counts_are_read_from_locusts_statistics_with_refusals_apart():
    def entry(method, requests, failures, response_times):
        return SimpleNamespace(
            method=method, num_requests=requests, num_failures=failures, response_times=response_times
        )

    found = Counts.read(
        4.0, [entry("POST", 3, 1, {10: 2, 20: 1}), entry("POST", 1, 0, {10: 1}), entry(REFUSED, 5, 0, {1: 5})]
    )
    assert found == Counts(4.0, 9, 1, 5, Counter({10: 3, 20: 1}))


def test_a_stage_is_the_difference_of_two_readings():
    before, after = Counts(4.0, 9, 1, 5, Counter({10: 3})), Counts(6.0, 12, 1, 6, Counter({10: 4, 30: 1}))
    assert after - before == Counts(2.0, 3, 0, 1, Counter({10: 1, 30: 1}))


def ramp(*latencies_ms):
    return [
        StageResult(Stage(f"{users} users", users, 1.0, 10.0), counts(20 * users, latency_ms=latency_ms))
        for users, latency_ms in zip((1, 2, 4, 8), latencies_ms, strict=False)
    ]


LIMITED = options(scenario="ramp", max_p99_ms=100)


@pytest.mark.parametrize(
    ("latencies_ms", "users"),
    [((10, 12, 20, 300), 4), ((10, 100, 101), 2), ((10, 300, 10), 1), ((10, 20), 2), ((300, 10), None), ((), None)],
)
def test_the_knee_is_the_last_step_before_the_first_that_breaks_an_objective(latencies_ms, users):
    knee = find_knee(LIMITED, ramp(*latencies_ms))
    assert (knee.stage.users if knee else None) == users


@pytest.mark.parametrize("broken", [counts(90, failures=10), counts(90, refusals=10), Counts()])
def test_errors_refusals_and_silence_break_a_step_as_latency_does(broken):
    steps = [*ramp(10), StageResult(STEADY, broken)]
    assert find_knee(LIMITED, steps) is steps[0]


def test_throughput_is_held_at_the_knee_and_not_at_the_first_steps():
    given = options(scenario="ramp", max_p99_ms=100, min_rps=8)
    report = judge(given, ramp(10, 20, 30, 300), counts(), COMPARED, "")
    assert (report["knee"]["users"], report["missed"]) == (4, [])
    given.min_rps = 9
    assert judge(given, ramp(10, 20, 30, 300), counts(), COMPARED, "")["missed"] == ["rps"]


def test_a_ramp_is_judged_at_its_knee():
    report = judge(LIMITED, ramp(10, 20, 300), counts(), COMPARED, "")
    assert report["missed"] == []
    assert report["judged"]["requests"] == report["knee"]["requests"] == 40
    assert report["knee"]["is_passed"]


def test_a_ramp_that_kept_its_objectives_to_the_end_has_not_passed_its_knee():
    report = judge(LIMITED, ramp(10, 20), counts(), COMPARED, "")
    assert report["missed"] == []
    assert not report["knee"]["is_passed"]
    assert any("raise --peak-users" in line for line in lines(report))


def test_a_ramp_without_a_knee_fails():
    report = judge(LIMITED, ramp(300, 900), counts(), COMPARED, "")
    assert report["missed"] == ["p99_ms", "knee"]


def test_the_text_of_a_server_in_a_fault_does_not_control_the_terminal():
    report = judged(options(), fault="HTTP Error 500: \x1b[2J\nmet    all\x9b é")
    [line] = [line for line in lines(report) if "MISSED run" in line]
    assert line == "MISSED run: HTTP Error 500: \\u001b[2J\\u000amet    all\\u009b é (wanted no fault)"
