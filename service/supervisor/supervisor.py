"""Supervisor: starts the service's processes, replaces those that crash, and ends all of them together.

One thread runs one loop. It sleeps until a signal arrives or something is due, such as a watchdog check.
Independent of torch, HTTP, what a worker does, and settings (it gets only a Plan). It stays small: 15 MB, because
`exec_supervisor` drops what reading the settings took (38 MB with it).
Invariants:
- A slot holds one process at a time. A process that crashed is started again 0.1 s later. The delay doubles, up to 5 s, each time
  a process lived less than 10 s.
- A process whose event loop sends no message is killed and started again. Checks without a message are counted, not seconds: a
  pause of the whole service for an hour (a container) pauses the checks too. Before its first message a process is not checked.
- If a process exits with EXIT_REFUSED and its slot never served, the service ends with that code, because the next process would
  refuse too. One line on stderr has the reason. In a slot that has served it is a crash like any other, and the others go on.
- SIGTERM and SIGINT let all processes drain, for at most drain delay + grace + FORCE_S, and then kill those that remain. A second
  one kills them at once. The same signal within 0.2 s is ignored: `make` or a shell may have forwarded a copy. SIGHUP is ignored,
  in the workers too, because there is nothing to read again.
- The coordinator gets the reports and requests of the workers, and each worker gets its answers. No worker can block or end the
  supervisor: a malformed message is ignored, and nothing waits for a worker that does not read.
- If the supervisor is killed, workers read end-of-file on their channel and drain.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import NoReturn

from service.observability.line_writer import use_format
from service.supervisor import processes
from service.supervisor.channel import STACKS_SIGNAL, Channel
from service.supervisor.coordinator import Coordinator
from service.supervisor.run_directory import RunDirectory
from service.supervisor.status import State, WorkerStatus

EXIT_FAILED = 1
EXIT_REFUSED = 3
# The engine is stuck or its device has failed: the process has failed all its requests and exits, to be replaced.
EXIT_ENGINE_DOWN = 4

# How long a worker may take after the grace to send its refusals, cut the connections, wait for its threads, and end its
# interpreter. Then it is killed.
ANSWER_S, CUT_S, CLOSE_S, EXIT_S = 0.8, 0.2, 0.5, 0.5
FORCE_S = ANSWER_S + CUT_S + CLOSE_S + EXIT_S
ECHO_S = 0.2
# A worker that is stopped before it has installed its handlers dies of SIGTERM. It has read no request.
_ORDERLY_ENDS = (0, -signal.SIGTERM)
_STOPS = (signal.SIGTERM, signal.SIGINT)
_SIGNAL_NAMES = {signum.value: signum.name for signum in signal.Signals}

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 5.0
STEADY_S = 10.0
# After this many checks without a message a process is killed; at the check before, it writes its stacks.
CHECKS = 5
# In `Plan.welcome`: what the supervisor alone knows.
PORT, LAYERS = "<port>", "<layers>"
# Two checks must lie further apart than two messages (PING_S) ever do.
MIN_TIMEOUT_S = 10.0


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What to run; it is passed through the exec as JSON.

    `supervise` adds the options `--port` and `--run-dir` to `command`, and each start `--slot` (counts from 0 and outlives the
    process in it), `--peers` (how many other processes send messages) and `--channel` (the number of an open descriptor).
    `drain_s` is how long a process may drain (the delay and the grace), `watchdog_timeout_s` how long it may send no message.
    The first line of `welcome` tells the address, the others are true once all is ready.
    """

    command: Sequence[str]
    host: str
    port: int
    workers: int
    drain_s: float
    watchdog_timeout_s: float
    run_dir: str | None = None
    log_format: str = "json"
    welcome: str = ""


@dataclasses.dataclass(slots=True)
class Slot:
    """One worker position. Without a `pid`, its process starts at `start_at`, which may be infinite."""

    index: int
    start_at: float
    pid: int | None = None
    channel: Channel | None = None
    start_error: str = ""
    started: float = 0.0
    has_served: bool = False
    checks_since_message: int | None = None  # None before the first message
    rapid_crashes: int = 0

    def retry_later(self, now: float) -> float:
        """Schedule the next process; return the delay in seconds."""
        if now - self.started >= STEADY_S:
            self.rapid_crashes = 0
        delay_s = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(self.rapid_crashes, 16))
        self.rapid_crashes += 1
        self.start_at = now + delay_s
        return delay_s


