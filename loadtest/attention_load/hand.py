"""Hand: a worker's side of a run: prepares when its turn comes, reports what it counts, closes when it is told.

Laws: it judges nothing; its master's plan is its plan. Messages to it: `prepare`, `finish`; from it: `prepared` (with `fault`
where it could not), `finished`, and a tally in each of Locust's own reports.
"""

from __future__ import annotations

from typing import Any

from attention_load.load import Load
from attention_load.plan import Plan
from attention_load.target import TargetFailed


class Hand:
    def __init__(self, environment: Any, load: Load) -> None:
        self._environment, self._load = environment, load
        # Concurrent: a worker that takes references for seconds must still hear of its master.
        environment.runner.register_message("prepare", self._on_prepare, concurrent=True)
        environment.runner.register_message("finish", self._on_finish, concurrent=True)
        environment.events.test_start.add_listener(self._on_test_start)
        environment.events.report_to_master.add_listener(self._on_report)

    def _on_prepare(self, msg: Any, **_: Any) -> None:
        self._prepare(Plan(**msg.data["plan"]), msg.data["url"])

    def _on_test_start(self, **_: Any) -> None:
        """A worker that joined late was not asked to prepare: it takes its references now, in company."""
        plan = Plan.read(self._environment.parsed_options)
        if self._load.plan is None or self._load.plan.run != plan.run:
            self._prepare(plan, self._environment.host)

    def _prepare(self, plan: Plan, url: str) -> None:
        try:
            told = self._load.prepare(plan, url)
        except TargetFailed as error:
            told = {"run": plan.run, "fault": str(error)}
        self._environment.runner.send_message("prepared", told)

    def _on_finish(self, **_: Any) -> None:
        self._environment.runner.send_message("finished", self._load.close())

    def _on_report(self, data: dict[str, Any], **_: Any) -> None:
        data["attention_load"] = self._load.take()
