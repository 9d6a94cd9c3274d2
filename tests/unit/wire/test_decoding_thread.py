"""The decoding thread: results and errors come back, callers who leave stop the work, and the desk never waits for more
than its pace.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
import pytest
import torch

from service.errors import BadJson
from service.wire.decoding_thread import DecodingThread
from service.wire.json_document import parse
from service.wire.pace import Pace
from service.wire.tensors import TensorKind, decode_tensor


def in_thread(scenario: Callable[[DecodingThread], Awaitable[Any]]) -> Any:
    async def with_thread() -> Any:
        thread = DecodingThread(pause=lambda _: None)
        try:
            return await scenario(thread)
        finally:
            thread.close()

    return asyncio.run(with_thread())


async def decoded(body: bytes) -> torch.Tensor:
    document = await parse(body, max_depth=32)
    return (await decode_tensor(document["query"], param="/query", kind=TensorKind.FLOAT)).tensor


class Gate:
    """Work that says when it runs and goes on when it may, giving way in between."""

    def __init__(self) -> None:
        self.runs = threading.Event()
        self.may_go_on = threading.Event()
        self.ended = threading.Event()
        self.num_slices = 0

    async def work(self) -> int:
        try:
            self.runs.set()
            self.may_go_on.wait()
            for _ in range(3):
                self.num_slices += 1
                await Pace().give_way()
            return self.num_slices
        finally:
            self.ended.set()


async def until(event: threading.Event) -> None:
    await asyncio.to_thread(event.wait)


def test_the_same_tensor_as_on_the_loop():
    tensor = torch.randn(900, 300)
    body = b'{"query":' + orjson.dumps(tensor.numpy(), option=orjson.OPT_SERIALIZE_NUMPY) + b"}"
    assert torch.equal(in_thread(lambda thread: thread.run(lambda: decoded(body))), tensor)


def test_errors_come_back_as_they_were_raised():
    with pytest.raises(BadJson, match="byte"):
        in_thread(lambda thread: thread.run(lambda: decoded(b'{"query":nope}')))


def test_work_is_done_in_one_thread_in_the_order_in_which_it_came():
    async def scenario(thread: DecodingThread) -> tuple[list[int], set[int]]:
        order: list[int] = []
        threads: set[int] = set()

        async def note(number: int) -> None:
            order.append(number)
            threads.add(threading.get_ident())

        await asyncio.gather(*(thread.run(functools.partial(note, n)) for n in range(20)))
        return order, threads

    order, threads = in_thread(scenario)
    assert order == list(range(20))
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_a_caller_who_leaves_stops_the_work_at_its_next_slice():
    async def scenario(thread: DecodingThread) -> int:
        gate = Gate()
        task = asyncio.create_task(thread.run(gate.work))
        await until(gate.runs)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.may_go_on.set()
        await until(gate.ended)
        return gate.num_slices

    assert in_thread(scenario) == 1


def test_a_caller_who_leaves_before_his_turn_is_never_decoded():
    async def scenario(thread: DecodingThread) -> bool:
        first, second = Gate(), Gate()
        ahead = asyncio.create_task(thread.run(first.work))
        await until(first.runs)
        behind = asyncio.create_task(thread.run(second.work))
        await asyncio.sleep(0)
        behind.cancel()
        with pytest.raises(asyncio.CancelledError):
            await behind
        first.may_go_on.set()
        assert await ahead == 3
        return second.runs.is_set()

    assert in_thread(scenario) is False


def test_the_loop_goes_on_beside_the_thread():
    async def scenario(thread: DecodingThread) -> int:
        gate = Gate()
        task = asyncio.create_task(thread.run(gate.work))
        await until(gate.runs)
        assert not task.done()
        gate.may_go_on.set()
        return await task

    assert in_thread(scenario) == 3


def test_close_stops_what_runs_and_what_waits_and_takes_nothing_more():
    async def scenario(thread: DecodingThread) -> None:
        gate, behind = Gate(), Gate()
        task = asyncio.create_task(thread.run(gate.work))
        await until(gate.runs)
        waiting = asyncio.create_task(thread.run(behind.work))
        await asyncio.sleep(0)
        closing = asyncio.create_task(asyncio.to_thread(thread.close))
        await until(thread._is_closed)
        gate.may_go_on.set()
        await closing
        with pytest.raises(RuntimeError):
            await task
        with pytest.raises(RuntimeError):
            await waiting
        assert (gate.num_slices, behind.num_slices) == (1, 0)
        with pytest.raises(RuntimeError):
            await thread.run(gate.work)

    in_thread(scenario)


def test_work_that_waits_for_something_else_is_our_bug():
    async def scenario(thread: DecodingThread) -> None:
        with pytest.raises(AssertionError, match="This is a bug"):
            await thread.run(lambda: asyncio.sleep(0))

    in_thread(scenario)


def test_the_thread_pauses_between_slices_of_long_work():
    """The clock is real here, so only that it pauses is asserted, with work that lasts until it has."""

    async def scenario() -> list[float]:
        pauses: list[float] = []
        thread = DecodingThread(pause=pauses.append)

        async def work() -> None:
            pace = Pace()
            while not pauses:
                await pace.give_way()

        try:
            await thread.run(work)
        finally:
            thread.close()
        return pauses

    assert len(asyncio.run(scenario())) == 1
