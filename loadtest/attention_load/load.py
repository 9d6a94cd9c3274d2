"""Load: what one process that makes requests knows and counts: the questions, their references, the tally, what is in flight.

Laws: prepared before it is open, and nothing is asked of it before; whatever a request comes to is settled once; when it closes,
what is still without an answer is settled as failed, since otherwise a target that hangs would look like one that is not asked.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

from attention_load.float64 import Float64Check, check_references
from attention_load.plan import Plan
from attention_load.question import layer_questions
from attention_load.references import Reference, references_digest, take_references
from attention_load.tally import Outcome, Settled, Tally
from attention_load.target import Target, TargetFailed

RIGHT = 200
REFUSALS = (429, 503)
DRAIN_S = 5.0
"""How long what is in flight at the end may still take."""


class Load:
    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.target = Target("")
        self.is_open = False
        self.is_over = False
        """Closed, or could not be prepared; before that users wait."""
        self.in_flight = 0
        self._tally = Tally()
        self._references: dict[str, list[Reference]] = {}
        self._seen: Counter[str] = Counter()

    def prepare(self, plan: Plan, url: str) -> dict[str, Any]:
        """Takes the references, checks them and opens; tells what the master needs to know. Raises TargetFailed."""
        self.is_open = self.is_over = False
        try:
            told = self._take_references(plan, url)
        except Exception as error:
            # Of any kind: Locust swallows what its listeners raise, and everybody would wait for a load that is never ready.
            self.is_over = True
            if isinstance(error, TargetFailed):
                raise
            raise TargetFailed(f"the references could not be taken: {type(error).__name__}") from error
        self.is_open = True
        return told

    def _take_references(self, plan: Plan, url: str) -> dict[str, Any]:
        self.plan, self.target = plan, Target(url, plan.api_key, plan.request_timeout_s)
        self._tally, self._seen = Tally(plan.slot_s), Counter()
        layers = self.target.layers(plan.layer_names)
        questions = [q for x in layers for q in layer_questions(x, seed=plan.seed, long_tokens=plan.long_tokens)]
        references = take_references(self.target, questions)
        check = Float64Check()
        if plan.layers_dir:
            check = check_references(layers, references, Path(plan.layers_dir))
        if check.wrong:
            raise TargetFailed(f"references are not attention: {'; '.join(check.wrong[:5])}")
        self._references = {}
        for reference in references:
            self._references.setdefault(reference.question.kind, []).append(reference)
        return {
            "run": plan.run,
            "digest": references_digest(references),
            "references": len(references),
            "layers": [{"name": x.name, "digest": x.digest, "query_width": x.query_width} for x in layers],
            "numerics": layers[0].numerics,
            "float64": check.to_message(),
        }

    def draw(self, kind: str, rng: random.Random) -> Reference:
        return rng.choice(self._references[kind])

    def began(self) -> None:
        self.in_flight += 1

    def settled(self, name: str, status: int, latency_ms: float, told: str, *, was_checked: bool) -> Settled:
        """`told`: what is wrong with an answer of 200, or why there is no answer."""
        assert self.plan is not None, "A request was made before the load was prepared. This is a bug."
        outcome = _outcome(status, told)
        settled = Settled(
            name,
            status,
            outcome,
            latency_ms,
            is_good=outcome is Outcome.RIGHT and latency_ms <= self.plan.objectives.limit_ms,
            was_checked=was_checked,
            told="" if outcome in {Outcome.RIGHT, Outcome.REFUSED} else f"{name}: {told or f'status {status}'}",
        )
        self.in_flight -= 1
        self._tally.add(settled, time.time())
        return settled

    def abandoned(self) -> None:
        """The user was taken away before its answer came, though it had DRAIN_S for that; at the end `close` counts it."""
        self.in_flight -= 1
        if self.is_open:
            self._tally.add(
                Settled("unanswered", 0, Outcome.FAILED, 0.0, told="no answer to a user that left"), time.time()
            )

    def is_sampled(self, name: str) -> bool:
        """Whether this answer is compared: the first of its name, and then one in `check_every`."""
        assert self.plan is not None, "A request was made before the load was prepared. This is a bug."
        every = self.plan.check_every
        self._seen[name] += 1
        return every > 0 and (self._seen[name] - 1) % every == 0

    def take(self) -> dict[str, Any]:
        """What has been counted since the last time."""
        taken, self._tally = self._tally, Tally(self._tally.slot_s)
        return {"run": self.plan.run if self.plan else 0, **taken.to_message()}

    def close(self, drain_s: float = DRAIN_S) -> dict[str, Any]:
        """No more requests; the rest of the count, once what is in flight is settled or has failed to be."""
        self.is_open, self.is_over = False, True
        end = time.monotonic() + drain_s
        while self.in_flight and time.monotonic() < end:
            time.sleep(0.02)
        for _ in range(self.in_flight):
            self._tally.add(Settled("unanswered", 0, Outcome.FAILED, 0.0, told="no answer at the end"), time.time())
        return self.take()


def _outcome(status: int, told: str) -> Outcome:
    if status in REFUSALS:
        return Outcome.REFUSED
    if status != RIGHT:
        return Outcome.FAILED
    return Outcome.WRONG if told else Outcome.RIGHT
