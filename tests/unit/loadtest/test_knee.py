"""The knee of a ramp: growth and latency, noise behind it, and when a ramp may stop."""

import pytest

from attention_load.knee import Knee, Step, find_knee, is_beyond


def steps(*found):
    """Goodput and latency of steps with twice as many users each."""
    return [Step(2**number, goodput, latency) for number, (goodput, latency) in enumerate(found)]


def test_the_knee_is_the_last_step_that_grew_within_the_objective():
    found = steps((100, 10), (190, 12), (300, 20), (305, 45), (300, 90))
    assert find_knee(found, 100) == Knee(2, is_passed=True)


def test_growth_beyond_the_objective_does_not_count():
    found = steps((100, 10), (190, 60), (300, 120), (400, 240))
    assert find_knee(found, 100) == Knee(1, is_passed=True)


def test_a_ramp_that_grew_to_its_end_has_not_passed_its_knee():
    assert find_knee(steps((100, 10), (190, 12)), 100) == Knee(1, is_passed=False)


def test_one_noisy_step_is_forgiven_and_two_are_the_end():
    assert find_knee(steps((100, 10), (101, 10), (250, 10)), 100) == Knee(2, is_passed=False)
    assert find_knee(steps((100, 10), (101, 10), (101, 10), (250, 10)), 100) == Knee(0, is_passed=True)


@pytest.mark.parametrize("latency", [101, None])
def test_without_a_step_within_the_objective_there_is_no_knee(latency):
    assert find_knee(steps((100, latency), (200, latency)), 100) is None


def test_a_step_without_goodput_is_no_knee():
    assert find_knee(steps((0, 10)), 100) is None


def test_no_steps_have_no_knee_and_are_not_beyond_it():
    assert find_knee([], 100) is None
    assert not is_beyond([], 100)


@pytest.mark.parametrize(
    ("found", "beyond"),
    [
        (steps((100, 10), (101, 10)), False),
        (steps((100, 10), (101, 10), (102, 10)), True),
        (steps((100, 200)), False),
        (steps((100, 200), (200, 200)), True),
        (steps((100, 10), (200, 10), (400, 10)), False),
    ],
)
def test_a_ramp_stops_after_two_steps_beyond_the_knee(found, beyond):
    assert is_beyond(found, 100) is beyond
