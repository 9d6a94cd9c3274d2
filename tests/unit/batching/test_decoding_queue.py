"""Bodies are decoded one at a time in their order, and what would be late is refused before it waits."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from service.batching.decoding_queue import MAX_BODIES, MAX_WAIT_S, DecodingQueue
from service.errors import DeadlineExceeded, QueueFull
from tests.doubles import ManualClock, on_loop_with, turns

MIB = 2**20
DEADLINE_S = 10.0


class Bodies:
    """A queue whose bodies are decoded when the test says so."""

    def __init__(self, standing_wait_s: float = 0.0) -> None:
        self.clock = ManualClock()
        self.queue = DecodingQueue(self.clock, standing_wait_s)
        self.order: list[object] = []
        self.decoded = asyncio.Event()

    def come(self, name: object, num_bytes: int = MIB, *, is_binary: bool = False) -> asyncio.Task[None]:
        async def decode() -> None:
            async with self.queue.decoding(num_bytes, is_binary=is_binary):
                self.order.append(name)
                self.decoded.clear()
                await self.decoded.wait()

        return asyncio.create_task(decode())

    async def decode(self, seconds: float = 1.0) -> None:
        """The body in hand is decoded in so long."""
        self.clock.advance(seconds)
        self.decoded.set()
        await turns()


@contextlib.asynccontextmanager
async def known_pace(standing_wait_s: float = 0.0) -> AsyncIterator[Bodies]:
    """A MiB takes a second."""
    bodies = Bodies(standing_wait_s)
    known = bodies.come("known")
    await turns()
    await bodies.decode()
    await known
    bodies.order.clear()
    yield bodies
    assert bodies.queue.num_bytes == 0, "something stayed behind"


async def leave(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@on_loop_with(known_pace)
async def test_bodies_are_decoded_in_order_one_at_a_time(bodies: Bodies):
    tasks = [bodies.come(number, (5 - number) * MIB) for number in range(5)]
    await turns()
    assert bodies.order == [0]
    for number in range(1, 5):
        await bodies.decode()
        assert bodies.order == list(range(number + 1))
    await bodies.decode()
    await asyncio.gather(*tasks)


@on_loop_with(known_pace)
async def test_an_empty_queue_predicts_no_wait(bodies: Bodies):
    assert bodies.queue.wait_s(100 * MIB) == 0.0
    bodies.queue.check(100 * MIB, 0.001, DEADLINE_S)


@on_loop_with(known_pace)
async def test_waiting_bodies_count_in_bytes_and_in_seconds(bodies: Bodies):
    tasks = [bodies.come(number, 2 * MIB) for number in range(3)]
    await turns()
    assert bodies.queue.num_bytes == 6 * MIB
    assert bodies.queue.wait_s(MIB) == pytest.approx(7.0)
    await leave(*tasks)


@on_loop_with(known_pace)
async def test_a_body_that_would_miss_its_deadline_is_a_504_and_one_that_would_miss_the_default_a_429(bodies: Bodies):
    tasks = [bodies.come("large", 8 * MIB)]
    await turns()
    bodies.queue.check(MIB, 9.5, DEADLINE_S)
    with pytest.raises(DeadlineExceeded, match="the deadline is in 8"):
        bodies.queue.check(MIB, 8.5, DEADLINE_S)
    with pytest.raises(QueueFull) as refused:
        bodies.queue.check(3 * MIB, DEADLINE_S, DEADLINE_S)
    assert refused.value.retry_after_s == 11
    await leave(*tasks)


@on_loop_with(known_pace)
async def test_a_burst_may_wait_half_a_second_or_behind_a_few_bodies(bodies: Bodies):
    tasks = [bodies.come(number) for number in range(MAX_BODIES - 1)]
    await turns()
    bodies.queue.check(MIB, DEADLINE_S, DEADLINE_S)
    tasks.append(bodies.come("one more"))
    await turns()
    with pytest.raises(QueueFull) as refused:
        bodies.queue.check(MIB, DEADLINE_S, DEADLINE_S)
    assert refused.value.retry_after_s == 5, "four wait, and this one"
    await leave(*tasks)
    small = [bodies.come(number, int(MAX_WAIT_S * MIB / 10)) for number in range(10)]
    await turns()
    bodies.queue.check(MIB, DEADLINE_S, DEADLINE_S)
    await leave(*small)


@on_loop_with(lambda: known_pace(standing_wait_s=0.1))
async def test_an_overloaded_decoding_queue_admits_two_bodies(bodies: Bodies):
    tasks = [bodies.come(number, MIB // 10) for number in range(4)]
    await turns()
    bodies.queue.check(MIB // 10, DEADLINE_S, DEADLINE_S)  # a burst
    for _ in range(3):
        tasks.append(bodies.come("more", MIB // 10))
        await turns()
        await bodies.decode(0.1)
    with pytest.raises(QueueFull):
        bodies.queue.check(MIB // 10, DEADLINE_S, DEADLINE_S)
    await leave(*tasks)
    bodies.queue.check(MIB, DEADLINE_S, DEADLINE_S)


@on_loop_with(known_pace)
async def test_a_cancelled_request_frees_its_entry_and_its_bytes(bodies: Bodies):
    first, second, third = (bodies.come(number) for number in range(3))
    await turns()
    second.cancel()
    first.cancel()
    await turns()
    assert bodies.order == [0, 2]
    assert bodies.queue.num_bytes == MIB
    await bodies.decode()
    await third


@on_loop_with(known_pace)
async def test_a_body_that_fails_to_decode_does_not_change_the_speed(bodies: Bodies):
    with pytest.raises(ValueError, match="no body"):
        async with bodies.queue.decoding(100 * MIB):
            raise ValueError("no body")
    task = bodies.come("next")
    await turns()
    assert bodies.queue.wait_s(MIB) == pytest.approx(2.0)
    await leave(task)


@on_loop_with(known_pace)
async def test_text_and_binary_bodies_are_forecast_by_the_rate_of_their_form(bodies: Bodies):
    for _ in range(16):
        task = bodies.come("binary", 32 * MIB, is_binary=True)
        await turns()
        await bodies.decode(0.02)
        await task
    texts = [bodies.come(number) for number in range(MAX_BODIES - 1)]
    await turns()
    assert bodies.queue.wait_s(MIB) == pytest.approx(4.0), "text takes as long as before"
    assert bodies.queue.wait_s(32 * MIB, is_binary=True) == pytest.approx(3.02)
    with pytest.raises(QueueFull):
        bodies.queue.check(MIB, DEADLINE_S, most_s=3.5)
    bodies.queue.check(32 * MIB, DEADLINE_S, most_s=3.5, is_binary=True)
    await leave(*texts)
    many = [bodies.come(number, 32 * MIB, is_binary=True) for number in range(16)]
    await turns()
    assert bodies.queue.num_bytes == 16 * 32 * MIB
    bodies.queue.check(32 * MIB, DEADLINE_S, DEADLINE_S, is_binary=True)
    await leave(*many)


@on_loop_with(lambda: known_pace(standing_wait_s=0.1))
async def test_an_overload_by_text_is_found_after_fast_binary_bodies(bodies: Bodies):
    for _ in range(16):
        task = bodies.come("binary", 32 * MIB, is_binary=True)
        await turns()
        await bodies.decode(0.001)
        await task
    tasks = [bodies.come(number, MIB // 10) for number in range(4)]
    await turns()
    for _ in range(3):
        tasks.append(bodies.come("more", MIB // 10))
        await turns()
        await bodies.decode(0.1)
    with pytest.raises(QueueFull):
        bodies.queue.check(MIB // 10, DEADLINE_S, DEADLINE_S)
    await leave(*tasks)
