"""Supervisor: its decisions, with a scripted operating system and a manual clock."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys

import pytest

from service.supervisor import processes
from service.supervisor.status import DesiredState, State, WorkerStatus
from service.supervisor.supervisor import EXIT_REFUSED, LAYERS, Plan, Supervisor, exec_supervisor

TERM, INT, KILL, HUP = signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGHUP
GRACE_S, DELAY_S, CHECK_S = 30.0, 5.0, 12.0


class ScriptEnded(Exception):
    """The supervisor waits again, but the script has no step left."""


EOF = object()


class FakeChannel:
    """The supervisor's end of a channel; the script writes what arrives, EOF is the end of file."""

    is_full = is_ended = False

    def __init__(self):
        self.arrived = []
        self.sent = []
        self.is_closed = False

    def send(self, message):
        self.sent.append(message)

    def flush(self):
        pass

    def receive(self):
        arrived, self.arrived = self.arrived, []
        self.is_ended |= EOF in arrived
        return next((message for message in reversed(arrived) if message != EOF), None)

    def close(self):
        self.is_closed = True


class FakeSystem:
    """An operating system that follows `script`: each step happens while the supervisor waits.

    Steps are ("signal", n), ("exit", pid, code), ("ping", slot) for a report without news, ("report", slot, status), ("message",
    slot, anything), ("pass", seconds), and ("due",), which lets the timeout of the wait pass.
    """

    def __init__(self, *script):
        self.script = list(script)
        self.time = 100.0
        self.next_pid = 1000
        self.spawned = []
        self.killed = []
        self.ended = []
        self.channels = []
        self.waits = []
        self.refuses_to_spawn = 0

    def spawn(self, command):
        if self.refuses_to_spawn:
            self.refuses_to_spawn -= 1
            raise OSError(11, "Resource temporarily unavailable")
        self.next_pid += 1
        self.spawned.append((self.time, command))
        self.channels.append(FakeChannel())
        return self.next_pid, self.channels[-1]

    def kill(self, pid, signum):
        self.killed.append((pid, signum))

    def reap(self):
        ended, self.ended = self.ended, []
        return ended

    def channel_of(self, slot):
        """Return the channel of the last process in a slot."""
        return [one for one, (_, command) in zip(self.channels, self.spawned, strict=True) if command[4] == str(slot)][
            -1
        ]

    def wait(self, timeout_s, channels):
        assert all(not channel.is_closed for channel in channels)
        self.waits.append(timeout_s)
        if not self.script:
            raise ScriptEnded
        what, *values = self.script.pop(0)
        if what == "signal":
            return values[0]
        if what == "exit":
            self.ended.append(tuple(values))
            return signal.SIGCHLD
        if what == "due":
            assert timeout_s is not None, "nothing is due"
            self.time += timeout_s
            return None
        if what == "pass":
            self.time += values[0]
        else:
            message = {"ping": WorkerStatus(), "report": values[-1]}.get(what, values[-1])
            is_status = isinstance(message, WorkerStatus)
            self.channel_of(values[0]).arrived.append(dataclasses.asdict(message) if is_status else message)
        return self.wait(timeout_s, channels)

    def now(self):
        return self.time


class Outcome:
    def __init__(self, system, *, workers=2, watchdog_timeout_s=60.0, line_s=0.0, welcome=""):
        plan = Plan(
            command=("worker", "--port", "8123"),
            host="127.0.0.1",
            port=0,
            workers=workers,
            drain_s=DELAY_S + GRACE_S,
            watchdog_timeout_s=watchdog_timeout_s,
            welcome=welcome,
        )
        self.system = system
        self.line_s = line_s  # seconds that writing a log line takes
        self.cleaned_up = list[int]()
        self.lines = []
        self.exit_code = None
        supervisor = Supervisor(plan, system, self.cleaned_up.append, self.log)
        with contextlib.suppress(ScriptEnded):
            self.exit_code = supervisor.run()

    def log(self, level, event, **fields):
        self.lines.append((level, event, fields))
        self.system.time += self.line_s

    def fields(self, event):
        return [fields for _, name, fields in self.lines if name == event]


