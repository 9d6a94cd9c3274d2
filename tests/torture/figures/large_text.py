"""Figure 12: bodies of 0.1 to 4 MiB in every form, offered several times faster than they can be answered.

Laws: two workers with default settings; callers in a closed loop, many more than can be served, who come back after a refusal;
what is measured of refusals and health does not wait behind bodies: it is asked by processes of its own; the same check on a
service that decodes bodies side by side and refuses none for its decoding must fail.
"""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
from safetensors.numpy import save

from tests.integration.running import LAYERS, small_layer
from tests.torture import at_rest, process_tree
from tests.torture.canary import quantile
from tests.torture.figure import Form
from tests.torture.health import Health
from tests.torture.line import HOST, Cut, Line, Silence, post, read_reply
from tests.torture.report import Row, at_most, none_of
from tests.torture.subject import Subject

MIB = 2**20
WIDTH, LENGTH = 256, 40
CALLERS = 400
SECONDS, LEAST_S = 10.0, 4.0
PAUSE_S, PROBE_S = 0.25, 0.02
PATIENCE_S = 20.0
MAX_MEMORY_MIB, MAX_HEALTH_MS, MAX_REFUSAL_MS = 1024, 100, 100
# Bytes that a float takes in each form.
BYTES_EACH = {"lists": 20, "base64": 5.4, "safetensors": 4}
SIZES_MIB = (0.1, 0.9, 2.0, 4.0)


def plant() -> None:
    """No turns, and no refusals for what waits to be decoded."""
    import contextlib

    from service.batching.decoding_queue import DecodingQueue

    DecodingQueue.check = lambda *_: None  # type: ignore[method-assign]
    DecodingQueue.turn = lambda *_: contextlib.nullcontext()  # type: ignore[method-assign, assignment]


def measure(form: Form) -> Iterator[Row]:
    layers = [*LAYERS, small_layer("wide", query_width=WIDTH, key_width=WIDTH, value_width=WIDTH, out_width=WIDTH)]
    with Subject(form.room("large-text"), layers=layers, workers=2) as subject:
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
        longest_s, _ = _offered(subject.port, _body("lists", 0.9), form.seconds(SECONDS, LEAST_S))
        told = f"longest answer {longest_s:.1f} s"
        yield Row(12, "bodies that are decoded side by side fail the check", "fails", told, longest_s > 2.0)


def _rows(subject: Subject, form: Form, name: str, mib: float) -> Iterator[Row]:
    seconds = form.seconds(SECONDS, LEAST_S)
    with Health(subject.port, pause_s=0.02) as health, _prober(subject.port, name, mib, seconds) as prober:
        longest_s, wrong = _offered(subject.port, _body(name, mib), seconds)
        refused_s = json.loads(prober.communicate()[0])
    what = f"{CALLERS} callers with {mib:g} MiB of {name}"
    yield none_of(12, f"{what}: neither answered nor told to come back", wrong)
    yield at_most(12, f"{what}: /healthz p99", health.quantile_ms(0.99), MAX_HEALTH_MS, " ms")
    if refused_s:
        yield at_most(12, f"{what}: refusals p99", quantile(refused_s, 0.99) * 1000, MAX_REFUSAL_MS, " ms")
    yield Row(12, f"{what}: longest answer", "", f"{longest_s:.2f} s", is_met=True)


def _offered(port: int, wire: bytes, seconds: float) -> tuple[float, list[str]]:
    """The longest time to a 200, and everything but that and a refusal that says when to come back."""
    answered, wrong = [0.0], list[str]()
    end = time.monotonic() + seconds

    async def call() -> None:
        while time.monotonic() < end:
            line, started = Line(port), time.monotonic()
            try:
                reply = await line.ask(wire, PATIENCE_S)
            except (Cut, Silence, OSError) as error:
                wrong.append(type(error).__name__)
                continue
            finally:
                line.close()
            if reply.status == 200:
                answered.append(time.monotonic() - started)
            elif reply.status == 429 and "retry-after" in reply.headers:
                await asyncio.sleep(PAUSE_S)
            else:
                wrong.append(f"status {reply.status}")

    async def all_callers() -> None:
        await asyncio.gather(*(call() for _ in range(CALLERS)))

    asyncio.run(all_callers())
    return max(answered), wrong


def _prober(port: int, *asked: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.torture.figures.large_text", str(port), *map(str, asked)]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


async def _refusals(port: int, wire: bytes, seconds: float) -> list[float]:
    """Sorted times to a refusal, for one caller who reads while he sends."""
    refused, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        reader, writer = await asyncio.open_connection(HOST, port, limit=2**20)
        started = time.monotonic()
        writer.write(wire)
        reply = await asyncio.wait_for(read_reply(reader), PATIENCE_S)
        if reply.status == 429:
            refused.append(time.monotonic() - started)
        writer.transport.abort()
        await asyncio.sleep(PROBE_S)
    return sorted(refused)


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


if __name__ == "__main__":
    port, name, mib, seconds = sys.argv[1:]
    sys.stdout.write(json.dumps(asyncio.run(_refusals(int(port), _body(name, float(mib)), float(seconds)))))
