"""Figure 12: bodies of 0.1 to 4 MiB in every form, offered three and five times faster than they can be answered.

Laws: two workers with default settings; what they can do is measured just before, by a few callers who wait for each answer;
health is asked meanwhile by a process of its own; the same check on a service that decodes bodies side by side and refuses none
for its decoding must fail.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator

import numpy as np
from safetensors.numpy import save

from tests.integration.running import LAYERS, small_layer
from tests.torture import at_rest, process_tree
from tests.torture.body_loop import Answer, Load, offered
from tests.torture.canary import quantile
from tests.torture.figure import Form
from tests.torture.health import Health
from tests.torture.line import post
from tests.torture.report import Row, at_least, at_most, none_of
from tests.torture.subject import Subject

MIB = 2**20
WIDTH, LENGTH = 256, 40
CALLERS = 6
SECONDS, LEAST_S = 10.0, 3.0
OVERLOADS = (3, 5)
MAX_MEMORY_MIB, MAX_HEALTH_MS, MAX_REFUSAL_MS = 1024, 100, 100
LEAST_GOODPUT, MAX_TIMES_P99 = 0.9, 3.0
# Bytes that a float takes in each form.
BYTES_EACH = {"lists": 20, "base64": 5.4, "safetensors": 4}
SIZES_MIB = (0.1, 0.9, 2.0, 4.0)


def plant() -> None:
    """No turns, and no refusals for what waits to be decoded."""
    import contextlib

    from service.batching.decoding_queue import DecodingQueue

    DecodingQueue.check = lambda *_: None  # type: ignore[method-assign]
    DecodingQueue.decoding = lambda *_: contextlib.nullcontext()  # type: ignore[method-assign, assignment]


def measure(form: Form) -> Iterator[Row]:
    layers = [*LAYERS, small_layer("wide", query_width=WIDTH, key_width=WIDTH, value_width=WIDTH, out_width=WIDTH)]
    with Subject(form.room("large-text"), layers=layers, workers=2) as subject:
        for name in BYTES_EACH:  # the libraries keep room for the largest products, once
            offered(Load(subject.port, 1.0, callers=CALLERS), _body(name, max(SIZES_MIB)))
        before = subject.baseline()
        subject.forget_peaks()
        for name in BYTES_EACH:
            for mib in SIZES_MIB:
                yield from _rows(subject, form, name, mib)
        # The pages of torch's libraries are in each worker's and there once.
        shared_bytes = process_tree.file_bytes(subject.pids[0])
        peak_mib = (subject.peak_bytes() - shared_bytes) / MIB
        yield at_most(12, "memory of two workers at its peak", peak_mib, MAX_MEMORY_MIB, " MiB")
        yield from at_rest.rows(12, subject, before, 64)
    with Subject(form.room("large-text-planted"), layers=layers, workers=2, plants={"modules": [__name__]}) as subject:
        rows = list(_rows(subject, form, "lists", 0.9, overloads=OVERLOADS[-1:]))
        missed = ", ".join(f"{row.what} {row.measured}" for row in rows if not row.is_met)
        yield Row(12, "bodies that are decoded side by side fail the check", "fails", missed or "passes", bool(missed))


def _rows(subject: Subject, form: Form, name: str, mib: float, overloads: tuple[int, ...] = OVERLOADS) -> Iterator[Row]:
    wire, seconds = _body(name, mib), form.seconds(SECONDS, LEAST_S)
    offered(Load(subject.port, 1.0, callers=CALLERS), wire)  # the first ones are slower
    capacity = _good(offered(Load(subject.port, seconds, callers=CALLERS), wire)) / seconds
    calm = offered(Load(subject.port, seconds, 0.8 * capacity), wire)
    calm_ms = quantile(_times_ms(calm, 200), 0.99)
    for times in overloads:
        with Health(subject.port, pause_s=0.02) as health:
            answers = offered(Load(subject.port, seconds, times * capacity), wire)
        what = f"{mib:g} MiB of {name} at {times}x of {capacity:.0f}/s"
        wrong = [answer.how or f"status {answer.status}" for answer in answers if not _is_fair(answer)]
        yield none_of(12, f"{what}: neither answered nor told when to come back", wrong)
        yield at_least(12, f"{what}: goodput", _good(answers) / seconds / capacity, LEAST_GOODPUT, "")
        p99_ms = quantile(_times_ms(answers, 200), 0.99)
        yield at_most(
            12, f"{what}: p99 of admitted, times {calm_ms:.0f} ms at 0.8x", p99_ms / calm_ms, MAX_TIMES_P99, ""
        )
        if refused := _times_ms(answers, 429):
            yield at_most(12, f"{what}: refusals p99", quantile(refused, 0.99), MAX_REFUSAL_MS, " ms")
        yield at_most(12, f"{what}: /healthz p99", health.quantile_ms(0.99), MAX_HEALTH_MS, " ms")


def _good(answers: list[Answer]) -> int:
    return sum(answer.status == 200 for answer in answers)


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
