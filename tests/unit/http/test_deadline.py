"""Deadline: it is postponed often, passes once when it is due, and has at most one timer."""

from typing import Any

from service.http.deadline import Deadline
from tests.doubles import ManualClock


class Watched:
    def __init__(self) -> None:
        self.clock = ManualClock(0.0)
        self.passed: list[float] = []
        loop: Any = self
        self.time, self.call_at = self.clock.now, self.clock.call_at
        self.deadline = Deadline(loop, lambda: self.passed.append(self.clock.now()))


def test_a_deadline_fires_once_when_due():
    watched = Watched()
    watched.deadline.set(10)
    watched.clock.advance(9)
    assert watched.passed == []
    watched.clock.advance(100)
    assert watched.passed == [10]


def test_a_deadline_is_postponed_without_another_timer():
    watched = Watched()
    for _ in range(100):
        watched.deadline.set(10)
        watched.clock.advance(1)
    assert watched.clock.num_calls == 1
    assert watched.passed == []
    watched.clock.advance(9)
    assert watched.passed == [109]


def test_an_earlier_deadline_takes_effect_at_once():
    watched = Watched()
    watched.deadline.set(75)
    watched.deadline.set(10)
    assert watched.clock.num_calls == 1
    watched.clock.advance(10)
    assert watched.passed == [10]


def test_a_cleared_deadline_never_fires_and_may_be_set_again():
    watched = Watched()
    watched.deadline.set(10)
    watched.deadline.clear()
    watched.clock.advance(100)
    assert (watched.passed, watched.clock.num_calls) == ([], 0)
    watched.deadline.set(1)
    watched.clock.advance(1)
    assert watched.passed == [101]


def test_a_stopped_deadline_leaves_no_timer():
    watched = Watched()
    watched.deadline.set(10)
    watched.deadline.stop()
    assert watched.clock.num_calls == 0
    watched.clock.advance(100)
    assert (watched.passed, watched.clock.num_calls) == ([], 0)