@pytest.mark.parametrize("run_dir", [None, "/some/where"])
def test_a_plan_survives_the_exec_and_the_environment_is_no_argument(monkeypatch, run_dir):
    """Other users can read the arguments, not the environment."""
    execs = []

    def execve(*arguments):
        execs.append(arguments)
        raise SystemExit

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setattr(signal, "pthread_sigmask", lambda *_: None)
    plan = Plan(["run", "it"], "::1", 80, 3, 31.5, 60.0, run_dir, "plain", "starts\n")
    with pytest.raises(SystemExit):
        exec_supervisor(plan, {"A": "secret"})
    ((_, command, environment),) = execs
    assert Plan(**json.loads(command[-1])) == plan
    assert environment == {"A": "secret"}
    assert not any("secret" in argument for argument in command)


def test_the_supervisor_imports_neither_torch_nor_the_libraries_of_a_worker():
    code = "import service.supervisor.supervisor, sys; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    heavy = {"torch", "numpy", "pydantic", "structlog", "prometheus_client", "uvicorn", "asyncio", "fastapi"}
    assert heavy.isdisjoint(modules)


WELCOME = f"it serves attention{LAYERS}\n"


@pytest.mark.parametrize(
    ("layers", "named"), [(0, r""), (2, ", l00000, l00001"), (14_000, r", l00000, .*, l000\d\d, … \(14000 layers\)")]
)
def test_a_terminal_reads_once_what_is_served_when_it_is(monkeypatch, layers, named):
    said: list[str] = []
    monkeypatch.setattr(processes, "write_text", said.append)
    ready = WorkerStatus(State.READY, version=1, found={f"l{number:05d}": "sha256:1" for number in range(layers)})
    Outcome(FakeSystem(("report", 0, ready)), welcome=WELCOME)
    assert said == []
    both = ("report", 0, ready), ("report", 1, ready)
    Outcome(FakeSystem(*both, ("exit", 1001, 1), ("due",), ("report", 0, ready)), welcome=WELCOME)
    assert re.fullmatch(f"it serves attention{named}\n", "".join(said))


def test_the_supervisor_starts_every_slot_with_its_arguments():
    outcome = Outcome(FakeSystem())
    assert [command for _, command in outcome.system.spawned] == [
        ["worker", "--port", "8123", "--slot", "0", "--peers", "0"],
        ["worker", "--port", "8123", "--slot", "1", "--peers", "0"],
    ]


def test_with_nothing_due_the_supervisor_sleeps_until_a_signal_or_the_next_watchdog_check():
    assert Outcome(FakeSystem(("due",))).system.waits == [CHECK_S, CHECK_S]


def test_a_silent_worker_dumps_its_stack_and_is_killed_and_replaced():
    checks = [step for _ in range(6) for step in (("ping", 0), ("due",))]
    outcome = Outcome(FakeSystem(("ping", 1), *checks, ("exit", 1002, -KILL), ("due",)))
    assert outcome.system.killed == [(1002, signal.SIGQUIT), (1002, KILL)]
    assert outcome.fields("worker_silent") == [
        {"worker": 1, "pid": 1002, "silent_s": 48.0, "signal": "SIGQUIT"},
        {"worker": 1, "pid": 1002, "silent_s": 60.0, "signal": "SIGKILL"},
    ]
    assert outcome.system.spawned[2][1][4] == "1"


def test_an_unkillable_worker_is_not_killed_again():
    assert len(Outcome(FakeSystem(("ping", 0), *[("due",)] * 12)).system.killed) == 2


def test_a_worker_before_its_first_ping_counts_as_starting():
    assert Outcome(FakeSystem(*[("due",)] * 20)).system.killed == []


def test_a_ping_in_time_resets_the_watchdog():
    script = [("ping", 0), *[("due",)] * 5, ("ping", 0), *[("due",)] * 5]
    assert Outcome(FakeSystem(*script)).system.killed == [(1001, signal.SIGQUIT)] * 2


def test_a_service_stopped_as_a_whole_continues_after_sigcont():
    script = [("ping", 0), ("ping", 1), ("due",), ("pass", 3600), ("due",), ("ping", 0), ("ping", 1), ("due",)]
    assert Outcome(FakeSystem(*script)).system.killed == []


def test_pings_of_a_dead_worker_do_not_count_for_its_replacement():
    script = [("ping", 0), ("exit", 1001, 1), *[("due",)] * 20]
    assert Outcome(FakeSystem(*script)).system.killed == []


