"""Coordinator: when the service is ready, and how a rollout ends whatever its processes do.

The processes are statuses that the test reports; hypothesis also draws their order, deaths, silences and lost messages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from service.errors import LayerChanged, NotReady
from service.supervisor.coordinator import ABORT_S, MAX_AGE_S, Coordinator
from service.supervisor.status import Change, DesiredState, Phase, RolloutOutcome, ServiceStatus, State, WorkerStatus
from tests.doubles import ManualClock

OLD = {"a": "sha256:1"}
BOTH = {**OLD, "b": "sha256:2"}
TIMEOUT_S = 30.0


class Process:
    """One process of the coordinator; `follow` applies what it has received and acknowledges it."""

    def __init__(self, coordinator: Coordinator, pid: int, clock: ManualClock) -> None:
        self.coordinator, self.pid, self.clock = coordinator, pid, clock
        self.status = WorkerStatus()
        self.received: list[ServiceStatus] = []
        coordinator.join(pid, self.received.append)

    def report(self, **fields) -> None:
        self.status = dataclasses.replace(self.status, **fields)
        self.coordinator.report(self.pid, self.status)

    def report_for(self, seconds: float) -> None:
        """Report once a second while that time passes."""
        for _ in range(int(seconds)):
            self.clock.advance(1)
            self.report()

    def follow(self, refusal: str = "", **fields) -> None:
        self.report(version=self.service.desired.version, refusal=refusal, **fields)

    def ask(self, name: str, digest: str | None, seen: str | None = None) -> None:
        number = 1 if self.service.outcome is None else self.service.outcome.number + 1
        self.report(change=Change(number, {name: digest}, {} if seen is None else {name: seen}, TIMEOUT_S))

    @property
    def service(self) -> ServiceStatus:
        return self.received[-1]

    @property
    def outcome(self) -> RolloutOutcome:
        assert self.service.outcome is not None
        return self.service.outcome


class Service:
    """A coordinator of two processes, which are up and serve OLD unless `is_up` is false."""

    def __init__(self, *, is_up: bool = True) -> None:
        self.clock = ManualClock()
        self.coordinator = Coordinator(2, self.clock.now)
        self.one, self.two = (Process(self.coordinator, pid, self.clock) for pid in (11, 12))
        for process in (self.one, self.two) if is_up else ():
            process.report(found=OLD)
            process.follow(state=State.READY, found=None)

    @property
    def phase(self) -> tuple[Phase, dict[str, str]]:
        return self.coordinator.desired.phase, dict(self.coordinator.desired.served)

    def until(self, phase: Phase) -> None:
        """Let both processes follow until that phase has begun."""
        while self.coordinator.desired.phase is not phase:
            for process in (self.one, self.two):
                process.follow()


@pytest.fixture
def service():
    return Service()


@pytest.fixture
def empty():
    return Service(is_up=False)


def test_the_service_is_ready_once_all_processes_are_and_each_gets_the_status(service):
    assert service.one.service == service.two.service == ServiceStatus(DesiredState(1, layers=OLD), None, [11, 12])


def test_a_process_that_has_not_reported_is_missing(empty):
    assert empty.one.service.why_not_ready == "2 of 2 processes are not up yet"
    empty.one.report(state=State.READY)
    assert empty.two.service.why_not_ready == "1 of 2 processes is not up yet"
    assert Coordinator(1, empty.clock.now).why_not_ready() == "1 of 1 process is not up yet"


@pytest.mark.parametrize("state", [State.STARTING, State.DRAINING])
def test_one_unready_process_makes_the_service_unready(service, state):
    service.two.report(state=state, reason="a reason of its own")
    assert service.one.service.why_not_ready == f"1 of 2 processes is {state.value}"


def test_a_failure_is_reported_first_with_its_reason(service):
    service.one.report(state=State.STARTING)
    service.two.report(state=State.FAILED, reason="the engine is down")
    assert service.one.service.why_not_ready == "a process has failed: the engine is down"
    service.two.report(reason="")
    assert service.one.service.why_not_ready == "a process has failed"


def test_a_report_counts_until_it_is_too_old(service):
    service.one.report_for(MAX_AGE_S)
    assert (service.one.service.why_not_ready, service.one.service.ready) == (None, [11, 12])
    service.one.report_for(1)
    assert service.one.service.why_not_ready == f"a process has not reported for {MAX_AGE_S + 1:.0f} s"
    assert service.one.service.ready == [11]
    service.two.report()
    assert service.one.service.why_not_ready is None


def test_a_process_that_left_is_missing_and_what_it_still_reports_counts_for_nothing(service):
    for _ in range(2):
        service.coordinator.leave(12)
        service.two.report()
        assert service.one.service.why_not_ready == "1 of 2 processes is not up yet"


def test_only_news_are_sent(service):
    number = len(service.two.received)
    for _ in range(3):
        service.one.report()
    assert len(service.two.received) == number


def test_processes_whose_self_checks_differ_make_the_service_unready(service):
    """The layer would give other bits in each."""
    service.one.report(least_rows={"sha256:1": 4})
    assert service.coordinator.why_not_ready() is None, "the other has reported none"
    service.two.report(least_rows={"sha256:1": 48, "sha256:2": 4})
    assert service.coordinator.why_not_ready() == "the self-check of a layer gave different results in two processes"
    service.two.report(least_rows={"sha256:1": 4, "sha256:2": 4})
    assert service.coordinator.why_not_ready() is None


def test_a_layer_whose_self_checks_differ_is_rolled_back(service):
    service.one.ask("b", BOTH["b"])
    for process, rows in ((service.one, 48), (service.two, 0)):
        process.follow(least_rows={"sha256:1": 4, "sha256:2": rows})
    assert service.phase == (Phase.SETTLED, OLD)
    for process in (service.one, service.two):
        process.follow(least_rows={"sha256:1": 4})
    assert "gave different results in two processes" in service.one.outcome.message


def test_the_first_process_that_has_loaded_decides_the_first_desired_state(empty):
    empty.two.report(found=OLD)
    empty.one.report(found={})
    assert empty.one.service.desired == DesiredState(1, Phase.SETTLED, OLD)


def test_a_process_that_starts_later_learns_the_desired_state_at_once(service):
    assert Process(service.coordinator, 13, service.clock).received[0].desired == DesiredState(1, Phase.SETTLED, OLD)


def test_a_new_layer_takes_three_desired_states(service):
    service.one.ask("b", "sha256:2")
    assert service.phase == (Phase.PREPARE, OLD)
    service.until(Phase.SERVE)
    assert service.phase == (Phase.SERVE, BOTH)
    assert service.one.service.outcome is None
    service.until(Phase.SETTLED)
    assert service.coordinator.desired == DesiredState(4, Phase.SETTLED, BOTH)
    assert service.one.outcome == RolloutOutcome(1, is_new=True)
    assert service.two.service.outcome is None, "it has requested no change"


@pytest.mark.parametrize(
    ("name", "digest", "layers", "is_new"),
    [("a", "sha256:9", {"a": "sha256:9"}, False), ("a", None, {}, False), ("b", "sha256:2", BOTH, True)],
    ids=["replace", "drop", "add"],
)
def test_a_rollout_changes_one_layer(service, name, digest, layers, is_new):
    service.one.ask(name, digest, OLD.get(name))
    service.until(Phase.SERVE)
    service.until(Phase.SETTLED)
    assert service.coordinator.desired.layers == layers
    assert service.one.outcome == RolloutOutcome(1, is_new=is_new)


def test_a_layer_that_all_serve_is_a_success_without_a_rollout(service):
    service.one.ask("a", "sha256:1", "sha256:1")
    assert service.one.outcome == RolloutOutcome(1)
    assert service.coordinator.desired.version == 1


@pytest.mark.parametrize("fields", [{"state": State.FAILED}, {"version": 0, "state": State.READY}])
def test_a_layer_that_a_process_lacks_is_rolled_out_again(service, fields):
    service.two.report(version=1, state=State.FAILED)
    service.one.ask("a", "sha256:1", "sha256:1")
    assert service.coordinator.desired.phase is Phase.PREPARE


def test_a_repeated_request_begins_nothing_twice(service):
    service.one.ask("b", "sha256:2")
    for _ in range(3):
        service.one.report()
    service.until(Phase.SERVE)
    service.until(Phase.SETTLED)
    service.one.report()
    assert service.coordinator.desired.version == 4


def fails(outcome, error, message):
    return outcome.code == error.code and outcome.retry_after_s >= 1 and message in outcome.message


@pytest.mark.parametrize("phase", [Phase.PREPARE, Phase.SERVE])
@pytest.mark.parametrize(
    ("is_file_changed", "error", "message"),
    [(False, NotReady, "rolled back: no memory"), (True, LayerChanged, "changed while")],
)
def test_a_refusal_rolls_back_and_is_answered_once_all_are_back_D1(service, phase, is_file_changed, error, message):
    service.one.ask("b", "sha256:2")
    service.until(phase)
    service.two.follow("no memory", is_file_changed=is_file_changed)
    assert service.phase == (Phase.SETTLED, OLD)
    service.one.follow()
    assert service.one.service.outcome is None
    service.two.follow(is_file_changed=False)
    assert fails(service.one.outcome, error, message)
    service.one.ask("b", "sha256:2")
    assert service.phase[0] is Phase.PREPARE, "a new rollout begins"


def test_a_process_that_never_comes_back_delays_no_error_for_long(service):
    service.one.ask("b", "sha256:2")
    service.two.follow("no memory")
    service.one.follow()
    service.clock.advance(ABORT_S)
    service.one.report()
    assert fails(service.one.outcome, NotReady, "no memory")


@pytest.mark.parametrize("phase", [Phase.PREPARE, Phase.SERVE])
def test_a_missing_acknowledgement_rolls_back(service, phase):
    service.one.ask("b", "sha256:2")
    service.until(phase)
    for _ in range(int(TIMEOUT_S)):
        assert service.coordinator.desired.phase is phase
        service.clock.advance(1)
        service.two.report()
        service.one.follow()
    assert service.phase == (Phase.SETTLED, OLD)
    for process in (service.one, service.two):
        process.follow()
    assert fails(service.one.outcome, NotReady, "in time")


@pytest.mark.parametrize("how", ["dies", "is silent"])
def test_a_death_during_prepare_rolls_back_at_once(service, how):
    service.one.ask("b", "sha256:2")
    if how == "dies":
        service.coordinator.leave(12)
    else:
        service.one.report_for(MAX_AGE_S + 1)
    assert service.phase == (Phase.SETTLED, OLD)
    service.one.follow()
    service.one.report_for(ABORT_S)
    assert fails(service.one.outcome, NotReady, "ended or fell silent")


def test_a_pause_of_the_coordinator_makes_no_process_silent_and_ends_no_rollout(service):
    service.one.ask("b", "sha256:2")
    service.clock.advance(TIMEOUT_S - 1)
    service.one.report()
    assert (service.one.service.why_not_ready, service.one.service.ready) == (None, [11, 12])
    assert service.phase[0] is Phase.PREPARE
    service.one.report_for(MAX_AGE_S + 1)
    assert service.one.service.ready == [11], "it is silent since"


@pytest.mark.parametrize("phase", [Phase.PREPARE, Phase.SERVE])
def test_a_pause_of_the_coordinator_counts_against_no_deadline(service, phase):
    service.one.ask("b", "sha256:2")
    service.until(phase)
    service.clock.advance(TIMEOUT_S + 10)
    for _ in range(int(TIMEOUT_S)):
        service.two.report()
        service.one.follow()
        assert service.phase[0] is phase
        service.clock.advance(1)
    service.one.follow()
    assert service.phase == (Phase.SETTLED, OLD), "the time since the pause counts"


def test_every_report_is_answered(service):
    num_before = len(service.one.received), len(service.two.received)
    service.one.report()
    assert (len(service.one.received), len(service.two.received)) == (num_before[0] + 1, num_before[1])


def test_a_death_during_serve_is_acknowledged_by_the_replacement(service):
    service.one.ask("b", "sha256:2")
    service.until(Phase.SERVE)
    service.coordinator.leave(12)
    service.one.follow()
    assert service.phase == (Phase.SERVE, BOTH)
    Process(service.coordinator, 13, service.clock).follow(state=State.READY)
    assert service.phase == (Phase.SETTLED, BOTH)
    assert service.one.outcome == RolloutOutcome(1, is_new=True)


@pytest.mark.parametrize("phase", [Phase.PREPARE, Phase.SERVE])
@pytest.mark.parametrize("how", ["withdraws", "asks for another", "dies"])
def test_an_author_that_no_longer_waits_rolls_back(service, phase, how):
    service.one.ask("b", "sha256:2")
    service.until(phase)
    if how == "dies":
        service.coordinator.leave(11)
    else:
        service.one.report(change=None if how == "withdraws" else Change(2, {"a": "sha256:8"}, {}, TIMEOUT_S))
    assert service.phase == (Phase.SETTLED, OLD)
    if how == "asks for another":
        assert fails(service.one.outcome, LayerChanged, "came first")
    service.two.ask("b", "sha256:2")
    assert (service.phase[0] is Phase.PREPARE) is (how != "dies"), "a new rollout begins if all processes are up"


def test_a_second_rollout_meanwhile_is_refused_with_retry_after(service):
    service.one.ask("b", "sha256:2")
    service.two.ask("a", None)
    assert fails(service.two.outcome, NotReady, "another change")
    assert service.two.outcome.retry_after_s == 1
    assert service.phase == (Phase.PREPARE, OLD)


def test_an_earlier_rollout_does_not_undo_a_later_one_of_the_same_layer(service):
    service.one.ask("a", "sha256:8", "sha256:0")
    assert fails(service.one.outcome, LayerChanged, "came first")


def test_of_two_that_drop_a_layer_the_later_succeeds_too(service):
    service.one.ask("absent", None)
    assert service.one.outcome == RolloutOutcome(1)


@pytest.mark.parametrize("state", [State.STARTING, State.DRAINING])
def test_without_every_process_up_nothing_begins(service, state):
    service.two.report(state=state)
    service.one.ask("b", "sha256:2")
    assert fails(service.one.outcome, NotReady, "1 of 2 processes are up")
    assert service.coordinator.desired.version == 1


class Worker:
    """A process of the state machine: its reports and what it gets travel as messages, of which only the latest waits."""

    def __init__(
        self,
        coordinator: Coordinator,
        pid: int,
        told: Callable[[DesiredState], None],
        succeeded: Callable[[Change], None],
    ) -> None:
        self.coordinator, self.pid, self.told, self.succeeded = coordinator, pid, told, succeeded
        self.status = WorkerStatus()
        self.inbox: ServiceStatus | None = None
        self.outbox: WorkerStatus | None = None
        self.service = ServiceStatus()
        self.applied = DesiredState()
        self.changes: list[Change] = []
        self.num_ended = 0
        coordinator.join(pid, self.take)

    def take(self, service: ServiceStatus) -> None:
        self.inbox = service
        self.told(service.desired)
        outcome = service.outcome
        if outcome is not None and outcome.number > self.num_ended:
            self.num_ended = outcome.number
            if not outcome.code:
                self.succeeded(self.changes[outcome.number - 1])

    def report(self, **fields) -> None:
        self.outbox = self.status = dataclasses.replace(self.status, **fields)

    def deliver(self, *, to_worker: bool) -> None:
        if to_worker and self.inbox is not None:
            self.service, self.inbox = self.inbox, None
        if not to_worker and self.outbox is not None:
            status, self.outbox = self.outbox, None
            self.coordinator.report(self.pid, status)


class AnyOrder(RuleBasedStateMachine):
    """Three processes; any order of messages, refusals, requests, withdrawals, deaths, replacements, silences and time."""

    NUM = 3

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.coordinator = Coordinator(self.NUM, self.clock.now)
        self.pids = iter(range(1, 10_000))
        self.wrong: list[Change] = []
        self.workers: list[Worker] = []
        self.workers += [self.started() for _ in range(self.NUM)]
        self.prepared: set[int] = set()  # versions of SERVE that began after all had acknowledged PREPARE
        for worker in self.workers:
            worker.report(found=OLD)
            worker.deliver(to_worker=False)
        self.go_on()

    def started(self) -> Worker:
        return Worker(self.coordinator, next(self.pids), self.told, self.succeeded)

    def told(self, desired: DesiredState) -> None:
        if desired.phase is Phase.SERVE and all(one.status.version == desired.version - 1 for one in self.workers):
            self.prepared.add(desired.version)

    def succeeded(self, change: Change) -> None:
        """Check at the moment of the outcome: the next change may follow at once."""
        for served in (worker.applied.served for worker in self.workers):
            if any(served.get(name) != digest for name, digest in change.layers.items()):
                self.wrong.append(change)
        if change.layer_set and any(worker.applied.served_set != change.layer_set for worker in self.workers):
            self.wrong.append(change)

    def go_on(self) -> None:
        """Let everything arrive and everyone follow."""
        for _ in range(12):
            for worker in self.workers:
                worker.deliver(to_worker=True)
                self.apply(worker)
                worker.deliver(to_worker=False)

    def apply(self, worker: Worker, **fields) -> None:
        desired = worker.service.desired
        if desired.version:
            worker.applied = desired
            worker.report(**{"state": State.READY, "version": desired.version, "found": None, "refusal": "", **fields})

    workers_ = st.integers(0, NUM - 1)

    @rule(number=workers_, to_worker=st.booleans())
    def a_message_arrives(self, number: int, to_worker: bool) -> None:
        self.workers[number].deliver(to_worker=to_worker)

    @rule(number=workers_)
    def a_process_follows(self, number: int) -> None:
        self.apply(self.workers[number])

    @rule(number=workers_)
    def a_process_repeats_its_report(self, number: int) -> None:
        self.workers[number].report()

    @rule(number=workers_, is_file_changed=st.booleans())
    def a_process_refuses(self, number: int, is_file_changed: bool) -> None:
        worker = self.workers[number]
        if worker.service.desired.phase is not Phase.SETTLED:
            self.apply(worker, refusal="no memory", is_file_changed=is_file_changed)

    @rule(number=workers_, name=st.sampled_from("abc"), digest=st.sampled_from([None, "v1", "v2"]))
    def an_admin_asks(self, number: int, name: str, digest: str | None) -> None:
        worker = self.workers[number]
        if worker.status.change is None and worker.applied.version:
            self.ask(worker, {name: digest})

    @rule(number=workers_, layers=st.dictionaries(st.sampled_from("abc"), st.sampled_from(["v1", "v2"])))
    def a_follower_asks(self, number: int, layers: dict[str, str]) -> None:
        worker = self.workers[number]
        if worker.status.change is None and worker.applied.version:
            self.ask(
                worker, {**dict.fromkeys(worker.service.desired.layers), **layers}, f"set of {sorted(layers.items())}"
            )

    def ask(self, worker: Worker, layers: dict[str, str | None], layer_set: str = "") -> None:
        seen = worker.service.desired.layers
        worker.changes.append(Change(len(worker.changes) + 1, layers, seen, TIMEOUT_S, layer_set))
        worker.report(change=worker.changes[-1])

    @rule(number=workers_)
    def an_admin_leaves(self, number: int) -> None:
        self.workers[number].report(change=None)

    @rule(number=workers_)
    def a_process_dies_and_is_replaced(self, number: int) -> None:
        self.coordinator.leave(self.workers[number].pid)
        self.workers[number] = self.started()

    @rule(number=workers_, state=st.sampled_from(State))
    def a_process_changes_its_state(self, number: int, state: State) -> None:
        self.workers[number].report(state=state)

    @rule(seconds=st.sampled_from([1.0, ABORT_S, MAX_AGE_S + 1, TIMEOUT_S]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @precondition(lambda self: any(worker.status.change is not None for worker in self.workers))
    @rule()
    def all_goes_well(self) -> None:
        """Else hypothesis hardly ever gets to the end of a rollout."""
        self.go_on()

    @invariant()
    def every_process_serves_the_old_or_the_new_layers(self) -> None:
        desired = self.coordinator.desired
        settled = desired.layers if desired.phase is Phase.SETTLED else desired.previous
        for worker in self.workers:
            is_current = worker.applied.version == desired.version
            assert not is_current or worker.applied.served in (settled, desired.layers)
            assert not desired.served_set or desired.served_set == f"set of {sorted(desired.served.items())}", (
                "of one set"
            )
            is_early = worker.applied.phase is Phase.SERVE and worker.applied.version not in self.prepared
            assert not is_early, "it serves a layer that some process was not prepared for"

    @invariant()
    def a_success_is_served_by_every_process(self) -> None:
        assert self.wrong == []

    @invariant()
    def an_answered_change_is_no_longer_requested(self) -> None:
        for worker in self.workers:
            outcome, change = worker.service.outcome, worker.status.change
            if outcome is not None and change is not None and outcome.number == change.number:
                worker.report(change=None)

    def teardown(self) -> None:
        for _ in range(3):
            self.clock.advance(1)
            self.go_on()
            for worker in self.workers:
                worker.report(change=None)
        self.go_on()
        desired = self.coordinator.desired
        assert desired.phase is Phase.SETTLED
        assert all(worker.applied == desired for worker in self.workers), "all or none"
        assert self.coordinator.why_not_ready() is None
        self.ask(self.workers[0], {"a": "v9"})
        self.go_on()
        assert self.wrong == []
        assert {worker.applied.layers.get("a") for worker in self.workers} == {"v9"}, "no rollout is in progress"


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=200, stateful_step_count=40)
