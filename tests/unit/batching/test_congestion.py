"""Congestion: a burst is none, a queue that stands is, and only dispatching tells which."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.batching.congestion import MAX_BATCHES, STANDING_S, Congestion

BATCH = 1000
RATE = 10 * BATCH
MOST = MAX_BATCHES * BATCH
WAIT_S = 0.1


def test_a_queue_that_stays_long_for_the_interval_stands_and_may_hold_two_batches():
    congestion = Congestion(WAIT_S)
    for now in (0.0, STANDING_S / 2):
        congestion.dispatched("a", BATCH, MOST + 1, RATE, now)
        assert congestion.standing_s("a", MOST + 1, now) is None
    assert congestion.standing_s("a", MOST + 1, STANDING_S) == STANDING_S
    assert congestion.standing_s("a", MOST, STANDING_S) is None
    assert congestion.standing_s("b", MOST + 1, STANDING_S) is None, "another lane"


def test_short_batches_may_wait_for_the_time_that_is_allowed():
    congestion = Congestion(WAIT_S)
    fast = 1000 * BATCH  # a batch a millisecond: two of them are no wait at all
    for now in (0.0, 1.0):
        congestion.dispatched("a", BATCH, 200 * BATCH, fast, now)
    assert congestion.standing_s("a", 100 * BATCH, 1.0) is None
    assert congestion.standing_s("a", 100 * BATCH + 1, 1.0) == 1.0


def test_a_burst_that_drains_never_stands():
    congestion = Congestion(WAIT_S)
    for left in range(20 * BATCH, -1, -BATCH):
        now = (20 * BATCH - left) / BATCH * STANDING_S / 20
        congestion.dispatched("a", BATCH, left, RATE, now)
    assert congestion.standing_s("a", 10**9, 99.0) is None


@given(st.integers(0, 10**9), st.floats(0, 1e6))
def test_an_engine_that_stands_still_turns_nobody_away(queued, now):
    assert Congestion(WAIT_S).standing_s("a", queued, now) is None


def test_it_stands_until_half_of_it_is_gone():
    congestion = Congestion(WAIT_S)
    congestion.dispatched("a", BATCH, MOST + 1, RATE, 0.0)
    congestion.dispatched("a", BATCH, MOST // 2 + 1, RATE, 1.0)
    assert congestion.standing_s("a", MOST + 1, 1.0) == 1.0
    congestion.dispatched("a", BATCH, MOST // 2, RATE, 2.0)
    congestion.dispatched("a", BATCH, MOST + 1, RATE, 3.0)
    assert congestion.standing_s("a", MOST + 1, 3.0) is None


def test_it_is_forgotten_when_nothing_waits_anywhere():
    congestion = Congestion(WAIT_S)
    congestion.dispatched("a", BATCH, MOST + 1, RATE, 0.0)
    congestion.rest()
    assert congestion.standing_s("a", MOST + 1, 9.0) is None


@pytest.mark.parametrize("rate", [0.0, RATE])
def test_length_is_measured_in_batches_of_the_lanes_own(rate):
    congestion = Congestion(WAIT_S)
    for now in (0.0, 1.0):
        congestion.dispatched("light", 1, 10 * BATCH, rate, now)
        congestion.dispatched("heavy", 10**12, MAX_BATCHES * 10**12, rate, now)
    assert congestion.standing_s("light", 10 * BATCH, 1.0) == 1.0
    assert congestion.standing_s("heavy", MAX_BATCHES * 10**12, 1.0) is None


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.floats(0, 1e9))
def test_a_wait_of_nothing_turns_it_off(batch, left, rate):
    congestion = Congestion(0.0)
    for now in (0.0, 1.0):
        congestion.dispatched("a", batch, left, rate, now)
    assert congestion.standing_s("a", 10**18, 1.0) is None
