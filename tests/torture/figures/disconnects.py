"""Figure 6: clients that disconnect at every stage: within headers, within a body, while queued, while running, while reading.

Invariants: whether an engine ran a request is read from what the planted engine wrote, never guessed; cancelled while queued =
no batch with it had begun when its caller left; afterwards the counts by stage add up and nothing is stuck.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator

from tests.torture import at_rest
from tests.torture.at_rest import total
from tests.torture.canary import Song, singing
from tests.torture.figure import Form
from tests.torture.health import Health
from tests.torture.planted import INLINE, LEAST_INLINE, inline_share, never_executed
from tests.torture.raw_connection import RawConnection, post, share_connections, share_out
from tests.torture.report import Row, at_least, none_of
from tests.torture.subject import Subject

LEAVERS = 5000
# Slow enough that most callers leave while they are queued; and a batch ends so soon that the loop waits for it.
COST_S, BATCH = 0.006, 2
NUM_CONNECTIONS = 48
# The service sees the end of a connection after the lag of its loop, which the health route shows. A client that left less than
# that before a batch began was not known to have left.
LEAST_NEWS_S = 0.01
START_S = 1.0
FIRST_MARK = 1000
STAGES = ("headers", "body", "queued", "queued", "queued", "queued", "running", "running", "reading")


def measure(form: Form) -> Iterator[Row]:
    songs: list[Song] = []
    room = form.room("disconnects")
    executed, threads = room / "executed.txt", room / "threads.txt"
    num = form.count(LEAVERS, 200)
    plants = {"cost_s": COST_S, "executed": str(executed), "threads": str(threads)}
    # No request is refused for sustained overload, so that clients leave the queue and not before it.
    settings = dict(workers=1, max_batch_requests=BATCH, standing_wait_ms=0)
    with Subject(room, plants=plants, **settings) as subject:
        asyncio.run(_leave_all(subject, form, range(FIRST_MARK)[-200:]))
        before, counted = subject.baseline(), subject.samples()
        with singing(subject.port, songs, per_second=10), Health(subject.port) as health:
            time.sleep(START_S)  # the start of two interpreters is a lag of its own
            left_at = asyncio.run(_leave_all(subject, form, range(FIRST_MARK, FIRST_MARK + num)))
            stuck = asyncio.run(_stuck(subject))
        yield none_of(6, f"{num:,} disconnects: later requests that are not answered with 200", stuck)
        news_s = max(LEAST_NEWS_S, 2 * health.quantile_ms(0.99) / 1000)
        yield never_executed(6, "that left", executed, left_at, news_s)
        yield Row(6, "cancelled, by the service's own stages", "", _by_stage(counted, subject.samples()), is_met=True)
        yield at_least(6, INLINE, inline_share(threads), LEAST_INLINE, " %")
        yield songs[0].row(6)
        yield from at_rest.rows(6, subject, before)


async def _leave_all(subject: Subject, form: Form, marks: range) -> dict[int, float]:
    """When the client with each mark left, for clients that had sent their whole request."""
    left_at: dict[int, float] = {}

    async def leave(mark: int) -> None:
        when = await _leave(subject.port, mark, form.random(f"leaver {mark}"))
        if when is not None:
            left_at[mark] = when

    await share_out(marks, NUM_CONNECTIONS, leave)
    return left_at


async def _leave(port: int, mark: int, rng: random.Random) -> float | None:
    """One caller from its first byte to its leaving; when it left, if its request was whole by then."""
    stage = rng.choice(STAGES)
    wire = _request(mark, rng, is_large=stage == "reading")
    head = wire.index(b"\r\n\r\n")
    connection = RawConnection(port)
    try:
        if stage == "headers":
            await connection.send(wire[: rng.randint(1, head)])
        elif stage == "body":
            await connection.send(wire[: rng.randint(head + 4, len(wire) - 1)])
        else:
            await connection.send(wire)
        if stage == "reading":
            await connection.read_some(rng.randint(1, 2000))
        elif stage == "running":
            await asyncio.sleep(rng.uniform(0, 0.6))
        else:
            await asyncio.sleep(rng.uniform(0, 0.15))
    except OSError:
        return None
    finally:
        connection.close()
    # The transport closes its socket in a later turn of this loop: before that the client has not left.
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return time.monotonic() if stage in ("queued", "running", "reading") else None


def _request(mark: int, rng: random.Random, *, is_large: bool) -> bytes:
    rows = 200 if is_large else rng.randint(1, 6)
    body: dict = {"query": [[float(mark), *[0.5] * 15]] * rows}
    if is_large:
        body["weights"] = {"form": "heads"}
    return post("/v1/layers/small/attend", json.dumps(body).encode())


async def _stuck(subject: Subject) -> list[str]:
    """Send as many requests at once as there were disconnects at once, and wait for all answers."""

    async def stay(connection: RawConnection, number: int) -> str | None:
        reply = await connection.outcome(_request(number, random.Random(number), is_large=False))
        if isinstance(reply, str):
            return reply
        return None if reply.status == 200 else f"status {reply.status}"

    return await share_connections(subject.port, range(NUM_CONNECTIONS), NUM_CONNECTIONS, stay)


def _by_stage(before: dict[str, float], after: dict[str, float]) -> str:
    stages = {key: after[key] - before.get(key, 0) for key in after if key.startswith("attention_cancelled_total{")}
    told = ", ".join(f"{key.split(chr(34))[1]} {value:.0f}" for key, value in sorted(stages.items()))
    return f"{told}; received {total(after, 'received_total') - total(before, 'received_total'):.0f}"
