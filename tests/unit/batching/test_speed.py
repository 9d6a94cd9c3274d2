"""Retry-After follows the work that waits; one stall turns nobody away."""

from __future__ import annotations

import pytest

from service.batching.speed import Speed


def test_nothing_is_claimed_before_the_first_batch():
    speed = Speed()
    assert speed.retry_after_s(10**15) == 1
    assert speed.least_s(10**15) == 0.0


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
    assert speed.least_s(100) == 10.0


def test_the_least_time_is_that_of_the_best_batch_so_a_stall_does_not_count():
    speed = Speed()
    speed.note(1000, 1.0)
    speed.note(1000, 3600.0)
    assert speed.least_s(2000) == 2.0


def test_a_batch_too_short_to_measure_divides_nothing_by_zero():
    speed = Speed()
    speed.note(0, 0.0)
    assert speed.retry_after_s(10) == 1
    assert speed.least_s(10) < 1