def test_an_unread_log_does_not_make_watchdog_checks_follow_at_once():
    """The workers block on the same log, so they get a full check interval to recover."""
    script = [("ping", 0), ("ping", 1), *[("due",)] * 5, ("ping", 0), ("ping", 1), ("due",)]
    outcome = Outcome(FakeSystem(*script), line_s=100.0)
    assert outcome.system.killed == [(1001, signal.SIGQUIT), (1002, signal.SIGQUIT)]
    assert outcome.system.waits[-1] == CHECK_S


@pytest.mark.parametrize("message", [None, 7, "ping", [], {}, {"state": "ready"}, {"state": []}], ids=repr)
def test_a_malformed_message_is_no_sign_of_life_and_ends_nothing(message):
    outcome = Outcome(FakeSystem(("ping", 0), ("due",), ("message", 0, message), *[("due",)] * 8))
    assert outcome.system.killed == [(1001, signal.SIGQUIT), (1001, KILL)]
    assert outcome.exit_code is None


def test_a_worker_that_closes_its_channel_is_dead_for_the_others_and_is_replaced():
    ready = [("report", slot, WorkerStatus(State.READY)) for slot in (0, 1)]
    outcome = Outcome(FakeSystem(*ready, ("message", 0, EOF), *[ready[1], ("due",)] * 6))
    first, second = outcome.system.channels
    assert first.is_closed
    assert second.sent[-1].why_not_ready == "1 of 2 processes is not up yet"
    assert outcome.system.killed == [(1001, signal.SIGQUIT), (1001, KILL)]


def test_a_worker_that_closes_its_channel_before_its_first_report_is_replaced_too():
    assert (1001, KILL) in Outcome(FakeSystem(("message", 0, EOF), *[("due",)] * 8)).system.killed


def test_workers_learn_from_each_other_through_the_supervisor():
    ready = WorkerStatus(State.READY, found={"a": "x"})
    outcome = Outcome(FakeSystem(("report", 0, ready), ("report", 1, ready), ("exit", 1001, -KILL)))
    first, second = outcome.system.channels
    assert first.sent[-1].why_not_ready is None
    assert second.sent[-1].why_not_ready == "1 of 2 processes is not up yet"
    assert second.sent[-1].desired == DesiredState(1, layers={"a": "x"})


def test_a_replacement_learns_the_desired_state_at_its_start():
    ready = WorkerStatus(State.READY, found={"a": "x"})
    outcome = Outcome(FakeSystem(("report", 0, ready), ("exit", 1002, 1), ("due",)))
    assert outcome.system.channels[2].sent[0].desired == DesiredState(1, layers={"a": "x"})


def test_the_last_report_of_a_process_counts_though_it_has_ended():
    system = FakeSystem(("exit", 1001, EXIT_REFUSED), ("due",))
    reap = system.reap

    def reap_late():
        ended = reap()
        if ended:
            system.channels[0].arrived.append(dataclasses.asdict(WorkerStatus(State.READY)))
        return ended

    system.reap = reap_late  # type: ignore[method-assign]
    assert len(Outcome(system).system.spawned) == 3, "the slot has served"


def test_the_watchdog_checks_no_worker_during_shutdown():
    script = [
        ("ping", 0),
        *[("due",)] * 4,
        ("signal", TERM),
        ("pass", CHECK_S),
        ("signal", HUP),
        ("pass", CHECK_S),
        ("signal", HUP),
    ]
    outcome = Outcome(FakeSystem(*script))
    assert outcome.system.killed == [(1001, TERM), (1002, TERM)]
    assert outcome.system.waits[-1] == DELAY_S + GRACE_S + 2 - 2 * CHECK_S


def test_a_crashed_worker_is_reaped_logged_and_replaced_in_its_slot():
    outcome = Outcome(FakeSystem(("pass", 60), ("exit", 1002, -KILL), ("due",)))
    assert outcome.cleaned_up == [1]
    assert outcome.fields("worker_died") == [
        {"worker": 1, "pid": 1002, "lived_s": 60.0, "restart_in_s": 0.1, "signal": "SIGKILL"}
    ]
    assert outcome.system.spawned[2][1][4] == "1"
    assert outcome.system.spawned[2][0] == pytest.approx(160.1)


def test_a_worker_that_exits_unasked_is_replaced_even_after_an_orderly_exit():
    outcome = Outcome(FakeSystem(("pass", 60), ("exit", 1001, 0), ("due",)))
    assert len(outcome.system.spawned) == 3


