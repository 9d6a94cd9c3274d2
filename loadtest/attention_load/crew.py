"""Crew: the processes that make the requests, as the lead sees them: itself alone, or a master's workers.

Laws: they prepare one after another, so that every reference is taken alone; workers with other references than the first are
a fault, and so is one that is lost.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from attention_load.load import DRAIN_S, Load
from attention_load.plan import Plan
from attention_load.tally import Tally
from attention_load.target import TargetFailed

PREPARE_S = 300.0
ASK_AGAIN_S = 2.0
"""A worker that has just connected may not listen yet."""

FINISH_S = DRAIN_S + 10.0


class Alone:
    """A single process: its own load. `lag_s`: how old what is in the tally may be."""

    lag_s = 0.0
    size = 1

    def __init__(self, load: Load) -> None:
        self.faults: list[str] = []
        self._load = load
        self._tally = Tally()

    def prepare(self, plan: Plan, url: str, tally: Tally) -> dict[str, Any] | None:
        """Counts go to this tally; what the load told, None where it could not be prepared."""
        self.faults, self._tally = [], tally
        try:
            return self._load.prepare(plan, url)
        except TargetFailed as error:
            self.faults.append(str(error))
            return None

    def collect(self) -> None:
        self._tally.merge(self._load.take())

    def finish(self) -> None:
        """No more requests; the tally is complete afterwards."""
        self._tally.merge(self._load.close())


class Workers:
    """A master's workers, over Locust's messages."""

    lag_s = 4.0  # they report every three seconds

    def __init__(self, environment: Any, prepare_s: float = PREPARE_S, finish_s: float = FINISH_S) -> None:
        self._prepare_s, self._finish_s = prepare_s, finish_s
        self.faults: list[str] = []
        self._runner = environment.runner
        self._run = 0
        self._tally = Tally()
        self._prepared: dict[str, dict[str, Any]] = {}
        self._finished: set[str] = set()
        self._runner.register_message("prepared", self._on_prepared)
        self._runner.register_message("finished", self._on_finished)
        environment.events.worker_report.add_listener(self._on_report)

    @property
    def size(self) -> int:
        return len(self._prepared)

    def prepare(self, plan: Plan, url: str, tally: Tally) -> dict[str, Any] | None:
        """As above: what the first worker told, once all are ready."""
        self._run, self._tally, self.faults = plan.run, tally, []
        self._prepared, self._finished = {}, set()
        for client in list(self._runner.clients.ready):
            if not self._prepare_one(client.id, plan, url):
                self.faults.append("a worker did not get ready")
        return next(iter(self._prepared.values()), None) if not self.faults else None

    def collect(self) -> None:
        """Workers report by themselves."""

    def finish(self) -> None:
        self._runner.send_message("finish")
        if not _wait_for(lambda: self._prepared.keys() <= self._finished, self._finish_s):
            self.faults.append(f"{len(self._prepared.keys() - self._finished)} workers were lost on the way")

    def _prepare_one(self, client_id: str, plan: Plan, url: str) -> bool:
        end = time.monotonic() + self._prepare_s
        while time.monotonic() < end:
            self._runner.send_message("prepare", {"plan": plan.to_message(), "url": url}, client_id=client_id)
            if _wait_for(functools.partial(self._is_prepared, client_id), min(ASK_AGAIN_S, self._prepare_s)):
                return True
        return False

    def _is_prepared(self, client_id: str) -> bool:
        return client_id in self._prepared

    def _on_prepared(self, msg: Any, **_: Any) -> None:
        if msg.data["run"] != self._run:
            return
        first = next(iter(self._prepared.values()), msg.data)
        self._prepared[msg.node_id] = msg.data
        if fault := msg.data.get("fault"):
            self.faults.append(fault)
        elif first.get("digest") != msg.data["digest"]:
            self.faults.append("two workers were given different bits for the same questions")

    def _on_finished(self, msg: Any, **_: Any) -> None:
        self._merge(msg.data)
        self._finished.add(msg.node_id)

    def _on_report(self, data: dict[str, Any], **_: Any) -> None:
        self._merge(data.pop("attention_load", {}))

    def _merge(self, told: dict[str, Any]) -> None:
        if told.get("run") == self._run:
            self._tally.merge(told)


def _wait_for(condition: Callable[[], bool], timeout_s: float) -> bool:
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
