"""Figure 17: one legal request a second that computes for long, and small requests of another layer beside it.

Invariants: the small ones are a canary's, 20 a second, correct to the last bit; a large request is the same alone and beside
them; the same check on a service whose batches do not stop must fail.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator

import numpy as np
from safetensors.numpy import save

from tests.integration.running import small_layer
from tests.torture import at_rest
from tests.torture.canary import Song, singing
from tests.torture.figure import Form
from tests.torture.report import Row, at_most, none_of
from tests.torture.subject import Subject

WIDTH = 256
LAYERS = [
    small_layer("small"),
    small_layer(
        "wide", query_width=WIDTH, key_width=WIDTH, value_width=WIDTH, out_width=WIDTH, num_heads=8, num_kv_heads=8,
        head_width=32, value_head_width=32, scale=32**-0.5,
    ),
]  # fmt: skip
SECONDS, LEAST_S = 8.0, 3.0
MAX_P99_MS = 100
MAX_RATIO = 1.2
HEADERS = {"Content-Type": "application/vnd.safetensors"}


def _body(*shape: int, dtype: type = np.float32, **request: object) -> bytes:
    query: np.ndarray = np.random.default_rng(17).standard_normal((*shape, WIDTH)).astype(dtype)
    return save({"query": query}, metadata={"request": json.dumps(request)})


WHALES = {
    "top_k 500 of 1,150 rows": lambda: _body(1150, weights={"form": "top_k", "k": 500}),
    "4,700 rows": lambda: _body(4700),
    "4,700 rows, causal": lambda: _body(4700, masks=[{"kind": "causal"}]),
    "2,000 rows in float64": lambda: _body(2000, dtype=np.float64),
    "1,024 sequences": lambda: _body(1024, 8),
    "all weights of 1,300 rows": lambda: _body(1300, weights={"form": "heads"}),
}


def plant() -> None:
    """Batches that never stop."""
    import math

    from service.worker import service

    vars(service)["STEP_S"] = math.inf


def measure(form: Form) -> Iterator[Row]:
    with Subject(form.room("whales"), layers=LAYERS, workers=1) as subject:
        before = subject.baseline()
        for name, body in WHALES.items():
            yield from _beside(subject, name, body(), form.seconds(SECONDS, LEAST_S))
        yield from at_rest.rows(17, subject, before)
    with Subject(form.room("whales-planted"), layers=LAYERS, workers=1, plants={"modules": [__name__]}) as subject:
        rows = list(_beside(subject, "", WHALES["top_k 500 of 1,150 rows"](), form.seconds(SECONDS, LEAST_S)))
        yield Row(17, "batches that never stop fail the check", "fails", rows[0].measured, rows[0].is_met is False)


def _beside(subject: Subject, name: str, body: bytes, seconds: float) -> Iterator[Row]:
    """A large request a second, for so long."""
    songs: list[Song] = []
    alone = [_asked(subject, body) for _ in range(3)]
    with singing(subject.port, songs, per_second=20):
        time.sleep(1.0)  # the canary's interpreter starts, and its lane learns its pace
        end, beside = time.monotonic() + seconds, []
        while time.monotonic() < end:
            beside.append(_asked(subject, body))
            time.sleep(max(0.0, 1.0 - beside[-1][0]))
    p99_ms = songs[0].quantile(0.99) * 1000
    yield at_most(17, f"small requests beside {name}: p99", p99_ms, MAX_P99_MS, " ms")
    yield none_of(17, f"beside {name}: answers that are not a 200 with the right bits", songs[0].wrong)
    wrong = [f"status {status}" for _, status, _ in beside if status != 200]
    yield none_of(17, f"{name}: answers with other bits than alone", wrong + _different(alone + beside))
    ratio = statistics.median(took for took, *_ in beside) / statistics.median(took for took, *_ in alone)
    yield at_most(17, f"{name}: time beside small requests, as a multiple of that alone", ratio, MAX_RATIO)


def _asked(subject: Subject, body: bytes) -> tuple[float, int, int]:
    """Seconds, status, and a hash of the tensors."""
    started = time.monotonic()
    status, answer = subject.post("/v1/layers/wide/attend", body, HEADERS)
    took = time.monotonic() - started
    length = int.from_bytes(answer[:8], "little")
    return took, status, hash(answer[8 + length :])


def _different(asked: list[tuple[float, int, int]]) -> list[str]:
    return ["other bits"] * (len({digest for *_, digest in asked}) - 1)