def test_rapid_crashes_delay_restarts_up_to_five_seconds():
    script = [step for pid in range(1001, 1010) for step in (("exit", pid, 1), ("due",))]
    outcome = Outcome(FakeSystem(*script), workers=1, watchdog_timeout_s=3600)
    delays = [fields["restart_in_s"] for fields in outcome.fields("worker_died")]
    assert delays == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]


def test_a_worker_that_lived_ten_seconds_resets_the_delay():
    outcome = Outcome(FakeSystem(("exit", 1001, 1), ("due",), ("pass", 10), ("exit", 1002, 1), ("due",)), workers=1)
    assert [fields["restart_in_s"] for fields in outcome.fields("worker_died")] == [0.1, 0.1]


def test_a_crash_of_one_slot_does_not_slow_another():
    outcome = Outcome(FakeSystem(("exit", 1001, 1), ("due",), ("exit", 1003, 1), ("exit", 1002, 1)))
    assert [fields["restart_in_s"] for fields in outcome.fields("worker_died")] == [0.1, 0.2, 0.1]


def test_a_replacement_gets_the_number_of_live_workers():
    script = [("ping", 0), ("ping", 2), ("exit", 1002, 1), ("due",), ("exit", 1001, 1), ("exit", 1003, 1), ("due",)]
    spawned = Outcome(FakeSystem(*script), workers=3).system.spawned[3:]
    assert [(command[4], command[-1]) for _, command in spawned] == [("1", "2"), ("0", "0"), ("2", "0")]


def test_a_failed_process_start_is_retried_later():
    system = FakeSystem(("due",))
    system.refuses_to_spawn = 1
    outcome = Outcome(system, workers=1)
    assert outcome.fields("worker_not_started") == [{"worker": 0, "reason": "Resource temporarily unavailable"}]
    assert len(system.spawned) == 1


def test_an_adopted_child_is_reaped_and_not_replaced():
    outcome = Outcome(FakeSystem(("exit", 4711, 1)))
    assert (outcome.cleaned_up, len(outcome.system.spawned)) == ([], 2)


@pytest.mark.parametrize("signum", [TERM, INT])
def test_a_first_signal_is_forwarded_as_sigterm_and_an_orderly_end_is_zero(signum):
    outcome = Outcome(FakeSystem(("signal", signum), ("exit", 1001, 0), ("exit", 1002, 0)))
    assert outcome.system.killed == [(1001, TERM), (1002, TERM)]
    assert outcome.exit_code == 0
    assert outcome.cleaned_up == [0, 1]


def test_a_worker_that_gets_sigterm_before_its_handler_exits_in_order():
    assert Outcome(FakeSystem(("signal", TERM), ("exit", 1001, -TERM), ("exit", 1002, 0))).exit_code == 0


def test_a_worker_that_crashes_while_it_drains_makes_the_exit_code_one():
    assert Outcome(FakeSystem(("signal", TERM), ("exit", 1001, -signal.SIGSEGV), ("exit", 1002, 0))).exit_code == 1


def test_no_worker_is_replaced_during_shutdown():
    outcome = Outcome(FakeSystem(("exit", 1001, 1), ("signal", TERM), ("pass", 30), ("exit", 1002, 0)))
    assert (outcome.exit_code, len(outcome.system.spawned)) == (0, 2)


def test_an_end_without_any_worker_alive_is_immediate():
    assert Outcome(FakeSystem(("exit", 1001, 1), ("signal", TERM)), workers=1).exit_code == 0


def test_a_worker_beyond_delay_grace_and_two_seconds_is_killed_once():
    outcome = Outcome(FakeSystem(("signal", TERM), ("exit", 1001, 0), ("due",), ("exit", 1002, -KILL)))
    assert outcome.system.waits[2] == DELAY_S + GRACE_S + 2
    assert outcome.system.killed[2:] == [(1002, KILL)]
    assert outcome.system.waits[3] is None, "nothing is due any more"
    assert outcome.exit_code == 1


@pytest.mark.parametrize(("second", "exit_code"), [(TERM, 143), (INT, 130)])
def test_a_second_signal_kills_at_once_and_the_exit_code_names_it(second, exit_code):
    script = [("signal", TERM), ("pass", 0.2), ("signal", second), ("exit", 1001, -KILL), ("exit", 1002, -KILL)]
    outcome = Outcome(FakeSystem(*script))
    assert outcome.system.killed[2:] == [(1001, KILL), (1002, KILL)]
    assert outcome.exit_code == exit_code


