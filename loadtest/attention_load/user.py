"""AttentionUser: one caller; a task for every kind of request in every form.

Laws: it knows no reference and no objective, it draws a question and settles what came; a refusal is a row of its own in Locust's
tables, so that its short latency does not flatter the answers'; the body was made before, so that a user is cheap.
Each task has its kind and its form as tags (`--tags short`, `--exclude-tags lists`).
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from typing import Any, ClassVar

from locust import FastHttpUser, constant, constant_throughput, tag
from locust.exception import StopUser

from attention_load.load import RIGHT, Load
from attention_load.plan import Plan
from attention_load.question import FORMS, KINDS
from attention_load.tally import Outcome

WAIT_S = 0.1


def _task(kind: str, form: str) -> Callable[[AttentionUser], None]:
    def ask(user: AttentionUser) -> None:
        user.ask(kind, form)

    ask.__name__ = f"{kind}_{form}"
    tagged: Callable[[AttentionUser], None] = tag(kind, form)(ask)
    return tagged


class AttentionUser(FastHttpUser):
    load: ClassVar[Load] = Load()
    """One for all users of this process."""

    insecure = False
    tasks: ClassVar[dict[Any, int]] = {_task(kind, form): weight for kind, weight in KINDS.items() for form in FORMS}
    _numbers: ClassVar[itertools.count[int]] = itertools.count()

    def __init__(self, environment: Any) -> None:
        plan = Plan.read(environment.parsed_options)  # a late worker's load has none yet
        self.network_timeout = self.connection_timeout = plan.request_timeout_s
        super().__init__(environment)
        self._wait = constant_throughput(plan.pace) if plan.pace else constant(0)
        worker = getattr(environment.runner, "worker_index", 0)
        self._rng = random.Random(f"{plan.seed} {worker} {next(self._numbers)}")

    def wait_time(self) -> float:
        return float(self._wait(self))

    def ask(self, kind: str, form: str) -> None:
        if self.load.is_over:
            raise StopUser
        if not self.load.is_open:  # a worker that joined late takes its references while its users are there already
            time.sleep(WAIT_S)
            return
        name, reference = f"{kind} {form}", self.load.draw(kind, self._rng)
        question, content_type = reference.question, FORMS[form]
        self.load.began()
        is_settled = False
        try:
            with self.client.post(
                question.path,
                data=question.bodies[form],
                headers=self.load.target.headers(content_type),
                name=name,
                catch_response=True,
            ) as response:
                status, told, is_sampled = response.status_code, "", False
                if status == RIGHT:
                    if is_sampled := self.load.is_sampled(name):
                        told = reference.difference(response.content or b"", content_type)
                elif status == 0:
                    told = f"no answer: {type(response.request_meta['exception']).__name__}"
                latency_ms = response.request_meta["response_time"]
                settled = self.load.settled(name, status, latency_ms, told, was_checked=is_sampled)
                is_settled = True
                match settled.outcome:
                    case Outcome.RIGHT:
                        response.success()
                    case Outcome.REFUSED:
                        response.request_meta["name"] = f"refused {status}"
                        response.success()
                    case _:
                        response.failure(settled.told.removeprefix(f"{name}: "))
        finally:
            if not is_settled:  # the user was stopped within its request
                self.load.abandoned()
