"""Which phase is now, and from when to when each one is measured."""

from attention_load.course import Course
from attention_load.phases import shape_phases
from tests.doubles import ManualClock


def course(shape, clock, hold_s):
    return Course(shape_phases(shape, peak=8, base=2, hold_s=hold_s, steps=3), clock.now)


def spans(found):
    return [(window.phase.name, window.begin_s, window.end_s) for window in found.windows]


def test_a_phase_is_measured_from_when_its_users_are_there_until_the_next_begins():
    clock = ManualClock()
    found = course("ramp", clock, 10)
    start = clock.now()
    assert found.advance().users == 2
    clock.advance(0.5)
    found.reached()
    clock.advance(11)
    assert found.advance().users == 4
    clock.advance(0.25)
    found.reached()
    assert spans(found) == [("2 users", start + 0.5, start + 11.5), ("4 users", start + 11.75, None)]


def test_a_change_without_other_users_is_there_at_once():
    clock = ManualClock()
    found = course("smoke", clock, 20)
    start = clock.now()
    found.reached()
    clock.advance(4.5)
    assert found.advance().name == "steady"
    clock.advance(1)
    found.reached()  # told again for the same users: no new window
    assert spans(found) == [("warm-up", start, start + 4.5), ("steady", start + 4.5, None)]


def test_the_end_closes_the_last_window():
    clock = ManualClock()
    found = course("smoke", clock, 20)
    clock.advance(4.5)
    found.advance()
    clock.advance(100)
    assert found.advance() is None
    found.end()
    assert [window.end_s for window in found.windows] == [clock.now()]


def test_a_phase_whose_users_never_came_is_not_measured():
    clock = ManualClock()
    found = course("ramp", clock, 1)
    clock.advance(3.5)
    assert found.advance().users == 4
    assert found.windows == []
