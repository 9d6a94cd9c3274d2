"""The load test: `locust -f loadtest/locustfile.py --host http://127.0.0.1:8000 --headless`; README.md has the rest.

What is here only wires `attention_load` to Locust's events: options, one shape class that plays the chosen shape, and by the
kind of this process a lead (single or master) or a hand (worker). Nothing is written but the reports that are asked for.
"""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import orjson
from flask import Response
from locust import LoadTestShape, __version__, events
from locust.runners import MasterRunner, WorkerRunner

from attention_load.crew import Alone, Workers
from attention_load.hand import Hand
from attention_load.lead import Lead
from attention_load.load import DRAIN_S
from attention_load.plan import add_options
from attention_load.user import AttentionUser

__all__ = ["AttentionUser", "ChosenShape"]


class ChosenShape(LoadTestShape):
    """Smoke, ramp, spike or soak, as `--shape` says."""

    lead: ClassVar[Lead | None] = None

    def tick(self) -> tuple[int, float] | None:
        return self.lead.tick() if self.lead is not None else None


@events.init_command_line_parser.add_listener
def add_our_options(parser: Any, **_: Any) -> None:
    add_options(parser)


@events.init.add_listener
def wire(environment: Any, runner: Any, web_ui: Any, **_: Any) -> None:
    # Users that a shape takes away finish their request; otherwise each would be a call that its caller cancelled.
    environment.stop_timeout = max(environment.stop_timeout or 0.0, DRAIN_S)
    if isinstance(runner, WorkerRunner):
        Hand(environment, AttentionUser.load)
        return
    crew = Workers(environment) if isinstance(runner, MasterRunner) else Alone(AttentionUser.load)
    try:
        lead = ChosenShape.lead = Lead(environment, crew, f"locust {__version__}")
    except ValueError as error:
        sys.exit(f"load test: {error}")
    if web_ui is not None:

        @web_ui.app.route("/verdict")
        @web_ui.auth_required_if_enabled
        def verdict() -> Response:
            """The report of the last run that came to an end; null before."""
            return Response(orjson.dumps(lead.report), mimetype="application/json")
