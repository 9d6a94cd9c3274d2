"""Figure 5: an answer does not depend on its mates, to the last bit, and belongs to its request.

Invariants: every request of a group is a needle: its answer beside the others is compared with its answer alone, byte for byte; a
little wait for company (a setting) makes sure that there is company, and the answers say how much there was.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from service.attention.spec import LayerSpec
from service.layers.store import StoredLayer
from tests.integration.running import LAYERS
from tests.torture import at_rest
from tests.torture.figure import Form
from tests.torture.inputs import valid
from tests.torture.raw_connection import RawConnection, Reply, attend, post, share_connections
from tests.torture.report import Row, at_least, none_of
from tests.torture.subject import Subject

GROUPS, HARMFUL_GROUPS, IDENTITIES = 10_000, 1000, 5000
POOL = 300
LARGEST_GROUP = 16
RAISING = 4242.0
SETTINGS = dict(workers=1, max_wait_ms=2, max_batch_requests=16)
DTYPES = ("float32", "bfloat16")


def measure(form: Form) -> Iterator[Row]:
    for dtype in DTYPES:
        room = form.room(f"isolation-{dtype}")
        layers = [*LAYERS, mirror()]
        with Subject(room, plants={"raising": RAISING}, layers=layers, dtype=dtype, **SETTINGS) as subject:
            before = subject.baseline()
            # Half of the groups in each dtype; float64 queries are in both.
            company = _Company(subject.port, form)
            asyncio.run(company.measure_alone())
            num = form.count(GROUPS // len(DTYPES), 50)
            differing = asyncio.run(company.groups(num, harmful=False))
            yield none_of(
                5,
                f"{num:,} random groups in {dtype} (queries in float16 to float64): answers with other bits",
                differing,
            )
            yield at_least(5, f"requests in a batch, mean ({dtype})", company.mean_batch, 1.5)
            num = form.count(HARMFUL_GROUPS // len(DTYPES), 20)
            harmed = asyncio.run(company.groups(num, harmful=True))
            yield none_of(
                5, f"{num:,} groups with a request that has a NaN or raises, in {dtype}: other requests harmed", harmed
            )
            num = form.count(IDENTITIES // len(DTYPES), 200)
            yield none_of(
                5,
                f"{num:,} identities at once in {dtype}: swapped answers",
                asyncio.run(_identities(subject.port, num)),
            )
            yield from (row for row in at_rest.rows(5, subject, before) if "faults" not in row.what)


def mirror() -> StoredLayer:
    """A layer that answers one row with that row: all its matrices are the identity."""
    shape: dict[str, Any] = dict(
        query_width=16, key_width=16, value_width=16, out_width=16, num_heads=4, num_kv_heads=4, head_width=4
    )
    spec = LayerSpec(**shape, value_head_width=4, scale=0.5)
    return StoredLayer(
        "mirror", spec, {name: torch.eye(*size) for name, size in spec.tensor_shapes().items()}, "identity", "torch-mha"
    )


def bits(reply: Reply) -> bytes:
    """What an answer says, without what is true of this one answer only."""
    if reply.status != 200:
        return b"status %d" % reply.status
    return reply.body.partition(b',"batch":')[0]


class _Company:
    """A pool of requests, their answers alone, and groups of them sent at once."""

    def __init__(self, port: int, form: Form) -> None:
        self._rng, self._port = form.random("isolation"), port
        self._connections = [RawConnection(port) for _ in range(LARGEST_GROUP + 1)]
        forms = ("nested", "list", "base64")
        requests = (valid.write(valid.draw_request(self._rng), self._rng.choice(forms)) for _ in range(POOL))
        self._pool = [request.wire() for request in requests]
        self._alone: list[bytes] = []
        self._batches: list[int] = []

    @property
    def mean_batch(self) -> float:
        return float(np.mean(self._batches)) if self._batches else 0.0

    async def measure_alone(self) -> None:
        connection = RawConnection(self._port)
        self._alone = [bits(await connection.ask(wire)) for wire in self._pool]
        connection.close()

    async def groups(self, num: int, *, harmful: bool) -> list[str]:
        """What differed in so many groups."""
        found: list[str] = []
        for number in range(num):
            chosen = [self._rng.randrange(POOL) for _ in range(self._rng.randint(1, LARGEST_GROUP))]
            asked = [
                connection.ask(self._pool[which]) for connection, which in zip(self._connections, chosen, strict=False)
            ]
            harm = [self._connections[-1].ask(_harm(self._rng))] if harmful else []
            replies = await asyncio.gather(*asked, *harm)
            mates = replies[: len(chosen)]
            found += [
                f"group {number}: {self._compared(which, reply)}"
                for which, reply in zip(chosen, mates, strict=True)
                if bits(reply) != self._alone[which]
            ]
            if harmful and replies[-1].status not in (422, 500):
                found.append(f"group {number}: the harmful one got {replies[-1].status}")
            self._batches += [json.loads(reply.body)["batch"]["requests"] for reply in mates[:1] if reply.status == 200]
        for connection in self._connections:
            connection.close()
        return found

    def _compared(self, which: int, reply: Reply) -> str:
        num_bytes = sum(a != b for a, b in zip(bits(reply), self._alone[which], strict=False))
        return f"request {which} got {reply.status}, {num_bytes} bytes differ"


def _harm(rng: random.Random) -> bytes:
    """A request that the checks before the queue refuse, or one that makes the engine raise."""
    if rng.random() < 0.5:
        nan = base64.b64encode(np.full(32, np.nan, "float32").tobytes()).decode()
        return post(
            "/v1/layers/small/attend",
            json.dumps({"query": {"dtype": "float32", "shape": [2, 16], "data": nan}}).encode(),
        )
    return attend([[RAISING] * 16])


async def _identities(port: int, num: int) -> list[str]:
    """As many callers as connections at a time, each with a number of its own, which it must get back."""

    async def ask(connection: RawConnection, number: int) -> str | None:
        # Exact in bfloat16 too: eight bits in each of two columns.
        row = [float(number % 256), float(number // 256), *[0.0] * 14]
        reply = await connection.ask(attend([row], "mirror", **{"X-Request-ID": f"caller-{number}"}))
        if (
            reply.status == 200
            and reply.json()["output"] == [row]
            and reply.headers["x-request-id"] == f"caller-{number}"
        ):
            return None
        return f"caller {number} got {reply.status} {reply.body[:60]!r}"

    return await share_connections(port, range(1, num + 1), 128, ask)
