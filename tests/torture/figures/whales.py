"""Figure 17: one legal request a second that computes for long, and small requests of another layer beside it.

Invariants: the small ones are a canary's, 20 a second, correct to the last bit; a large request is the same alone and beside
them; the same check on a service with one compute thread must fail. One is repeated under a quota of one core, where this machine
lets a process set one.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from tests.integration.running import small_layer
from tests.torture import at_rest
from tests.torture.canary import Song, singing
from tests.torture.figure import Form
from tests.torture.report import Row, at_most, none_of, not_yet
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
MAX_P99_MS = 25
MAX_RATIO = 1.2
# The kernel stops a service that has used its quota until the period ends: two threads on two cores use it in half of the period.
QUOTA_PERIOD_MS, MAX_QUOTA_P99_MS = 100, 100
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
    """No request is long, so that all batches share one compute thread."""
    import math

    from service.worker import service

    vars(service)["LONG_S"] = math.inf


def measure(form: Form) -> Iterator[Row]:
    seconds = form.seconds(SECONDS, LEAST_S)
    with Subject(form.room("whales"), layers=LAYERS, workers=1) as subject:
        before = subject.baseline()
        for name, body in WHALES.items():
            yield from _beside(subject, name, body(), seconds)
        yield from at_rest.rows(17, subject, before)
    name = "4,700 rows"
    with _quota() as group, Subject(form.room("whales-quota"), layers=LAYERS, workers=1) as subject:
        if group is None:
            yield not_yet(17, "under a quota of one core: p99", "no cgroup here that this process may make")
        else:
            for pid in (subject.process.pid, *subject.pids):
                (group / "cgroup.procs").write_text(str(pid))
            p99, *right = list(_beside(subject, f"{name}, quota of one core", WHALES[name](), seconds))[:3]
            p99_ms = float(p99.measured.removesuffix(" ms"))
            yield at_most(17, p99.what, p99_ms, MAX_QUOTA_P99_MS, " ms")
            yield from right
    with Subject(form.room("whales-planted"), layers=LAYERS, workers=1, plants={"modules": [__name__]}) as subject:
        rows = list(_beside(subject, "", WHALES["top_k 500 of 1,150 rows"](), seconds))
        yield Row(
            17, "one compute thread for all batches fails the check", "fails", rows[0].measured, not rows[0].is_met
        )


@contextlib.contextmanager
def _quota() -> Iterator[Path | None]:
    """Yield a new control group whose processes share one core (version 2 or 1); None where there may be none."""
    period_us = QUOTA_PERIOD_MS * 1000
    kinds = {
        Path("/sys/fs/cgroup"): {"cpu.max": f"{period_us} {period_us}"},
        Path("/sys/fs/cgroup/cpu"): {"cpu.cfs_period_us": str(period_us), "cpu.cfs_quota_us": str(period_us)},
    }
    for root, values in kinds.items():
        group = root / f"attention-figure-17-{os.getpid()}"
        if not (root / "cgroup.procs").exists():
            continue
        try:
            group.mkdir()
            for name, value in values.items():
                (group / name).write_text(value)
        except OSError:
            with contextlib.suppress(OSError):
                group.rmdir()
            continue
        try:
            yield group
        finally:
            while (group / "cgroup.procs").read_text():
                time.sleep(0.05)  # the last processes end
            group.rmdir()
        return
    yield None


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
