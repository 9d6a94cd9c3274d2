"""Shapes as pure functions of time: users at every second, without a clock and without Locust."""

import pytest

from attention_load.phases import HOLD_S, SHAPES, phase_at, ramp_users, shape_phases, total_seconds


def phases(shape, *, peak=8, base=2, hold_s=0.0, steps=4):
    return shape_phases(shape, peak=peak, base=base, hold_s=hold_s, steps=steps)


def users(found, elapsed_s):
    number = phase_at(found, elapsed_s)
    return None if number is None else found[number].users


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_begins_at_once_and_ends(shape):
    found = phases(shape)
    assert users(found, 0) is not None
    assert users(found, total_seconds(found) - 0.01) is not None
    assert users(found, total_seconds(found)) is None


@pytest.mark.parametrize("shape", SHAPES)
def test_no_shape_ever_has_more_users_than_its_peak_or_fewer_than_one(shape):
    found = phases(shape, peak=7)
    assert {1 <= users(found, tenth / 10) <= 7 for tenth in range(int(total_seconds(found) * 10))} == {True}


@pytest.mark.parametrize("shape", SHAPES)
def test_some_phase_is_judged_for_as_long_as_the_load_is_held(shape):
    judged = [phase.hold_s for phase in phases(shape, hold_s=40) if phase.is_judged]
    assert sum(judged) >= 40


def test_a_smoke_warms_up_and_holds():
    found = phases("smoke", hold_s=20)
    assert [(phase.name, phase.users, phase.hold_s, phase.is_judged) for phase in found] == [
        ("warm-up", 8, 3, False),
        ("steady", 8, 20, True),
    ]


def test_a_ramp_grows_by_the_same_factor_up_to_the_peak():
    assert ramp_users(16, 4) == [2, 4, 8, 16]
    assert ramp_users(64, 8) == [2, 3, 5, 8, 13, 23, 38, 64]


def test_steps_that_round_to_the_same_number_of_users_are_one():
    assert ramp_users(3, 8) == [1, 2, 3]
    assert ramp_users(1, 8) == [1]


def test_every_step_of_a_ramp_is_held_as_long_as_the_others():
    found = phases("ramp", peak=16, hold_s=5)
    assert [(phase.users, phase.hold_s) for phase in found] == [(2, 5), (4, 5), (8, 5), (16, 5)]


def test_a_spike_is_not_judged_and_what_comes_before_and_after_it_is():
    found = phases("spike", hold_s=8)
    assert [(phase.name, phase.users, phase.is_judged) for phase in found] == [
        ("before", 2, True),
        ("spike", 8, False),
        ("recovery", 2, False),
        ("after", 2, True),
    ]


def test_a_soak_tells_its_quarters_apart_without_a_change_of_load():
    found = phases("soak", hold_s=400)
    assert [phase.name for phase in found] == ["warm-up", "quarter 1", "quarter 2", "quarter 3", "quarter 4"]
    # Locust takes another rate for another load and starts anew.
    assert len({(phase.users, phase.rate) for phase in found}) == 1


def test_a_length_of_zero_is_the_shapes_own():
    assert sum(phase.hold_s for phase in phases("soak") if phase.is_judged) == HOLD_S["soak"]


def test_many_users_come_at_a_rate_that_locust_keeps_and_their_phase_waits_for_them():
    warm_up = phases("smoke", peak=1000, hold_s=20)[0]
    assert (warm_up.rate, warm_up.change_s, warm_up.seconds) == (100, 10, 13)


def test_an_unknown_shape_is_refused():
    with pytest.raises(ValueError, match="smoke, ramp, spike, soak"):
        phases("wave")
