"""An exchange between its body and its batch: where it is decoded, and who is told what while it waits for that."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from service.api.asgi import ClientGone
from service.api.exchange import Exchange
from service.api.reception import Reception
from service.api.trace import start_trace
from service.attention.call import Call
from service.batching.decoding_queue import DecodingQueue
from service.batching.job import NOTHING
from service.errors import BadJson, CostLimit, DeadlineExceeded, Draining, InvalidInput, QueueFull
from service.limits import exchange_limits
from service.settings import load_settings
from service.wire.decoding_thread import DecodingThread
from service.wire.pace import Pace
from service.wire.request import CheckedRequest
from service.wire.tensors import TensorForm
from tests.doubles import ManualClock

OFF_LOOP = 100
INTAKE = 10_000


class House:
    """A reception with a real decoding thread and nothing else, and the exchanges of callers who send `body`."""

    def __init__(self, **changes: Any) -> None:
        settings = load_settings(decode_off_loop_bytes=OFF_LOOP, queue_bytes=1024, **changes)
        limits = dataclasses.replace(exchange_limits(settings), intake_bytes=INTAKE, answer_bytes=INTAKE)
        self.decoding = DecodingThread(pause=lambda _: None)
        self.clock = ManualClock()
        nothing: Any = None
        self.bodies = DecodingQueue(self.clock, standing_wait_s=0.1)
        self.reception = Reception(lambda: nothing, nothing, self.decoding, self.bodies, limits, self.clock.now)

    async def exchange(self, num_bytes: int, **headers: str) -> tuple[Exchange, asyncio.Queue[dict[str, Any]]]:
        """One whose body has been read, and the connection that it came over."""
        messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        messages.put_nowait({"type": "http.request", "body": b"x" * num_bytes})
        named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/", "headers": named}
        start_trace(scope, self.clock.now())
        found = self.reception.open(scope, messages.get)
        await found.read((b"gzip",), is_binary=True)
        return found, messages


class Held:
    """Work that holds the decoding thread until it is let go, and then gives way once."""

    def __init__(self) -> None:
        self.runs = threading.Event()
        self.may_go_on = threading.Event()
        self.has_finished = False

    async def work(self) -> None:
        self.runs.set()
        assert self.may_go_on.wait(10)
        await Pace().give_way()
        self.has_finished = True


def story(told: Callable[[House], Awaitable[None]], **changes: Any) -> None:
    async def main() -> None:
        house = House(**changes)
        try:
            await told(house)
        finally:
            await asyncio.to_thread(house.decoding.close)

    asyncio.run(main())


async def where() -> str:
    return threading.current_thread().name


@pytest.mark.parametrize(
    ("num_bytes", "thread"), [(0, "Main"), (OFF_LOOP - 1, "Main"), (OFF_LOOP, "decoding"), (OFF_LOOP * 9, "decoding")]
)
def test_a_body_is_decoded_off_the_loop_from_a_size_on(num_bytes, thread):
    async def told(house: House) -> None:
        exchange, _ = await house.exchange(num_bytes)
        assert (await exchange.decoded(where)).startswith(thread)

    story(told)


@pytest.mark.parametrize("asked", [{}, {"x_request_timeout_ms": "2"}], ids=["ours", "the caller's"])
def test_a_deadline_that_passes_while_others_are_decoded_is_told(asked):
    async def told(house: House) -> None:
        held = Held()
        first, _ = await house.exchange(OFF_LOOP)
        decoding = asyncio.ensure_future(first.decoded(held.work))
        await asyncio.to_thread(held.runs.wait)
        late, _ = await house.exchange(OFF_LOOP, **asked)
        with pytest.raises(DeadlineExceeded, match="waited to be decoded"):
            await late.decoded(where)
        held.may_go_on.set()
        await asyncio.gather(decoding, return_exceptions=True)

    story(told, request_timeout_ms=10_000 if asked else 5)


def test_a_caller_who_leaves_while_he_is_decoded_stops_it():
    async def told(house: House) -> None:
        held = Held()
        exchange, messages = await house.exchange(OFF_LOOP)

        async def serve() -> None:
            with exchange.watched():
                await exchange.decoded(held.work)

        serving = asyncio.ensure_future(serve())
        await asyncio.to_thread(held.runs.wait)
        messages.put_nowait({"type": "http.disconnect"})
        with pytest.raises(ClientGone):
            await serving
        held.may_go_on.set()
        after, _ = await house.exchange(OFF_LOOP)
        await after.decoded(where)
        assert not held.has_finished

    story(told)


def test_bytes_of_bodies_are_given_back_when_they_are_decoded_and_when_the_request_ends():
    async def told(house: House) -> None:
        intake = house.reception.intake
        decoded, _ = await house.exchange(OFF_LOOP)
        refused, _ = await house.exchange(OFF_LOOP - 1)
        assert intake.num_bytes == 2 * OFF_LOOP - 1
        with pytest.raises(QueueFull, match="no room for one of this size"):
            await house.exchange(INTAKE - 2 * OFF_LOOP + 2)
        await decoded.decoded(where)
        assert intake.num_bytes == OFF_LOOP - 1

        async def wrong() -> None:
            raise BadJson("it is")

        with pytest.raises(BadJson), refused:
            await refused.decoded(wrong)
        assert intake.num_bytes == 0

    story(told)


def test_an_answer_for_which_there_will_never_be_room_is_too_much_to_ask():
    async def told(house: House) -> None:
        exchange, _ = await house.exchange(OFF_LOOP)
        await exchange.decoded(where)
        layer: Any = SimpleNamespace(name="wide", spec=SimpleNamespace(out_width=INTAKE))
        call = Call("wide", torch.zeros(1, 1, 1))
        with pytest.raises(CostLimit, match="40,000 bytes, at most 5,000"):
            await exchange.ask(layer, CheckedRequest(call, NOTHING, 0, is_batch=False, form=TensorForm.BINARY))
        assert house.reception.answers.num_bytes == 0

    story(told)


def test_once_closed_nothing_comes_in_and_what_has_come_in_goes_on():
    async def told(house: House) -> None:
        exchange, _ = await house.exchange(OFF_LOOP)
        house.reception.close()
        with pytest.raises(Draining):
            await house.exchange(OFF_LOOP)
        assert (await exchange.decoded(where)).startswith("decoding")

    story(told)


@pytest.mark.parametrize("value", ["0", "000", "-1", "1.5", "", "x", "1e3", "²"])
def test_a_deadline_that_is_none_is_refused(value):
    async def told(house: House) -> None:
        with pytest.raises(InvalidInput, match="whole number of milliseconds"):
            await house.exchange(OFF_LOOP, x_request_timeout_ms=value)

    story(told)


@pytest.mark.parametrize("value", ["1" * 12, "9" * 400, "0" * 400 + "1"])
def test_a_deadline_of_many_digits_does_no_harm(value):
    async def told(house: House) -> None:
        exchange, _ = await house.exchange(1, x_request_timeout_ms=value)
        assert await exchange.decoded(where)

    story(told)


def test_when_the_grace_is_over_whoever_is_not_yet_in_the_queue_is_told_so():
    """L6 Where his body is still arriving, and where it waits to be decoded."""

    async def told(house: House) -> None:
        held = Held()
        first, _ = await house.exchange(OFF_LOOP)
        second, _ = await house.exchange(OFF_LOOP)

        async def decode(exchange: Exchange, work: Any) -> None:
            with exchange, exchange.watched():
                await exchange.decoded(work)

        tasks = [asyncio.ensure_future(decode(first, held.work)), asyncio.ensure_future(decode(second, where))]
        await asyncio.to_thread(held.runs.wait)
        house.reception.settle()
        for task in tasks:
            with pytest.raises(Draining, match="shut down before"):
                await task
        held.may_go_on.set()
        assert house.reception.intake.num_bytes == 0

    story(told)
