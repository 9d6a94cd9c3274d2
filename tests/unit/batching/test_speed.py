"""Retry-After follows the work that waits; a forecast claims no more than what was measured; one stall refuses no request."""

from __future__ import annotations

import pytest

from service.batching.admission import Speed
from service.batching.job import Work

NOTHING = Work(0, 0)


def test_no_wait_is_predicted_before_the_first_batch():
    speed = Speed()
    assert speed.retry_after_s(10**15) == 1
    assert speed.rate == speed.finish_s(10**15, Work(10**15, 9), Work(10**15, 9), 0.0) == 0.0


@pytest.mark.parametrize(
    ("flops", "seconds"), [(0, 1), (1, 1), (1000, 1), (1001, 2), (5500, 6), (60_000, 60), (10**9, 60)]
)
def test_retry_after_is_whole_seconds_between_1_and_60(flops, seconds):
    speed = Speed()
    speed.note(Work(1000, 1), 1.0)
    assert speed.retry_after_s(flops) == seconds


def test_the_rate_weighs_batches_by_their_work():
    speed = Speed()
    speed.note(Work(1, 1), 1.0)
    speed.note(Work(9_999, 1), 1.0)
    assert speed.retry_after_s(50_000) == 10


def test_old_batches_are_forgotten():
    speed = Speed()
    speed.note(Work(10**12, 1), 1.0)
    for _ in range(16):
        speed.note(Work(10, 1), 1.0)
    assert speed.retry_after_s(100) == 10
    assert speed.rate == 10.0


def measured() -> Speed:
    """Batches of four jobs of 250 flops, a second each, and one stall of an hour."""
    speed = Speed()
    for _ in range(3):
        speed.note(Work(1000, 4), 1.0)
    speed.note(Work(1000, 4), 3600.0)
    return speed


def jobs(count: int) -> Work:
    return Work(250 * count, count)


def test_a_single_stall_changes_no_forecast():
    assert measured().rate == 1000.0
    assert measured().finish_s(250, jobs(8), NOTHING, 0.0) == 2.25


def test_no_wait_is_predicted_without_work_ahead():
    speed = measured()
    assert speed.finish_s(10**9, NOTHING, NOTHING, 0.0) == 0.0
    speed.begin(jobs(4), 5.0)
    assert speed.finish_s(250, NOTHING, NOTHING, 5.0) == 1.25
    speed.end()
    assert speed.finish_s(250, NOTHING, NOTHING, 5.0) == 0.0


@pytest.mark.parametrize(("now", "left_s"), [(5.0, 1.0), (5.25, 0.75), (6.0, 0.0), (99.0, 0.0)])
def test_only_the_rest_of_the_running_batch_counts(now, left_s):
    speed = measured()
    speed.begin(jobs(4), 5.0)
    assert speed.finish_s(250, jobs(12), NOTHING, now) == left_s + 3.0 + 0.25


@pytest.mark.parametrize(("beside", "own_s"), [(0, 0.25), (1, 0.5), (3, 1.0), (1000, 1.0)])
def test_the_jobs_own_batch_counts_up_to_the_usual_size(beside, own_s):
    assert measured().finish_s(250, jobs(8), jobs(beside), 0.0) == 2.0 + own_s


def test_the_speed_of_small_batches_does_not_predict_large_ones():
    """Ten thousand times the work in one job is not ten thousand times the time: it is not known how long it takes."""
    large = Work(2_500_000, 1)
    assert measured().finish_s(2_500_000, large, large, 0.0) == 0.25 + 0.5


def test_the_speed_of_large_batches_does_not_predict_small_ones():
    speed = Speed()
    for _ in range(3):
        speed.note(Work(10**6, 1), 10.0)
    assert speed.finish_s(1, Work(100, 100), Work(100, 100), 0.0) == pytest.approx(0.00201, rel=0.01)


def test_a_batch_too_short_to_measure_causes_no_division_by_zero():
    speed = Speed()
    speed.note(NOTHING, 0.0)
    assert speed.retry_after_s(10) == 1
    assert 0 < speed.finish_s(10, Work(10, 1), NOTHING, 0.0) < 1