def test_another_signal_forces_also_within_an_echo_of_the_first():
    script = [("signal", INT), ("signal", TERM), ("exit", 1001, -KILL), ("exit", 1002, -KILL)]
    assert Outcome(FakeSystem(*script)).exit_code == 143


def test_the_same_signal_at_once_is_an_echo_of_the_first():
    outcome = Outcome(
        FakeSystem(("signal", TERM), ("pass", 0.1), ("signal", TERM), ("exit", 1001, 0), ("exit", 1002, 0))
    )
    assert outcome.system.killed == [(1001, TERM), (1002, TERM)]
    assert outcome.exit_code == 0


def test_a_hangup_is_logged_and_ignored():
    outcome = Outcome(FakeSystem(("signal", HUP)))
    assert outcome.fields("signal_ignored") == [{"signal": "SIGHUP"}]
    assert outcome.system.killed == []


def test_a_refusal_before_readiness_ends_all_with_its_code_and_one_line(capsys):
    refused = [("report", slot, WorkerStatus(start_error="the layer directory is empty")) for slot in (0, 1)]
    outcome = Outcome(FakeSystem(*refused, ("exit", 1002, EXIT_REFUSED), ("exit", 1001, EXIT_REFUSED)))
    assert outcome.system.killed == [(1001, TERM)]
    assert (outcome.exit_code, len(outcome.system.spawned)) == (EXIT_REFUSED, 2)
    assert capsys.readouterr().err == "attention-service: the layer directory is empty\n"


def test_the_first_signal_after_a_refusal_lets_the_others_drain():
    ready, refused = ("report", 0, WorkerStatus(State.READY)), ("exit", 1002, EXIT_REFUSED)
    stops = [("signal", TERM), ("pass", 0.1), ("signal", TERM)]
    outcome = Outcome(FakeSystem(ready, refused, ("pass", 3), *stops, ("due",), ("exit", 1001, -KILL)))
    assert outcome.system.killed == [(1001, TERM), (1001, KILL)]
    assert outcome.system.waits[-2] == pytest.approx(DELAY_S + GRACE_S + 2 - 3 - 0.1), "the deadline is the first one"
    assert outcome.exit_code == EXIT_REFUSED


def test_the_second_signal_after_a_refusal_kills_at_once():
    refused, stops = ("exit", 1002, EXIT_REFUSED), [("signal", TERM), ("pass", 1), ("signal", TERM)]
    outcome = Outcome(FakeSystem(refused, ("pass", 3), *stops, ("exit", 1001, -KILL)))
    assert outcome.system.killed == [(1001, TERM), (1001, KILL)]
    assert outcome.exit_code == 143


def test_a_refusal_ends_all_also_after_a_crash_of_a_slot_that_never_served():
    outcome = Outcome(FakeSystem(("exit", 1001, 1), ("due",), ("exit", 1002, EXIT_REFUSED)), workers=1)
    assert outcome.exit_code == EXIT_REFUSED


def test_a_refusal_of_a_slot_that_served_is_a_crash_and_the_others_continue():
    ready = ("report", 0, WorkerStatus(State.READY))
    script = [ready, ("pass", 60), ("exit", 1001, -KILL), ("due",), ("exit", 1003, EXIT_REFUSED), ("due",)]
    outcome = Outcome(FakeSystem(*script))
    assert (outcome.exit_code, outcome.system.killed, len(outcome.system.spawned)) == (None, [], 4)


@pytest.mark.parametrize(
    ("state", "has_served"),
    [(State.STARTING, False), (State.FAILED, False), (State.READY, True), (State.DRAINING, True)],
)
def test_a_slot_has_served_if_its_process_ever_reported_ready_or_draining(state, has_served):
    reports = ("report", 0, WorkerStatus(state)), ("due",), ("report", 0, WorkerStatus(State.FAILED))
    outcome = Outcome(FakeSystem(*reports, ("exit", 1001, EXIT_REFUSED)), workers=1)
    assert outcome.exit_code == (None if has_served else EXIT_REFUSED)


def test_a_death_by_an_unnamed_signal_is_logged_too():
    outcome = Outcome(FakeSystem(("exit", 1001, -40)))
    assert outcome.fields("worker_died")[0]["signal"] == "signal 40"
