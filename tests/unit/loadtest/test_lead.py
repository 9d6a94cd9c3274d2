"""Who leads a run: one verdict a run, every way to end it, and workers that differ or are lost."""

import argparse
import json

import pytest

from attention_load.crew import Workers
from attention_load.lead import Lead
from attention_load.plan import OPTIONS, Plan
from attention_load.tally import Outcome, Settled, Tally
from tests.doubles import ManualClock


class Hook:
    def __init__(self):
        self.listeners = []

    def add_listener(self, listener):
        self.listeners.append(listener)

    def fire(self, **told):
        for listener in self.listeners:
            listener(**told)


class Message:
    def __init__(self, node_id, data):
        self.node_id, self.data = node_id, data


class Runner:
    """Of a master: workers are names, and `answer(kind, client_id)` is what they do with a message."""

    cpu_warning_emitted = worker_cpu_warning_emitted = False

    def __init__(self, workers=("one", "two")):
        ready = [argparse.Namespace(id=name) for name in workers]
        self.clients = argparse.Namespace(ready=ready)
        self.listeners = {}
        self.sent = []
        self.answer = lambda kind, client_id, data: None

    def register_message(self, kind, listener):
        self.listeners[kind] = listener

    def send_message(self, kind, data=None, client_id=None):
        self.sent.append((kind, client_id))
        for client in [client_id] if client_id else [client.id for client in self.clients.ready]:
            self.answer(kind, client, data)

    def tell(self, kind, client_id, data):
        self.listeners[kind](msg=Message(client_id, data))


class Environment:
    def __init__(self, runner, **options):
        names = ("test_start", "spawning_complete", "test_stop", "quitting", "quit", "worker_report")
        self.events = argparse.Namespace(**{name: Hook() for name in names})
        self.parsed_options = argparse.Namespace(**{name: default for name, _, default, _ in OPTIONS} | options)
        self.host, self.runner, self.process_exit_code = "http://target", runner, None


class CrewAtHand:
    """A crew whose tally the test fills."""

    lag_s, size = 0.0, 1

    def __init__(self, *, is_able=True):
        self.faults = []
        self.is_able, self.is_finished = is_able, False
        self.tally = Tally()

    def prepare(self, plan, url, tally):
        self.tally, self.faults = tally, [] if self.is_able else ["the target is closed"]
        return {"references": 1} if self.is_able else None

    def collect(self):
        pass

    def finish(self):
        self.is_finished = True


@pytest.fixture
def clock():
    return ManualClock()


def answers(crew, clock, number=100, *, latency_ms=5.0):
    for _ in range(number):
        settled = Settled("x", 200, Outcome.RIGHT, latency_ms, is_good=latency_ms < 1000, was_checked=True)
        crew.tally.add(settled, clock.now())


def play(environment, lead, crew, clock, *, seconds=200, latency_ms=5.0):
    """What Locust does: ask, start, ask every second until there is nothing to do; users at each second."""
    users = [lead.tick()[0]]
    environment.events.test_start.fire()
    for _ in range(seconds):
        environment.events.spawning_complete.fire()
        answers(crew, clock, users[-1], latency_ms=latency_ms(users[-1]) if callable(latency_ms) else latency_ms)
        clock.advance(1)
        told = lead.tick()
        if told is None:
            break
        users.append(told[0])
    environment.events.test_stop.fire()
    return users


def lead_of(crew, clock, **options):
    environment = Environment(Runner(), **options)
    return environment, Lead(environment, crew, "locust 0", clock.now)


def test_a_run_is_prepared_played_finished_and_judged(clock):
    crew = CrewAtHand()
    environment, lead = lead_of(crew, clock, hold_s=8.0)
    users = play(environment, lead, crew, clock)
    assert set(users) == {8}
    assert crew.is_finished
    assert (environment.process_exit_code, lead.report["verdict"]) == (0, "passed")


def test_a_missed_objective_is_the_exit_status(clock):
    crew = CrewAtHand()
    environment, lead = lead_of(crew, clock, hold_s=8.0)
    play(environment, lead, crew, clock, latency_ms=1500)
    assert (environment.process_exit_code, lead.report["missed"]) == (1, ["p99_ms"])


def test_a_report_that_cannot_be_written_is_a_failed_run(clock):
    crew = CrewAtHand()
    environment, lead = lead_of(crew, clock, hold_s=8.0, json_report="/proc/nowhere/load.json")
    play(environment, lead, crew, clock)
    assert (environment.process_exit_code, lead.report["verdict"]) == (1, "failed")
    assert lead.report["missed"] == ["json_report"]


def test_the_shapes_clock_begins_when_all_are_ready(clock):
    crew = CrewAtHand()
    environment, lead = lead_of(crew, clock, shape="ramp", hold_s=1.0)
    first = lead.tick()
    clock.advance(500)  # references take their time
    assert lead.tick() == first
    environment.events.test_start.fire()
    assert lead.tick() == first


def test_a_target_that_cannot_be_prepared_ends_the_run_with_a_fault(clock):
    crew = CrewAtHand(is_able=False)
    environment, lead = lead_of(crew, clock)
    assert play(environment, lead, crew, clock) == [8]
    assert environment.process_exit_code == 1
    assert "the target is closed" in json.dumps(lead.report["objectives"])


def test_a_run_that_is_stopped_before_its_end_has_failed(clock):
    crew = CrewAtHand()
    environment, lead = lead_of(crew, clock, hold_s=100.0)
    play(environment, lead, crew, clock, seconds=30)
    assert environment.process_exit_code == 1
    assert lead.report["missed"] == ["run"]


