"""The scenarios as stages, and the stage at a moment."""

import pytest

from attention_load.schedule import SCENARIOS, Stage, position, ramp_users, stages


def scheduled(scenario, *, peak=8, hold_s=20.0, steps=3, settle_s=1.0):
    return stages(scenario, peak=peak, base=2, hold_s=hold_s, steps=steps, settle_s=settle_s)


def test_smoke_is_one_stage_after_a_warm_up():
    assert scheduled("smoke") == (Stage("steady", 8, 4.0, 20.0),)


def test_ramp_grows_by_the_same_factor_to_the_peak():
    assert [(stage.users, stage.hold_s) for stage in scheduled("ramp")] == [(2, 20.0), (4, 20.0), (8, 20.0)]


def test_ramp_steps_that_round_to_the_same_number_are_one():
    assert ramp_users(4, 8) == [1, 2, 3, 4]
    assert ramp_users(1, 8) == [1]


def test_spike_returns_to_the_base_and_only_the_peak_may_be_slow():
    found = scheduled("spike")
    assert [(stage.users, stage.is_judged) for stage in found] == [(2, True), (8, False), (2, True)]
    assert found[2].settle_s == 1.0 + 20.0 / 4, "time to recover"


def test_soak_is_measured_in_quarters_of_the_same_users():
    found = scheduled("soak", hold_s=400.0)
    assert [stage.users for stage in found] == [8] * 4
    assert [stage.hold_s for stage in found] == [100.0] * 4
    assert [stage.settle_s for stage in found] == [21.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_without_a_length_a_scenario_has_its_own(scenario):
    assert all(stage.hold_s > 0 for stage in scheduled(scenario, hold_s=0.0))


@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if name != "smoke"])
def test_every_change_of_users_has_time_to_settle(scenario):
    before = 0
    for stage in scheduled(scenario, settle_s=4.0):
        assert stage.users == before or stage.settle_s >= 4.0
        before = stage.users


def test_an_unknown_scenario_is_refused_by_name():
    with pytest.raises(ValueError, match="--scenario must be one of smoke, ramp, spike, soak"):
        scheduled("sprint")


def test_position_is_the_stage_and_the_seconds_since_it_began():
    found = (Stage("one", 1, 1.0, 2.0), Stage("two", 2, 0.0, 5.0))
    assert [position(found, elapsed_s) for elapsed_s in (0.0, 2.5, 3.0, 7.5, 8.0)] == [
        (0, 0.0),
        (0, 2.5),
        (1, 0.0),
        (1, 4.5),
        None,
    ]
