"""Lead: the one process that leads a run, a master or a single one: prepares, follows the course, judges.

Laws: one verdict a run, and it decides the exit code; a run that did not come to its end has failed; the shape's clock begins
when everybody is ready. `tick` is what Locust's shape asks once a second.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attention_load.course import Course
from attention_load.crew import Alone, Workers
from attention_load.knee import is_beyond
from attention_load.plan import Plan
from attention_load.report import Facts, full_report, lines, write_report
from attention_load.tally import Tally
from attention_load.verdict import judge, measure, steps_of

_log = logging.getLogger(__name__)


class State(enum.Enum):
    IDLE = "idle"
    PREPARING = "preparing"
    RUNNING = "running"
    OVER = "over"
    """The shape has yet to hear of it."""


class Lead:
    def __init__(
        self, environment: Any, crew: Alone | Workers, generator: str, clock: Callable[[], float] = time.time
    ) -> None:
        self.report: dict[str, Any] | None = None
        self._environment, self._crew, self._generator, self._clock = environment, crew, generator, clock
        self._state = State.IDLE
        self._plan = Plan.read(environment.parsed_options)
        self._tally = Tally()
        self._course: Course | None = None
        self._prepared: dict[str, Any] | None = None
        self._faults: list[str] = []
        events = environment.events
        events.test_start.add_listener(self._on_test_start)
        events.spawning_complete.add_listener(self._on_spawning_complete)
        events.test_stop.add_listener(self._on_test_stop)
        events.quitting.add_listener(self._on_quitting)
        events.quit.add_listener(self._on_quit)

    def tick(self) -> tuple[int, float] | None:
        """Users and how fast they come or go; None ends the run."""
        if self._state is State.IDLE:  # Locust asks before it tells that the test starts
            self._plan = self._read_plan()
        if self._state is State.OVER:
            return None
        phase = self._plan.phases[0]
        if self._state is State.RUNNING and self._course is not None:
            self._crew.collect()
            now = None if self._is_beyond_knee(self._course) else self._course.advance()
            if now is None:
                self._finish()
                return None
            phase = now
        return phase.users, phase.rate

    def _read_plan(self) -> Plan:
        try:
            return Plan.read(self._environment.parsed_options)
        except ValueError as error:  # options of Locust's page; those of the command line have been read at the start
            self._faults = [str(error)]
            return self._plan

    def _on_test_start(self, **_: Any) -> None:
        # Workers get all options that are not Locust's own; a number that no earlier master gave.
        self._environment.parsed_options.run = round(self._clock() * 1000)
        self._faults = []
        self._plan = self._read_plan()
        self._state, self._tally, self._course = State.PREPARING, Tally(self._plan.slot_s), None
        self._prepared = None
        if not self._faults:
            _log.info("taking references, one request at a time")
            self._prepared = self._crew.prepare(self._plan, self._environment.host or "", self._tally)
        if self._prepared is None:
            self._state = State.OVER
            _log.error("not prepared: %s", "; ".join([*self._faults, *self._crew.faults]) or "no worker is ready")
        else:
            self._course, self._state = Course(self._plan.phases, self._clock), State.RUNNING

    def _on_spawning_complete(self, **_: Any) -> None:
        if self._course is not None and self._state is State.RUNNING:
            self._course.reached()

    def _is_beyond_knee(self, course: Course) -> bool:
        if self._plan.shape != "ramp":
            return False
        known = self._clock() - self._crew.lag_s
        windows = [window for window in course.windows if window.end_s is not None and window.end_s < known]
        return is_beyond(steps_of(measure(windows, self._tally)), self._plan.objectives.limit_ms)

    def _finish(self) -> None:
        assert self._course is not None, "A run without a course has no end. This is a bug."
        self._course.end()
        self._crew.finish()
        self._state = State.OVER

    def _on_test_stop(self, **_: Any) -> None:
        if self._state is State.IDLE:
            return
        if self._state is not State.OVER:
            self._faults.append("stopped before its end")
            if self._course is not None:
                self._course.end()
            self._crew.collect()
        elif self._prepared is None and not self._crew.faults and not self._faults:
            self._faults.append("no worker was ready")
        self._state = State.IDLE
        self._judge()

    def _judge(self) -> None:
        windows = self._course.windows if self._course is not None else []
        verdict = judge(self._plan, windows, self._tally, [*self._faults, *self._crew.faults])
        runner = self._environment.runner
        is_busy = runner.cpu_warning_emitted or runner.worker_cpu_warning_emitted
        facts = Facts(self._environment.host or "", self._crew.size, self._generator, is_busy, self._prepared)
        self.report = full_report(self._plan, verdict, self._tally, facts)
        self._write(self.report)
        self._environment.process_exit_code = 0 if self.report["verdict"] == "passed" else 1
        _log.info("verdict: %s", lines(self.report)[-1])

    def _write(self, report: dict[str, Any]) -> None:
        """Where one was asked for; a run whose report is not there must not look like one that passed."""
        if not self._plan.json_report:
            return
        try:
            write_report(report, Path(self._plan.json_report))
        except OSError as error:
            report["verdict"], report["missed"] = "failed", [*report["missed"], "json_report"]
            _log.error("the JSON report cannot be written: %s", error.strerror)

    def _on_quitting(self, **_: Any) -> None:
        """SIGTERM and Ctrl-C come here while a run goes on; without any run there is nothing that could have passed."""
        self._on_test_stop()
        if self.report is None:
            self._environment.process_exit_code = 1

    def _on_quit(self, **_: Any) -> None:
        """Last of all, below Locust's own tables."""
        if self.report is not None:
            print("\n".join(lines(self.report)), flush=True)  # noqa: T201 (it is what the command is for)
