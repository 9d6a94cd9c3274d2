"""A worker's side: its turn to prepare, a join that is too late for that, and what it tells."""

import argparse

import pytest

from attention_load.hand import Hand
from attention_load.plan import OPTIONS
from attention_load.target import TargetFailed
from tests.unit.loadtest.plans import plan


class LoadAtHand:
    """Counts what is asked of it; `fault` is why it cannot be prepared."""

    def __init__(self):
        self.prepared, self.fault = [], ""

    def prepare(self, plan, url):
        self.prepared.append((plan.run, url))
        if self.fault:
            raise TargetFailed(self.fault)
        return {"run": plan.run, "digest": "a"}

    def take(self):
        return {"statuses": {"200": 1}}

    def close(self):
        return {"statuses": {"200": 2}}


class Hook:
    def add_listener(self, listener):
        self.fire = listener


class Environment:
    host = "http://target"

    def __init__(self, **options):
        self.events = argparse.Namespace(test_start=Hook(), report_to_master=Hook())
        self.parsed_options = argparse.Namespace(**{name: default for name, _, default, _ in OPTIONS} | options)
        self.runner, self.listeners, self.told = self, {}, []

    def register_message(self, kind, listener, concurrent):
        assert concurrent
        self.listeners[kind] = listener

    def send_message(self, kind, data):
        self.told.append((kind, data))

    def hear(self, kind, data=None):
        self.listeners[kind](msg=argparse.Namespace(data=data))


@pytest.fixture
def load():
    return LoadAtHand()


def prepare(environment, run):
    environment.hear("prepare", {"plan": plan(run=run).to_message(), "url": "http://target"})


def test_a_worker_prepares_in_its_turn_and_tells(load):
    environment = Environment()
    Hand(environment, load)
    prepare(environment, 5)
    assert load.prepared == [(5, "http://target")]
    assert environment.told == [("prepared", {"run": 5, "digest": "a"})]


def test_asked_again_and_started_it_does_not_prepare_twice_and_for_the_next_run_it_does(load):
    environment = Environment()
    Hand(environment, load)
    prepare(environment, 5)
    prepare(environment, 5)
    environment.parsed_options.run = 5
    environment.events.test_start.fire()
    prepare(environment, 6)
    assert [run for run, _ in load.prepared] == [5, 6]


def test_a_worker_that_was_not_asked_prepares_when_the_test_starts(load):
    environment = Environment()
    Hand(environment, load)
    environment.parsed_options.run = 5
    environment.events.test_start.fire()
    assert load.prepared == [(5, "http://target")]


def test_a_worker_whose_test_started_before_it_could_listen_prepares_at_once(load):
    Hand(Environment(run=5), load)
    assert load.prepared == [(5, "http://target")]


def test_what_went_wrong_is_told_with_the_run(load):
    environment = Environment()
    Hand(environment, load)
    load.fault = "401"
    prepare(environment, 5)
    assert environment.told == [("prepared", {"run": 5, "fault": "401"})]


def test_it_reports_what_it_counted_and_the_rest_at_the_end(load):
    environment = Environment()
    Hand(environment, load)
    data: dict[str, dict] = {}
    environment.events.report_to_master.fire(data=data)
    environment.hear("finish")
    assert data == {"attention_load": {"statuses": {"200": 1}}}
    assert environment.told == [("finished", {"statuses": {"200": 2}})]
