"""The verdict as lines to read, and what a report owes to say."""

from attention_load.course import Window
from attention_load.phases import Phase
from attention_load.report import Facts, full_report, lines
from attention_load.tally import Outcome, Settled, Tally
from attention_load.verdict import judge
from tests.unit.loadtest.plans import plan

STEADY = Phase("steady", 4, 10, 4, 1, is_judged=True)
PREPARED = {"references": 3, "float64": {"checked": 3, "worst": 0.01, "not_checked": [], "wrong": []}}


def report(asked, *, latency_ms=10.0, is_busy=False):
    tally = Tally(0.5)
    for _ in range(100):
        tally.add(Settled("x", 200, Outcome.RIGHT, latency_ms, is_good=True, was_checked=True), 105)
    facts = Facts("http://target", 1, "locust 0", is_busy, PREPARED)
    return full_report(asked, judge(asked, [Window(STEADY, 100, 110)], tally, []), tally, facts)


def test_the_last_line_is_the_verdict_with_what_was_missed():
    assert lines(report(plan()))[-1] == "passed"
    missed = lines(report(plan(slo_p50_ms=5, slo_p99_ms=5)))
    assert missed[-1] == "failed: p50_ms, p99_ms"
    assert "  MISSED p99_ms: 10.06 (wanted <= 5)" in missed


def test_a_busy_generator_is_told():
    assert not any("generator" in line for line in lines(report(plan())))
    assert any("the generator was busy" in line for line in lines(report(plan(), is_busy=True)))


def test_paced_users_that_fell_behind_are_told():
    """Four users at 5 a second should have sent 200 in ten seconds, and sent 100."""
    assert report(plan(pace=5))["pacing"] == {"planned": 200, "sent": 100, "ratio": 0.5}
    assert report(plan())["pacing"] is None


def test_a_report_names_machine_target_and_options():
    found = report(plan(peak_users=4))
    assert found["machine"]["usable_cores"] >= 1
    assert found["target"]["url"] == "http://target"
    assert found["options"]["peak_users"] == 4
    assert "api_key" not in found["options"]
