"""Hand: a worker's side of a run: prepares when its turn comes, reports what it counts, closes when it is told.

Laws: it judges nothing; its master's plan is its plan. Messages to it: `prepare`, `finish`; from it: `prepared` (with `fault`
where it could not), `finished`, and a tally in each of Locust's own reports.
"""

from __future__ import annotations

import logging
from typing import Any

from attention_load.load import Load
from attention_load.plan import Plan
from attention_load.target import TargetFailed

_log = logging.getLogger(__name__)


class Hand:
    def __init__(self, environment: Any, load: Load) -> None:
        self._environment, self._load = environment, load
        self._run = 0
        # Concurrent: a worker that takes references for seconds must still hear of its master.
        environment.runner.register_message("prepare", self._on_prepare, concurrent=True)
        environment.runner.register_message("finish", self._on_finish, concurrent=True)
        environment.events.test_start.add_listener(self._on_test_start)
        environment.events.report_to_master.add_listener(self._on_report)
        # Locust connects before it lets us listen: a worker that joins late may have users by now, who wait for references.
        if getattr(environment.parsed_options, "run", 0):
            self._on_test_start()

    def _on_prepare(self, msg: Any, **_: Any) -> None:
        self._prepare(Plan(**msg.data["plan"]), msg.data["url"])

    def _on_test_start(self, **_: Any) -> None:
        """A worker that joined late was not asked to prepare: it takes its references now, in company."""
        self._prepare(Plan.read(self._environment.parsed_options), self._environment.host)

    def _prepare(self, plan: Plan, url: str) -> None:
        if plan.run == self._run:
            return
        self._run = plan.run
        _log.info("taking references of run %d", plan.run)
        try:
            told = self._load.prepare(plan, url)
        except TargetFailed as error:
            told = {"run": plan.run, "fault": str(error)}
        self._environment.runner.send_message("prepared", told)

    def _on_finish(self, **_: Any) -> None:
        self._environment.runner.send_message("finished", self._load.close())

    def _on_report(self, data: dict[str, Any], **_: Any) -> None:
        data["attention_load"] = self._load.take()
