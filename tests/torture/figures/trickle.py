"""Figure 7: a thousand connections that send a byte a second, within their headers or within their body, beside a canary.

Invariants: each is closed, or gets 408, by its deadline and a second; no other client notices; no place in the queue is held
meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

from service.settings import Settings
from tests.torture import at_rest
from tests.torture.at_rest import total
from tests.torture.canary import Song, singing
from tests.torture.figure import Form
from tests.torture.raw_connection import HOST, post
from tests.torture.report import Row, at_most, not_yet
from tests.torture.subject import Subject

CONNECTIONS = 1000
DEADLINE_S = 5.0
QUIET_S = 5.0
# They come one after another: a thousand at once are a storm of connections, which is another thing to survive.
COMING_S = 2.5
MOST_S = DEADLINE_S + 1.0
PATIENCE_S = 10.0
HEAD = post("/v1/layers/small/attend", b"", {"Content-Length": "1000000"})


def measure(form: Form) -> Iterator[Row]:
    yield from _part(form, "bodies", "body_timeout_s", whole=HEAD)
    if "header_timeout_s" in Settings.model_fields:
        yield from _part(form, "headers", "header_timeout_s", whole=b"")
    else:
        yield not_yet(7, "1,000 connections trickle their headers", "needs the setting header_timeout_s")


def _part(form: Form, what: str, setting: str, whole: bytes) -> Iterator[Row]:
    num = form.count(CONNECTIONS, 100)
    settings: dict[str, Any] = {setting: DEADLINE_S}
    quiet: list[Song] = []
    loud: list[Song] = []
    with Subject(form.room(f"trickle-{what}"), workers=1, **settings) as subject:
        before = subject.baseline()
        with singing(subject.port, quiet):
            time.sleep(QUIET_S)
        with singing(subject.port, loud):
            lives_s, queued = asyncio.run(_trickle_all(subject, num, whole))
        ratio = loud[0].quantile(0.99) / quiet[0].quantile(0.99)
        yield at_most(7, f"{num:,} connections trickle their {what}: longest life of one", max(lives_s), MOST_S, " s")
        yield at_most(7, f"p99 of other requests beside trickled {what}, as a multiple of that without them", ratio, 2)
        yield at_most(7, f"queued requests of trickled {what}", queued, 0)
        yield loud[0].row(7, f"trickled {what}")
        yield from at_rest.rows(7, subject, before, 32)


async def _trickle_all(subject: Subject, num: int, whole: bytes) -> tuple[list[float], float]:
    """How long each connection lived from its first byte on, and how many requests were queued in the middle."""
    lives = [asyncio.ensure_future(_trickle(subject.port, whole, COMING_S * i / num)) for i in range(num)]
    await asyncio.sleep((COMING_S + DEADLINE_S) / 2)
    samples = await asyncio.to_thread(subject.samples)
    return await asyncio.gather(*lives), max(0.0, total(samples, "queued_requests") - 1)


async def _trickle(port: int, whole: bytes, delay_s: float) -> float:
    await asyncio.sleep(delay_s)
    reader, writer = await asyncio.open_connection(HOST, port)
    started = time.monotonic()
    rest = iter(HEAD[len(whole) :] if not whole else b" " * 1000)
    writer.write(whole)
    reading = asyncio.ensure_future(reader.read())
    try:
        while time.monotonic() - started < DEADLINE_S + PATIENCE_S:
            writer.write(bytes([next(rest)]))
            done, _ = await asyncio.wait([reading], timeout=1.0)
            if done:
                break
        return time.monotonic() - started
    finally:
        if reading.done():
            reading.exception()
        reading.cancel()
        writer.transport.abort()
