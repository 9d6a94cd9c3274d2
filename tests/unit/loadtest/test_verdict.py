"""Measured against objectives: each can fail alone, and what was not measured is not met."""

import pytest

from attention_load.course import Window
from attention_load.phases import Phase
from attention_load.tally import Outcome, Settled, Tally
from attention_load.verdict import judge
from tests.unit.loadtest.plans import plan

STEADY = Phase("steady", 8, 10, 8, 1, is_judged=True)
SPIKE = Phase("spike", 8, 10, 8, 1, is_judged=False)


def window(phase=STEADY, begin_s=100.0, end_s=110.0):
    return Window(phase, begin_s, end_s)


def counted(number=100, *, at_s=105.0, latency_ms=10.0, into=None, limit_ms=1000.0):
    found = into or Tally(0.5)
    for _ in range(number):
        good = latency_ms <= limit_ms
        found.add(Settled("x", 200, Outcome.RIGHT, latency_ms, is_good=good, was_checked=True), at_s)
    return found


def test_a_run_that_keeps_everything_passes():
    objectives = plan(slo_p50_ms=20, slo_p95_ms=20, slo_p99_ms=20, slo_goodput=10)
    verdict = judge(objectives, [window()], counted(), [])
    assert (verdict.word, verdict.missed) == ("passed", [])
    assert {objective.name for objective in verdict.objectives} == {
        "p50_ms", "p95_ms", "p99_ms", "error_ratio", "refusal_ratio", "goodput_per_s", "wrong_bits",
    }  # fmt: skip


@pytest.mark.parametrize("quantile", ["p50", "p95", "p99"])
def test_each_quantile_fails_by_its_own_name(quantile):
    objectives = {"slo_p99_ms": 0, f"slo_{quantile}_ms": 9}
    assert judge(plan(**objectives), [window()], counted(), []).missed == [f"{quantile}_ms"]


def test_a_quantile_of_zero_is_not_asked_for():
    assert judge(plan(slo_p99_ms=0), [window()], counted(latency_ms=60_000), []).missed == []


@pytest.mark.parametrize(("permitted", "missed"), [(0.04, ["error_ratio"]), (0.05, [])])
def test_errors_fail_above_their_ratio(permitted, missed):
    found = counted(95)
    for _ in range(5):
        found.add(Settled("x", 500, Outcome.FAILED, 1), 105)
    assert judge(plan(slo_error_ratio=permitted), [window()], found, []).missed == missed


def test_an_error_counts_in_phases_that_are_not_judged_too():
    found = counted()
    found.add(Settled("x", 0, Outcome.FAILED, 0), 50)
    assert judge(plan(), [window()], found, []).missed == ["error_ratio"]


@pytest.mark.parametrize(("permitted", "missed"), [(0.04, ["refusal_ratio"]), (0.05, [])])
def test_refusals_are_no_errors_and_have_a_ratio_of_their_own(permitted, missed):
    found = counted(95)
    for _ in range(5):
        found.add(Settled("x", 429, Outcome.REFUSED, 0.1), 105)
    assert judge(plan(slo_refusal_ratio=permitted), [window()], found, []).missed == missed


def test_late_answers_are_no_goodput():
    objectives = plan(slo_p99_ms=0, good_within_ms=50, slo_goodput=10)
    late = judge(objectives, [window()], counted(latency_ms=60, limit_ms=50), [])
    assert late.missed == ["goodput_per_s"]
    assert judge(objectives, [window()], counted(latency_ms=40, limit_ms=50), []).missed == []


def test_one_wrong_bit_fails_whatever_is_permitted_otherwise():
    found = counted(1000)
    found.add(Settled("x", 200, Outcome.WRONG, 1, was_checked=True), 105)
    assert judge(plan(slo_error_ratio=1), [window()], found, []).missed == ["wrong_bits"]


def test_a_run_that_compared_nothing_has_shown_nothing():
    found = Tally(0.5)
    found.add(Settled("x", 200, Outcome.RIGHT, 1, is_good=True), 105)
    assert judge(plan(), [window()], found, []).missed == ["wrong_bits"]
    assert judge(plan(check_every=0), [window()], found, []).missed == []


def test_without_an_answer_nothing_is_met():
    assert judge(plan(), [window()], Tally(0.5), []).missed == ["p99_ms", "error_ratio", "refusal_ratio", "wrong_bits"]
    assert judge(plan(), [], counted(), []).missed == ["p99_ms", "refusal_ratio"]


def test_latency_within_a_spike_is_not_judged_and_after_it_is():
    windows = [window(SPIKE, 100, 110), window(STEADY, 110, 120)]
    slow_spike = counted(latency_ms=5000, at_s=105, into=counted(at_s=115))
    assert judge(plan(), windows, slow_spike, []).missed == []
    slow_after = counted(latency_ms=5000, at_s=115, into=counted(at_s=105))
    assert judge(plan(), windows, slow_after, []).missed == ["p99_ms"]


def test_a_phase_that_has_not_ended_is_not_measured():
    assert judge(plan(), [Window(STEADY, 100)], counted(), []).phases == []


def test_a_fault_of_the_run_fails_it():
    assert judge(plan(), [window()], counted(), ["a worker was lost"]).missed == ["run"]


def ramp(*latencies, limit_ms=100.0):
    """Steps with twice as many answers each."""
    found, windows = Tally(0.5), []
    for number, latency_ms in enumerate(latencies):
        begin = 100.0 + 10 * number
        windows.append(window(Phase(f"step {number}", 2**number, 9, 1, 1, is_judged=True), begin, begin + 10))
        counted(20 * 2**number, at_s=begin + 5, latency_ms=latency_ms, into=found, limit_ms=limit_ms)
    return windows, found


def test_a_ramp_is_judged_at_its_knee():
    windows, found = ramp(10, 20, 300, 900)
    verdict = judge(plan(shape="ramp", slo_p99_ms=100), windows, found, [])
    assert verdict.missed == []
    assert verdict.knee is not None
    assert verdict.knee.number == 1
    assert verdict.judged.slot.total == 40


def test_a_ramp_without_a_knee_fails():
    windows, found = ramp(300, 900)
    verdict = judge(plan(shape="ramp", slo_p99_ms=100), windows, found, [])
    assert "knee" in verdict.missed