class Supervisor:
    """Runs a plan; `clean_up(slot)` removes what a dead process left in the run directory."""

    def __init__(
        self, plan: Plan, system: processes.Posix, clean_up: Callable[[int], None], log: Callable[..., None]
    ) -> None:
        self._plan = plan
        self._system = system
        self._clean_up = clean_up
        self._log = log
        self._welcome = plan.welcome
        self._slots = [Slot(index, start_at=system.now()) for index in range(plan.workers)]
        self._coordinator = Coordinator(plan.workers, system.now)
        self._check_s = max(MIN_TIMEOUT_S, plan.watchdog_timeout_s) / CHECKS
        self._check_at = system.now() + self._check_s
        self._exit_code: int | None = None
        self._deadline = math.inf
        self._last_stop: tuple[signal.Signals, float] | None = None

    def run(self) -> int:
        """Run until all processes have ended; return the exit code."""
        while True:
            for slot in self._slots:
                self._start_if_due(slot)
            due = min(self._check_at, self._deadline, *(slot.start_at for slot in self._slots))
            timeout_s = None if due == math.inf else max(0.0, due - self._system.now())
            signum = self._system.wait(timeout_s, [slot.channel for slot in self._slots if slot.channel])
            for slot in self._slots:
                self._hear(slot)
            self._say_ready()
            if signum in _STOPS:
                self._stop(signal.Signals(signum))
            elif signum == signal.SIGHUP:
                self._log("info", "signal_ignored", signal="SIGHUP")
            for pid, code in self._system.reap():
                self._reaped(pid, code)
            if self._system.now() >= self._check_at:
                self._check_all()
            if self._system.now() >= self._deadline:
                self._log("error", "workers_killed", reason="they did not exit in the grace period", pids=self._alive())
                self._signal_all(signal.SIGKILL)
            if self._exit_code is not None and not self._alive():
                self._log("info", "stopped", exit_code=self._exit_code)
                return self._exit_code

    def _say_ready(self) -> None:
        if not self._welcome or self._coordinator.why_not_ready() is not None:
            return
        layers = self._coordinator.desired.layers
        names = textwrap.shorten(", ".join(["", *sorted(layers)]), 200, placeholder=f" … ({len(layers)} layers)")
        processes.write_text(self._welcome.replace(LAYERS, names))
        self._welcome = ""

    def _alive(self) -> list[int]:
        return [slot.pid for slot in self._slots if slot.pid is not None]

    def _hear(self, slot: Slot, *, is_dead: bool = False) -> None:
        """Pass on what a worker has sent, and close its channel if it ends, is dead, or has sent too long a message.

        A living process whose channel is closed drains; if it does not, the watchdog kills it.
        """
        if slot.pid is None or slot.channel is None:
            return
        status = WorkerStatus.parse(slot.channel.receive())
        if status is not None:
            slot.checks_since_message, slot.start_error = 0, status.start_error
            slot.has_served |= status.state in {State.READY, State.DRAINING}
            self._coordinator.report(slot.pid, status)
        if is_dead or slot.channel.is_ended:
            slot.checks_since_message = slot.checks_since_message or 0
            slot.channel.close()
            slot.channel = None
            self._coordinator.leave(slot.pid)
        else:
            slot.channel.flush()

    def _check_all(self) -> None:
        """Check each worker: a silent one writes its stacks at one check, and is killed at the next; `_reaped` does the rest."""
        for slot in self._slots:
            if (missed := slot.checks_since_message) is None:
                continue
            slot.checks_since_message = missed + 1
            if slot.pid is not None and missed in (CHECKS - 1, CHECKS):
                signum = STACKS_SIGNAL if missed < CHECKS else signal.SIGKILL
                self._system.kill(slot.pid, signum)
                fields = dict(worker=slot.index, pid=slot.pid, silent_s=missed * self._check_s, signal=signum.name)
                self._log("error", "worker_silent", **fields)
        self._check_at = self._system.now() + self._check_s

    def _start_if_due(self, slot: Slot) -> None:
        if slot.start_at > self._system.now():
            return
        peers = sum(other.checks_since_message is not None for other in self._slots if other is not slot)
        command = [*self._plan.command, "--slot", str(slot.index), "--peers", str(peers)]
        slot.started = self._system.now()
        try:
            slot.pid, slot.channel = self._system.spawn(command)
        except OSError as error:
            self._log("error", "worker_not_started", worker=slot.index, reason=error.strerror)
            slot.retry_later(slot.started)
            return
        slot.start_at, slot.start_error = math.inf, ""
        self._log("info", "worker_started", worker=slot.index, pid=slot.pid)
        self._coordinator.join(slot.pid, slot.channel.send)

    def _reaped(self, pid: int, code: int) -> None:
        slot = next((slot for slot in self._slots if slot.pid == pid), None)
        if slot is None:
            return
        self._hear(slot, is_dead=True)
        slot.pid = slot.checks_since_message = None
        self._clean_up(slot.index)
        how = {"signal": _SIGNAL_NAMES.get(-code, f"signal {-code}")} if code < 0 else {"exit_code": code}
        lived_s = round(self._system.now() - slot.started, 3)
        if self._exit_code is not None:
            level = "info" if code in _ORDERLY_ENDS else "error"
            self._log(level, "worker_left", worker=slot.index, pid=pid, lived_s=lived_s, **how)
            if code not in _ORDERLY_ENDS:
                self._exit_code = self._exit_code or EXIT_FAILED
        elif code == EXIT_REFUSED and not slot.has_served:
            self._log("error", "worker_refused", worker=slot.index, pid=pid, lived_s=lived_s, **how)
            if slot.start_error:
                processes.print_error(slot.start_error)
            self._end_all(EXIT_REFUSED)
        else:
            restart_in_s = slot.retry_later(self._system.now())
            fields = dict(worker=slot.index, pid=pid, lived_s=lived_s, restart_in_s=restart_in_s)
            self._log("error", "worker_died", **fields, **how)

    def _stop(self, signum: signal.Signals) -> None:
        now, before = self._system.now(), self._last_stop
        if before is not None and before[0] == signum and now - before[1] < ECHO_S:
            return
        self._last_stop = (signum, now)
        if before is None:
            self._log("info", "stopping", signal=signum.name)
            if self._exit_code is None:  # else a refusal has begun the end
                self._end_all(0)
        else:
            self._log("warning", "workers_killed", reason=f"a second signal ({signum.name})", pids=self._alive())
            self._exit_code = 128 + signum
            self._signal_all(signal.SIGKILL)

    def _end_all(self, exit_code: int) -> None:
        self._exit_code = exit_code
        self._signal_all(signal.SIGTERM)
        self._deadline = self._system.now() + self._plan.drain_s + FORCE_S

    def _signal_all(self, signum: signal.Signals) -> None:
        self._check_at = self._deadline = math.inf
        for slot in self._slots:
            slot.start_at = math.inf
            if slot.pid is not None:
                self._system.kill(slot.pid, signum)


