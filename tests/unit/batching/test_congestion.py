"""Congestion: a burst is none, a queue that stays long is, and only a dispatch can detect it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.batching.admission import BURST_S, CALM_S, MAX_BATCHES, Congestion

BATCH = 1000
RATE = 10 * BATCH
MOST = MAX_BATCHES * BATCH
WAIT_S = 0.1


def after(*lefts: int, every_s: float = BURST_S, rate: float = RATE) -> Congestion:
    """What is known after dispatches that left so much behind."""
    found = Congestion(WAIT_S)
    for number, left in enumerate(lefts):
        found.dispatched("a", BATCH, left, rate, number * every_s)
    return found


def test_a_queue_of_more_than_two_batches_for_the_interval_is_limited_to_one():
    assert after(MOST + 1).refuse("a", MOST + 1, 99.0) is None, "one look is none"
    assert after(MOST + 1, MOST + 1, every_s=BURST_S / 2).refuse("a", MOST + 1, 99.0) is None
    found = after(MOST + 1, MOST + 1)
    assert found.refuse("a", MOST + 1, BURST_S) == BURST_S
    assert found.refuse("a", BATCH, BURST_S) == BURST_S
    assert found.refuse("a", BATCH - 1, BURST_S) is None
    assert after(MOST, MOST).refuse("a", MOST, BURST_S) is None, "two batches are not long"
    assert found.refuse("b", MOST + 1, BURST_S) is None, "another lane"
    assert found.num_overloaded == 1
    assert after(MOST + 1).num_overloaded == 0, "one look is none"


@pytest.mark.parametrize(
    ("every_ms", "most"),
    [(1, 100), (0.5, 100), (1.25, 80), (4, 50)],
    ids=[
        "as fast as the engine",
        "never more than the engine does",
        "as the lane gets shorter",
        "at least half of that",
    ],
)
def test_short_batches_may_wait_for_the_allowed_time_at_the_rate_of_their_lane(every_ms, most):
    fast = 1000 * BATCH  # the engine computes a batch in a millisecond: two of them are no wait at all
    found = after(*[200 * BATCH] * 300, every_s=every_ms / 1000, rate=fast)
    assert found.refuse("a", round(0.97 * most) * BATCH, 1.0) is None
    assert found.refuse("a", round(1.01 * most + 0.5) * BATCH, 1.0) is not None


def test_the_rate_of_a_lane_forgets_what_was_before_it_was_empty():
    found, fast = Congestion(WAIT_S), 1000 * BATCH
    for number in range(100):
        found.dispatched("a", BATCH, 200 * BATCH, fast, number * 0.004)
    found.emptied("a", 59.0)
    for number in range(200):
        found.dispatched("a", BATCH, 200 * BATCH, fast, 60.0 + number * 0.001)
    assert found.refuse("a", 99 * BATCH, 61.0) is None
    assert found.refuse("a", 102 * BATCH, 61.0) is not None


def test_a_backlog_that_shrinks_is_no_overload():
    assert after(*range(50 * BATCH, 0, -100)).refuse("a", 10**9, 99.0) is None


def test_a_growing_queue_is_an_overload_even_if_it_shrank_before():
    found = after(9000, 8000, 8500, 9000)
    assert found.refuse("a", 9000, 3 * BURST_S) == pytest.approx(2 * BURST_S)


@given(st.integers(0, 10**9), st.floats(0, 1e6))
def test_a_stalled_engine_is_no_overload(queued, now):
    assert after().refuse("a", queued, now) is None
    assert after(MOST + 1).refuse("a", queued, now) is None


@pytest.mark.parametrize(("rate", "kept"), [(RATE / 2, 1), (25 * BATCH, 2), (39 * BATCH, 3)])
def test_an_overloaded_lane_keeps_the_whole_batches_that_are_computed_in_the_allowed_time(rate, kept):
    found = after(*[5 * BATCH] * 20, every_s=BATCH / rate, rate=rate)
    assert found.refuse("a", kept * BATCH - 1, 1.0) is None
    assert found.refuse("a", kept * BATCH, 1.0) is not None


def dispatched(found: Congestion, now: float) -> None:
    found.dispatched("a", BATCH, 0, RATE, now)


def withdrawn(found: Congestion, now: float) -> None:
    found.emptied("a", now)


EMPTIED = [dispatched, withdrawn, Congestion.idle]


@pytest.mark.parametrize("emptied", EMPTIED)
def test_an_overload_ends_with_an_empty_lane_that_refused_nothing(emptied):
    found = after(MOST + 1, MOST + 1)
    found.dispatched("a", BATCH, 1, RATE, 0.2)
    assert found.num_overloaded == 1, "something waits"
    emptied(found, 0.2)
    assert (found.num_overloaded, found.has_long_queue) == (0, False)


@pytest.mark.parametrize("emptied", EMPTIED)
def test_an_overload_outlasts_an_empty_lane_until_nothing_was_refused_for_the_calm_time(emptied):
    found = after(MOST + 1, MOST + 1)
    assert found.refuse("a", MOST, 1.0) is not None
    for now in (1.0, 1.01, 0.99 + CALM_S):
        emptied(found, now)
        assert found.num_overloaded == 1, "a burst would be admitted"
        assert found.refuse("a", BATCH - 1, now) is None, "what is admitted is no refusal"
    emptied(found, 1.01 + CALM_S)
    assert (found.num_overloaded, found.has_long_queue) == (0, False)


@pytest.mark.parametrize("emptied", EMPTIED)
def test_an_overload_ends_while_the_lane_is_idle_so_the_next_burst_is_admitted(emptied):
    found = after(MOST + 1, MOST + 1)
    assert found.refuse("a", MOST, 1.0) is not None
    emptied(found, 1.1)
    assert found.refuse("a", MOST, 1.1 + CALM_S) is None, "a burst that came at once"
    assert (found.num_overloaded, found.has_long_queue) == (0, False)


@pytest.mark.parametrize("emptied", EMPTIED)
def test_a_long_queue_that_is_no_overload_yet_is_forgotten_once_the_lane_is_empty(emptied):
    found = after(MOST + 1)
    emptied(found, 0.0)
    assert not found.has_long_queue


@pytest.mark.parametrize("rate", [0.0, RATE])
def test_the_length_is_measured_in_batches_of_the_lane(rate):
    congestion = Congestion(WAIT_S)
    for now in (0.0, 1.0):
        congestion.dispatched("light", 1, 10 * BATCH, rate, now)
        congestion.dispatched("heavy", 10**12, MAX_BATCHES * 10**12, rate, now)
    assert congestion.refuse("light", 10 * BATCH, 1.0) == 1.0
    assert congestion.refuse("heavy", MAX_BATCHES * 10**12, 1.0) is None


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.floats(0, 1e9))
def test_a_wait_of_zero_turns_load_shedding_off(batch, left, rate):
    congestion = Congestion(0.0)
    for now in (0.0, 1.0):
        congestion.dispatched("a", batch, left, rate, now)
    assert congestion.refuse("a", 10**18, 1.0) is None
