"""Counts by slot of time: sums, quantiles, what goes over the wire."""

import ast

import pytest

from attention_load.tally import MAX_EXAMPLES, Outcome, Settled, Tally


def right(latency_ms=10.0, *, is_good=True):
    return Settled("short lists", 200, Outcome.RIGHT, latency_ms, is_good=is_good, was_checked=True)


REFUSED = Settled("short lists", 429, Outcome.REFUSED, 0.5)
FAILED = Settled("long lists", 500, Outcome.FAILED, 1.0, told="long lists: status 500")
WRONG = Settled("long lists", 200, Outcome.WRONG, 1.0, was_checked=True, told="1 of 4 values of output have other bits")


def tally(*settled, at_s=100.2):
    found = Tally(0.5)
    for one in settled:
        found.add(one, at_s)
    return found


def test_each_outcome_is_counted_once_and_apart():
    found = tally(right(), right(is_good=False), REFUSED, FAILED, WRONG)
    slot, seconds = found.whole()
    assert dict(slot.counts) == {"right": 2, "good": 1, "refused": 1, "failed": 1, "wrong": 1}
    assert (slot.total, slot.failed, seconds) == (5, 2, 0.5)
    assert found.statuses == {"200": 3, "429": 1, "500": 1}
    assert (found.checked, found.wrong) == (3, 1)


def test_only_right_answers_have_a_latency():
    slot, _ = tally(REFUSED, FAILED, WRONG).whole()
    assert slot.quantile_ms(0.5) is None


@pytest.mark.parametrize("latency_ms", [0.02, 1.0, 9.99, 250.0, 30_000.0])
def test_a_quantile_is_never_too_low_and_at_most_one_percent_too_high(latency_ms):
    found = tally(right(latency_ms)).whole()[0].quantile_ms(0.99)
    assert latency_ms <= found * (1 + 1e-9) <= latency_ms * 1.0101


def test_quantiles_split_where_they_should():
    slot, _ = tally(*(right(10) for _ in range(98)), right(500), right(1000)).whole()
    assert slot.quantile_ms(0.5) == pytest.approx(10, rel=0.011)
    assert slot.quantile_ms(0.99) == pytest.approx(500, rel=0.011)
    assert slot.quantile_ms(1) == pytest.approx(1000, rel=0.011)


def test_a_span_has_the_slots_that_lie_wholly_in_it():
    found = Tally(0.5)
    for at_s in (100.2, 100.7, 101.2, 101.7):
        found.add(right(), at_s)
    slot, seconds = found.between(100.4, 101.6)
    assert (slot.total, seconds) == (2, 1.0)


def test_a_span_shorter_than_a_slot_has_measured_nothing():
    assert tally(right()).between(100.1, 100.4)[1] == 0


def test_an_empty_tally_has_nothing_in_no_time():
    slot, seconds = Tally().whole()
    assert (slot.total, seconds) == (0, 0)


def test_tallies_of_two_workers_add_up_over_the_wire():
    total = Tally(0.5)
    for found in (tally(right(), FAILED), tally(right(), WRONG), tally(REFUSED, at_s=101)):
        total.merge(ast.literal_eval(repr(found.to_message())))  # plain values, as the wire has them
    together = tally(right(), FAILED, right(), WRONG)
    together.add(REFUSED, 101)
    assert total.to_message() == together.to_message()


def test_a_few_different_examples_are_kept():
    found = tally(*(Settled("x", 500, Outcome.FAILED, 1, told=f"fault {n // 2}") for n in range(100)))
    assert found.examples == [f"fault {n}" for n in range(MAX_EXAMPLES)]
