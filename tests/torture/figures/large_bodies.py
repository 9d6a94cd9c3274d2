"""Figure 9: the largest legal JSON bodies, four at once; the event loop goes on meanwhile.

Invariants: one worker, so that the answers of `/healthz` come from the loop that the bodies could stop; the lag of the loop is
what `/healthz` takes longer than it does at rest; bodies are as large as the limits let their form be.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator

import numpy as np

from service.settings import Settings
from tests.integration.forms import Request, as_base64, as_inference, as_list, as_nested
from tests.integration.running import LAYERS, small_layer
from tests.torture import at_rest
from tests.torture.figure import Form
from tests.torture.health import Health
from tests.torture.raw_connection import RawConnection, post
from tests.torture.report import Row, at_most, none_of
from tests.torture.subject import Subject

AT_ONCE, ROUNDS = 4, 5
WIDTH = 256
MAX_LAG_MS, MAX_P99_MS = 50, 100
PATIENCE_S = 60.0
LIMIT_BYTES = Settings.model_fields["max_body_bytes"].default
QUIET_S = 2.0
# Rows that fill a limit in each form: 262,144 numbers as text, or 16 MiB, of which a float32 takes 5.4 bytes in base64.
ROWS = {"nested": 1000, "list": 1000, "base64": 12_250, "inference": 1000}


def measure(form: Form) -> Iterator[Row]:
    layers = [*LAYERS, small_layer("wide", query_width=WIDTH, key_width=WIDTH, value_width=WIDTH, out_width=WIDTH)]
    with Subject(form.room("large"), layers=layers, workers=1, request_timeout_ms=60_000) as subject:
        asyncio.run(_send(subject.port, [_body("nested", form.random("first"))]))
        before = subject.baseline()
        with Health(subject.port) as quiet:
            time.sleep(QUIET_S)
        rest_ms = quiet.quantile_ms(0.5)
        yield Row(9, "/healthz at rest", "", f"p50 {rest_ms:.1f} ms, p99 {quiet.quantile_ms(0.99):.1f} ms", is_met=True)
        for name in ROWS:
            yield from _rows(subject, form, name, rest_ms)
        yield from at_rest.rows(9, subject, before)


def _rows(subject: Subject, form: Form, name: str, rest_ms: float) -> Iterator[Row]:
    wire = _body(name, form.random(name))
    statuses: list[int] = []
    with Health(subject.port) as health:
        for _ in range(form.count(ROUNDS, 2)):
            statuses.extend(asyncio.run(_send(subject.port, [wire] * AT_ONCE)))
    told = f"{len(wire) / 2**20:.1f} MiB {name} x{AT_ONCE}"
    yield none_of(9, f"{told}: not answered with 200", [str(status) for status in statuses if status != 200])
    yield at_most(9, f"{told}: event-loop lag, longest", health.quantile_ms(1.0) - rest_ms, MAX_LAG_MS, " ms")
    yield at_most(9, f"{told}: /healthz p99", health.quantile_ms(0.99), MAX_P99_MS, " ms")


def _body(name: str, rng: random.Random) -> bytes:
    """In sequences of 50 rows, so that the scores stay within their limit."""
    values = np.random.default_rng(rng.getrandbits(32)).standard_normal((ROWS[name] // 50, 50, WIDTH))
    request = Request(values.astype("float32"))
    if name == "inference":
        path, body = "/v2/models/wide/infer", as_inference(request, binary=False)[0]
    else:
        write = {"nested": as_nested, "list": as_list, "base64": as_base64}[name]
        path, body = "/v1/layers/wide/attend", json.dumps(request.fields(write)).encode()
    assert len(body) <= LIMIT_BYTES, f"{name} has {len(body)} bytes"
    return post(path, body)


async def _send(port: int, wires: list[bytes]) -> list[int]:
    async def one(wire: bytes) -> int:
        connection = RawConnection(port)
        try:
            return (await connection.ask(wire, PATIENCE_S)).status
        finally:
            connection.close()

    return list(await asyncio.gather(*map(one, wires)))