def test_leaving_while_a_run_goes_on_judges_it_once(clock, capsys):
    crew = CrewAtHand()
    environment, lead = lead_of(crew, clock, hold_s=100.0)
    lead.tick()
    environment.events.test_start.fire()
    environment.events.quitting.fire()
    first = lead.report
    environment.events.test_stop.fire()
    environment.events.quit.fire()
    assert lead.report is first
    assert environment.process_exit_code == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("failed: ")


def test_leaving_without_any_run_is_no_success(clock):
    environment, lead = lead_of(CrewAtHand(), clock)
    environment.events.quitting.fire()
    assert (environment.process_exit_code, lead.report) == (1, None)


def test_a_second_run_has_a_verdict_of_its_own(clock):
    crew = CrewAtHand()
    environment, lead = lead_of(crew, clock, hold_s=8.0)
    play(environment, lead, crew, clock, latency_ms=1500)
    environment.parsed_options.shape = "spike"
    users = play(environment, lead, crew, clock)
    assert set(users) == {2, 8}
    assert (environment.process_exit_code, lead.report["shape"]) == (0, "spike")


def test_options_of_the_page_that_cannot_be_fail_the_run_by_name(clock):
    crew = CrewAtHand()
    environment, lead = lead_of(crew, clock)
    environment.parsed_options.peak_users = 0
    play(environment, lead, crew, clock)
    assert environment.process_exit_code == 1
    assert "--peak-users must be at least 1" in json.dumps(lead.report["objectives"])


def test_a_ramp_stops_after_its_knee_and_reports_it(clock):
    """Up to 4 users 5 ms, from there on far too slow."""
    crew = CrewAtHand()
    environment, lead = lead_of(crew, clock, shape="ramp", peak_users=64, steps=6, hold_s=5.0)
    users = play(environment, lead, crew, clock, latency_ms=lambda users: 5 if users <= 4 else 2000)
    assert sorted(set(users)) == [2, 4, 8, 16, 32]
    assert lead.report["knee"]["users"] == 4
    assert lead.report["knee"]["is_passed"]
    assert environment.process_exit_code == 0


def test_the_report_is_written_where_it_is_asked_for(clock, tmp_path):
    crew = CrewAtHand()
    path = tmp_path / "new" / "load.json"
    environment, lead = lead_of(crew, clock, hold_s=8.0, json_report=str(path), api_key="secret")
    play(environment, lead, crew, clock)
    assert json.loads(path.read_text()) == lead.report
    assert "secret" not in path.read_text()


@pytest.fixture
def workers():
    """A master's crew of two, who is patient for an instant."""
    environment = Environment(Runner())
    return environment, environment.runner, Workers(environment, prepare_s=0.05, finish_s=0.05)


def plan_of(environment, run=1):
    environment.parsed_options.run = run
    return Plan.read(environment.parsed_options)


def willing(runner, digests=("a", "a")):
    by_name = dict(zip(("one", "two"), digests, strict=True))

    def answer(kind, client_id, data):
        if kind == "prepare":
            runner.tell("prepared", client_id, {"run": data["plan"]["run"], "digest": by_name[client_id]})
        else:
            runner.tell("finished", client_id, {"run": 1, **one_answer()})

    return answer


def one_answer():
    tally = Tally(0.5)
    tally.add(Settled("x", 200, Outcome.RIGHT, 5, is_good=True), 1000)
    return tally.to_message()


def test_workers_prepare_one_after_another_and_their_tallies_add_up(workers):
    environment, runner, crew = workers
    runner.answer, tally = willing(runner), Tally(0.5)
    assert crew.prepare(plan_of(environment), "http://target", tally)["digest"] == "a"
    assert runner.sent == [("prepare", "one"), ("prepare", "two")]
    environment.events.worker_report.fire(data={"attention_load": {"run": 1, **one_answer()}})
    crew.finish()
    assert tally.statuses == {"200": 3}
    assert (crew.size, crew.faults) == (2, [])


def test_what_is_told_of_an_earlier_run_is_not_counted(workers):
    environment, runner, crew = workers
    runner.answer, tally = willing(runner), Tally(0.5)
    crew.prepare(plan_of(environment, run=2), "http://target", tally)
    environment.events.worker_report.fire(data={"attention_load": {"run": 1, **one_answer()}})
    assert tally.statuses == {}


def test_workers_with_other_bits_are_a_fault(workers):
    environment, runner, crew = workers
    runner.answer = willing(runner, ("a", "b"))
    assert crew.prepare(plan_of(environment), "http://target", Tally()) is None
    assert crew.faults == ["two workers were given different bits for the same questions"]


def test_a_worker_that_cannot_prepare_is_a_fault(workers):
    environment, runner, crew = workers
    runner.answer = lambda kind, client, data: runner.tell("prepared", client, {"run": 1, "fault": f"{client}: 401"})
    assert crew.prepare(plan_of(environment), "http://target", Tally()) is None
    assert crew.faults == ["one: 401", "two: 401"]


def test_a_worker_that_says_nothing_is_a_fault(workers):
    environment, _, crew = workers
    assert crew.prepare(plan_of(environment), "http://target", Tally()) is None
    assert crew.faults


def test_a_worker_that_is_lost_on_the_way_is_a_fault(workers):
    environment, runner, crew = workers
    runner.answer = willing(runner)
    crew.prepare(plan_of(environment), "http://target", Tally())
    runner.answer = lambda kind, client_id, data: None
    crew.finish()
    assert crew.faults == ["2 workers were lost on the way"]


def test_without_workers_nothing_is_prepared(workers):
    environment, runner, crew = workers
    runner.clients.ready = []
    assert crew.prepare(plan_of(environment), "http://target", Tally()) is None
