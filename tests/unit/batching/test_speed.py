"""Retry-After follows the work that waits; one stall turns nobody away."""

from __future__ import annotations

import pytest

from service.batching.speed import Speed


def test_nothing_is_claimed_before_the_first_batch():
    speed = Speed()
    assert speed.retry_after_s(10**15) == 1
    assert speed.rate == speed.finish_s(10**15, 10**15, 10**15, 0.0) == 0.0


@pytest.mark.parametrize(
    ("flops", "seconds"), [(0, 1), (1, 1), (1000, 1), (1001, 2), (5500, 6), (60_000, 60), (10**9, 60)]
)
def test_retry_after_is_whole_seconds_between_1_and_60(flops, seconds):
    speed = Speed()
    speed.note(1000, 1.0)
    assert speed.retry_after_s(flops) == seconds


def test_the_rate_weighs_batches_by_their_work():
    speed = Speed()
    speed.note(1, 1.0)
    speed.note(9_999, 1.0)
    assert speed.retry_after_s(50_000) == 10


def test_old_batches_are_forgotten():
    speed = Speed()
    speed.note(10**12, 1.0)
    for _ in range(16):
        speed.note(10, 1.0)
    assert speed.retry_after_s(100) == 10
    assert speed.rate == 10.0


def measured() -> Speed:
    """1,000 flops a second, a second a batch, and one stall of an hour."""
    speed = Speed()
    for _ in range(3):
        speed.note(1000, 1.0)
    speed.note(1000, 3600.0)
    return speed


def test_a_single_stall_changes_no_forecast():
    assert measured().rate == 1000.0
    assert measured().finish_s(1000, 2000, 0, 0.0) == 3.0


def test_where_nothing_is_ahead_nothing_is_claimed():
    speed = measured()
    assert speed.finish_s(10**9, 0, 0, 0.0) == 0.0
    speed.begin(1000, 5.0)
    assert speed.finish_s(1000, 0, 0, 5.0) == 2.0
    speed.rest()
    assert speed.finish_s(1000, 0, 0, 5.0) == 0.0


@pytest.mark.parametrize(("now", "left_s"), [(5.0, 1.0), (5.25, 0.75), (6.0, 0.0), (99.0, 0.0)])
def test_of_the_batch_that_runs_only_what_is_left_counts(now, left_s):
    speed = measured()
    speed.begin(1000, 5.0)
    assert speed.finish_s(1000, 3000, 0, now) == left_s + 3.0 + 1.0


@pytest.mark.parametrize(
    ("flops", "beside", "own_s"),
    [(100, 0, 0.1), (100, 400, 0.5), (100, 900, 1.0), (100, 10**9, 1.0), (5000, 10**9, 5.0)],
)
def test_the_own_batch_is_filled_by_those_who_wait_beside_up_to_the_usual_one(flops, beside, own_s):
    assert measured().finish_s(flops, 2000, beside, 0.0) == 2.0 + own_s


def test_a_batch_too_short_to_measure_divides_nothing_by_zero():
    speed = Speed()
    speed.note(0, 0.0)
    assert speed.retry_after_s(10) == 1
    assert 0 < speed.finish_s(10, 10, 0, 0.0) < 1
