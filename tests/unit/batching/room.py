"""Room: a batcher with a gated engine and a manual clock, for the tests beside this file.

Invariant: leaving the room checks that nothing of any job stayed behind.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable
from typing import Any, Self

from service.batching.admission import QueueLimits
from service.batching.batcher import Batcher
from service.batching.job import Cost, Job, Outcome
from service.batching.policy import BatchLimits
from tests.doubles import GateEngine, ManualClock, RecordingObserver, on_loop_with, turns

LARGE = 10**9


def cost_of(
    *,
    sequences: int = 1,
    tokens: int = 10,
    cells: int = 100,
    weights_bytes: int = 0,
    input_bytes: int = 8,
    flops: int = 1000,
) -> Cost:
    return Cost(
        sequences=sequences,
        tokens=tokens,
        cells=cells,
        weights_bytes=weights_bytes,
        input_bytes=input_bytes,
        flops=flops,
    )


class Room:
    """`async with Room(...) as room`: started on entry, stopped and looked over on leaving."""

    def __init__(
        self,
        *,
        max_requests: int = 8,
        max_tokens: int = LARGE,
        capacity: int = 100,
        max_bytes: int = LARGE,
        max_cells: int = LARGE,
        max_wait_s: float = 0.0,
        standing_wait_s: float = 0.0,
        max_compute_s: float = LARGE,
        inline_s: float = 0.0,
        long_s: float = math.inf,
        engine: Any = None,
        clock: Any = None,
    ) -> None:
        self.clock = clock or ManualClock()
        self.engine = engine or GateEngine()
        self.heard = RecordingObserver()
        self.batcher: Batcher[Any, Any] = Batcher(
            self.engine,
            BatchLimits(max_requests=max_requests, max_tokens=max_tokens, max_cells=LARGE, max_weights_bytes=LARGE),
            QueueLimits(
                capacity=capacity,
                max_bytes=max_bytes,
                max_cells=max_cells,
                max_wait_s=max_wait_s,
                standing_wait_s=standing_wait_s,
                stuck_s=max_compute_s,
                inline_s=inline_s,
                long_s=long_s,
                overhead_flops=0,
            ),
            self.clock,
            self.heard,
        )

    async def __aenter__(self) -> Self:
        self.batcher.start()
        await turns()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.batcher.stop()
        await turns()
        self.check_empty()

    def check_empty(self) -> None:
        batcher = self.batcher
        assert (batcher.num_queued, batcher.num_running) == (0, 0)
        assert self.clock.num_calls == 0, "a timer leaked"
        assert self.heard.queue[-1:] in ([], [(0, 0)])

    def send(
        self,
        payload: Any,
        lane: str = "a",
        *,
        timeout_s: float = 60.0,
        cost: Cost | None = None,
        caller: str | None = None,
    ) -> asyncio.Task[Outcome[Any]]:
        """Return the task of a client, which submits its request in the next loop tick."""
        deadline = self.clock.now() + timeout_s
        client = asyncio.create_task(self.batcher.submit(payload, lane, cost or cost_of(), deadline, caller))
        client.add_done_callback(lambda done: done.cancelled() or done.exception())  # a test need not look at each
        return client

    async def send_running(self, *payloads: Any, lane: str = "a") -> list[asyncio.Task[Outcome[Any]]]:
        """Clients whose requests are in one batch, held by the engine."""
        clients = [self.send(payload, lane) for payload in payloads]
        await turns()
        assert self.engine.batches[-1] == list(payloads)
        return clients

    async def send_waiting(self, *payloads: Any, lane: str = "a") -> list[asyncio.Task[Outcome[Any]]]:
        """Clients whose requests wait, because the engine is busy."""
        assert self.engine.is_busy
        queued = self.batcher.num_queued
        clients = [self.send(payload, lane) for payload in payloads]
        await turns()
        assert self.batcher.num_queued == queued + len(payloads)
        return clients


def in_room(**options: Any) -> Callable[..., Callable[..., None]]:
    """Make a test of a coroutine function whose first parameter is a started Room with these options."""
    return on_loop_with(functools.partial(Room, **options))


def stage_of(job: Job[Any, Any]) -> str:
    if job.settled_at is not None:
        return "settled"
    return "queued" if job.started_at is None else "running"


def error_of(client: asyncio.Task[Any]) -> BaseException | None:
    """How a client's request ended: None is an answer. It must have ended."""
    assert client.done(), "still waiting"
    return asyncio.CancelledError() if client.cancelled() else client.exception()


def result_of(client: asyncio.Task[Outcome[Any]]) -> Any:
    assert client.done(), "still waiting"
    return client.result().result


async def ended(client: asyncio.Task[Outcome[Any]]) -> asyncio.Task[Outcome[Any]]:
    """Return the client after a few loop ticks, in which it must have got its answer or error."""
    await turns()
    assert client.done(), "still waiting"
    return client
