"""attend_many: answers keep the order of the items, and the calls in flight never exceed the window."""

import asyncio
import contextlib
import random
from concurrent.futures import Future
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_client.async_client import in_order_async
from attention_client.sync_client import in_order
from tests.doubles import run, turns

SCRIPTS = (st.integers(0, 30), st.integers(1, 9), st.randoms(use_true_random=False))


class Inline:
    """In place of the thread: the futures are the test's."""

    def result(self, future: Future):
        return future.result()

    def cancel(self, future: Future) -> None:
        future.cancel()


INLINE: Any = Inline()


class Work:
    """Futures that finish in a random order."""

    def __init__(self, chance: random.Random, window: int) -> None:
        self.chance = chance
        self.window = window
        self.open: dict[int, Future[int]] = {}
        self.started = 0

    def items(self, number: int):
        """Yield 0 … number − 1, then finish all open futures."""
        yield from range(number)
        self.finish(self.chance.sample(sorted(self.open), len(self.open)))

    def start(self, item: int) -> Future[int]:
        future: Future[int] = Future()
        self.open[item] = future
        self.started += 1
        assert len(self.open) <= self.window
        if self.chance.random() < 0.3 or len(self.open) == self.window:
            self.finish(self.chance.sample(sorted(self.open), self.chance.randint(1, len(self.open))))
        if self.open and min(self.open) <= item - self.window + 1:
            self.finish([min(self.open)])  # the consumer waits for this answer now
        return future

    def finish(self, items: list[int]) -> None:
        for item in items:
            self.open.pop(item).set_result(item)


@given(*SCRIPTS)
def test_answers_come_in_the_order_of_the_items(number, window, chance):
    work = Work(chance, window)
    handed_out = 0
    for answer in in_order(work.items(number), work.start, INLINE, window):
        assert answer == handed_out
        assert work.started - handed_out <= window
        handed_out += 1
    assert handed_out == number


@given(*SCRIPTS)
def test_async_answers_come_in_the_order_of_the_items(number, window, chance):
    open_: dict[int, asyncio.Future[int]] = {}

    async def work(item: int) -> int:
        assert len(open_) < window
        open_[item] = asyncio.get_running_loop().create_future()
        return await open_[item]

    async def collect() -> list[int]:
        return [answer async for answer in in_order_async(range(number), work, window)]

    async def main() -> list[int]:
        collecting = asyncio.ensure_future(collect())
        while not collecting.done():
            await turns(4)
            if open_:
                item = chance.choice(sorted(open_))
                open_.pop(item).set_result(item)
        return await collecting

    assert run(main) == list(range(number))


def test_an_endless_iterator_is_read_only_as_far_as_the_window():
    taken = []

    def items():
        for item in count():
            taken.append(item)
            yield item

    def start(item: int) -> Future[int]:
        future: Future[int] = Future()
        future.set_result(item)
        return future

    answers = in_order(items(), start, INLINE, 3)
    assert [next(answers) for _ in range(4)] == [0, 1, 2, 3]
    answers.close()
    assert taken == [0, 1, 2, 3], "what is ready is handed out before another item is taken"


def test_a_consumer_that_stops_early_cancels_the_requests_in_flight():
    started: list[Future[int]] = []

    def start(item: int) -> Future[int]:
        started.append(Future())
        if item == 2:
            started[0].set_result(0)
        return started[-1]

    answers = in_order(range(9), start, INLINE, 3)
    assert next(answers) == 0
    answers.close()
    assert [future.cancelled() for future in started] == [False, True, True]


def test_an_error_of_the_iterator_cancels_the_requests_in_flight():
    started: list[Future[int]] = []

    def items():
        yield 0
        raise KeyError

    def start(item: int) -> Future[int]:
        started.append(Future())
        return started[-1]

    with pytest.raises(KeyError):
        list(in_order(items(), start, INLINE, 3))
    assert started[0].cancelled()


@pytest.mark.parametrize("is_async", [False, True])
def test_tasks_in_flight_end_before_the_generator_when_the_consumer_stops(is_async):
    ended = []

    async def work(item: int) -> int:
        try:
            await asyncio.sleep(0) if item == 0 else await asyncio.Event().wait()
        finally:
            ended.append(item)
        return item

    async def items():
        for item in range(9):
            yield item

    async def main() -> None:
        source = items() if is_async else range(9)
        async with contextlib.aclosing(in_order_async(source, work, 3)) as answers:
            async for answer in answers:
                assert answer == 0
                break
        assert sorted(ended) == [0, 1, 2]

    run(main)