def exec_supervisor(plan: Plan, environment: Mapping[str, str]) -> NoReturn:
    """Turn this process into the supervisor by exec, which drops all that it has imported; workers get the environment.

    A stop signal that comes meanwhile stays pending until there is a handler: the signal mask outlives an exec.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    command = (sys.executable, "-m", "service.supervisor.supervisor", json.dumps(dataclasses.asdict(plan)))
    os.execve(sys.executable, command, environment)  # noqa: S606 (our own program)


@processes.nonblocking_streams()
def supervise(plan: Plan) -> int:
    """Serve until stopped; return the exit code. Exit afterwards: the signal handlers stay replaced.

    A failure to start is one line on stderr and EXIT_FAILED.
    """
    use_format(plan.log_format)
    system, parent = processes.Posix(), None if plan.run_dir is None else Path(plan.run_dir)
    try:
        with (
            processes.reserve_port(plan.host, plan.port) as reserved,
            closing(RunDirectory.make(parent, plan.workers)) as run,
        ):
            port = reserved.getsockname()[1]
            processes.write_log_line("info", "serving", host=plan.host, port=port, workers=plan.workers)
            command = (*plan.command, "--port", str(port), "--run-dir", str(run.path))
            address, end, rest = plan.welcome.replace(PORT, str(port)).partition("\n")
            processes.write_text(address + end)
            plan = dataclasses.replace(plan, command=command, welcome=rest)
            return Supervisor(plan, system, run.clean_up, processes.write_log_line).run()
    except processes.StartError as error:
        processes.print_error(error.message)
        return EXIT_FAILED


if __name__ == "__main__":
    raise SystemExit(supervise(Plan(**json.loads(sys.argv[1]))))
