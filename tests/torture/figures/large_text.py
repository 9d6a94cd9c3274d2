"""Figure 12: bodies of 0.1 to 4 MiB in every form, offered three and five times faster than they can be answered.

Invariants: default settings; what the service can do is measured just before, as the better of a few callers who wait for each
answer and of an open loop at twice their rate; a process of its own requests health meanwhile. It is measured twice. Where the
engine is the limit, by a planted cost for each request, one worker has a core of its own and the callers another, so it has
time to refuse the others, and goodput and times have targets. Where the cores are the limit, which two workers and the callers
share, a refusal takes time from an answer, and only fairness and memory have targets. The burst that begins an overload is
admitted on purpose, so times count from SETTLED_S on. Many callers who wait for their answers are an overload without end: they
get answers and refusals only.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Iterator

import numpy as np
from safetensors.numpy import save

from service.settings import usable_cores
from tests.integration.running import LAYERS, small_layer
from tests.torture import at_rest, process_tree
from tests.torture.body_loop import Answer, Load, offered
from tests.torture.canary import quantile
from tests.torture.figure import Form
from tests.torture.health import Health
from tests.torture.raw_connection import post
from tests.torture.report import Row, at_least, at_most, none_of
from tests.torture.subject import Subject, pinned

MIB = 2**20
WIDTH, LENGTH = 256, 40
SECONDS, LEAST_S = 20.0, 5.0
SETTLED_S = 2.0
OVERLOADS, FLOOD = (3, 5), 2
MAX_MEMORY_MIB, MAX_HEALTH_MS, MAX_REFUSAL_MS = 1024, 100, 100
LEAST_GOODPUT, MAX_TIMES_P99 = 0.9, 3.0
# Bytes that a float takes in each form.
BYTES_EACH = {"lists": 20, "base64": 5.4, "safetensors": 4}
# What a request costs the engine, in seconds: as a layer of about 1,024 features.
COSTS_S = {0.1: 0.005, 0.9: 0.01, 2.0: 0.02, 4.0: 0.04}
# So many callers keep the engine busy; with more, large bodies would be refused.
CALLERS = {0.1: 32, 0.9: 12, 2.0: 8, 4.0: 6}
MANY = 200
# Smaller bodies come faster than one process of Python can send them, before the cores are the limit.
UNPLANTED_MIB = (0.9, 2.0, 4.0)


def measure(form: Form) -> Iterator[Row]:
    layers = [*LAYERS, small_layer("wide", query_width=WIDTH, key_width=WIDTH, value_width=WIDTH, out_width=WIDTH)]
    serving, calling = ({0}, {1}) if usable_cores() > 1 else (None, None)
    for mib, cost_s in COSTS_S.items():
        # On the loop's thread a planted cost would hold the loop, although no core is busy.
        room, plants = form.room("large-text-cost"), {"cost_s": cost_s, "inline": False}
        with Subject(room, layers=layers, workers=1, plants=plants, cpus=serving) as subject, pinned(calling):
            for name in BYTES_EACH:
                yield from _targets(_overloads(subject, form, name, mib))
    with Subject(form.room("large-text-callers"), layers=layers, workers=1, cpus=serving) as subject, pinned(calling):
        yield from _many_callers(subject, form)
    with Subject(form.room("large-text"), layers=layers, workers=2) as subject:
        for name in BYTES_EACH:  # the libraries keep room for the largest products, once
            offered(Load(subject.port, 1.0, callers=CALLERS[4.0]), _body(name, 4.0))
        before = subject.baseline()
        subject.forget_peaks()
        for name in BYTES_EACH:
            for mib in UNPLANTED_MIB:
                for run in _overloads(subject, form, name, mib):
                    yield run.fairness()
                    yield run.summary()
        # The pages of torch's libraries are in each worker's and there once.
        shared_bytes = process_tree.file_bytes(subject.pids[0])
        peak_mib = (subject.peak_bytes() - shared_bytes) / MIB
        yield at_most(12, "memory of two workers at its peak", peak_mib, MAX_MEMORY_MIB, " MiB")
        yield from at_rest.rows(12, subject, before, 64)


@dataclasses.dataclass(frozen=True, slots=True)
class Overload:
    """One form and size, offered `times` as fast as the `capacity`, for so many seconds."""

    what: str
    answers: list[Answer]
    seconds: float
    capacity: float
    calm_ms: float
    health_ms: float

    @property
    def goodput(self) -> float:
        return _good(self.answers) / self.seconds / self.capacity

    def quantile_ms(self, status: int, q: float) -> float:
        """0 if no answer has that status."""
        times = _times_ms([answer for answer in self.answers if answer.due_s >= SETTLED_S], status)
        return quantile(times, q) if times else 0.0

    def fairness(self) -> Row:
        return none_of(12, f"{self.what}: neither answered nor refused with Retry-After", _unfair(self.answers))

    def summary(self) -> Row:
        late_ms = quantile(sorted(answer.late_s * 1000 for answer in self.answers), 0.99)
        told = (
            f"goodput {self.goodput:.2f}, p50 and p99 of admitted {self.quantile_ms(200, 0.5):.0f} and "
            f"{self.quantile_ms(200, 0.99):.0f} ms, p99 of refusals {self.quantile_ms(429, 0.99):.0f} ms, /healthz "
            f"{self.health_ms:.0f} ms, the generator late by {late_ms:.0f} ms"
        )
        return Row(12, f"{self.what}, the cores are the limit", "", told, is_met=True)


def _many_callers(subject: Subject, form: Form) -> Iterator[Row]:
    wire, what = _body("lists", 0.9), f"{MANY} callers of 0.9 MiB of lists, each waiting for its answer"
    offered(Load(subject.port, 1.0, callers=CALLERS[0.9]), wire)
    subject.forget_peaks()
    before = subject.peak_bytes()
    answers = offered(Load(subject.port, form.seconds(SECONDS, LEAST_S), callers=MANY), wire)
    yield none_of(12, f"{what}: neither answered nor refused with Retry-After", _unfair(answers))
    p99_ms = quantile(_times_ms(answers, 200), 0.99)
    told = f"{_good(answers)} of {len(answers)} answered, p99 {p99_ms:.0f} ms, p99 of refusals "
    told += (
        f"{quantile(_times_ms(answers, 429) or [0.0], 0.99):.0f} ms, {(subject.peak_bytes() - before) / MIB:+.0f} MiB"
    )
    yield Row(12, what, "", told, is_met=True)


def _overloads(
    subject: Subject, form: Form, name: str, mib: float, overloads: tuple[int, ...] = OVERLOADS
) -> Iterator[Overload]:
    wire, seconds = _body(name, mib), form.seconds(SECONDS, LEAST_S)
    offered(Load(subject.port, 1.0, callers=CALLERS[mib]), wire)  # the first ones are slower
    reached = _good(offered(Load(subject.port, seconds, callers=CALLERS[mib]), wire)) / seconds
    flooded = _good(offered(Load(subject.port, seconds, FLOOD * reached), wire)) / seconds
    capacity = max(reached, flooded)
    calm = offered(Load(subject.port, seconds, 0.8 * capacity), wire)
    calm_ms = quantile(_times_ms(calm, 200), 0.99)
    for times in overloads:
        with Health(subject.port, pause_s=0.02) as health:
            answers = offered(Load(subject.port, seconds, times * capacity), wire)
        what = f"{mib:g} MiB of {name} at {times}x of {capacity:.0f}/s"
        yield Overload(what, answers, seconds, capacity, calm_ms, health.quantile_ms(0.99))


def _targets(runs: Iterator[Overload]) -> Iterator[Row]:
    for run in runs:
        yield run.fairness()
        yield at_least(12, f"{run.what}: goodput", run.goodput, LEAST_GOODPUT, "")
        times_p99 = run.quantile_ms(200, 0.99) / run.calm_ms
        yield at_most(
            12,
            f"{run.what}: p99 of admitted, as a multiple of {run.calm_ms:.0f} ms at 0.8x",
            times_p99,
            MAX_TIMES_P99,
            "",
        )
        yield at_most(12, f"{run.what}: refusals p99", run.quantile_ms(429, 0.99), MAX_REFUSAL_MS, " ms")
        yield at_most(12, f"{run.what}: /healthz p99", run.health_ms, MAX_HEALTH_MS, " ms")


def _good(answers: list[Answer]) -> int:
    return sum(answer.status == 200 for answer in answers)


def _unfair(answers: list[Answer]) -> list[str]:
    return [answer.how or f"status {answer.status}" for answer in answers if not _is_fair(answer)]


def _is_fair(answer: Answer) -> bool:
    return answer.status == 200 or (answer.status == 429 and answer.retry_after_s is not None)


def _times_ms(answers: list[Answer], status: int) -> list[float]:
    return sorted(answer.seconds * 1000 for answer in answers if answer.status == status)


def _body(name: str, mib: float) -> bytes:
    sequences = max(1, round(mib * MIB / BYTES_EACH[name] / WIDTH / LENGTH))
    values = np.random.default_rng(12).standard_normal((sequences, LENGTH, WIDTH)).astype(np.float32)
    path = "/v1/layers/wide/attend"
    if name == "safetensors":
        return post(path, save({"query": values}), {"Content-Type": "application/vnd.safetensors"})
    query: object = values.astype(float).tolist()
    if name == "base64":
        data = base64.b64encode(values.tobytes()).decode()
        query = {"dtype": "float32", "shape": list(values.shape), "data": data}
    return post(path, json.dumps({"query": query, "encoding": "base64"}).encode())
