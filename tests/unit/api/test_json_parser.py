"""Large JSON bodies are parsed by a process of their own, which may die at any moment."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.api.json_parser import COMMAND, JsonParser
from service.errors import BadJson, CostLimit, EngineFailed
from service.wire.number_list import NumberList
from tests.doubles import on_loop

LARGE = b'{"query":[' + b"0.5," * 300_000 + b'1],"encoding":"list"}'
SMALL = b'{"query":[[0.5]]}'
# A helper process that dies on every body.
KILLED = (sys.executable, "-c", "import socket; socket.socket(fileno=0).recv(1000)")


def story(
    check: Callable[[JsonParser], Awaitable[None]],
    command: tuple[str, ...] = COMMAND,
    numbers: int = 2**20,
) -> None:
    async def main() -> None:
        parser = JsonParser(32, numbers, command)
        try:
            await check(parser)
        finally:
            parser.close()

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what a thread does a moment later."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 (what is waited for is state, not an event)
            await asyncio.sleep(0.001)


def children() -> list[int]:
    """The child processes of every thread; a thread may end meanwhile."""
    found: list[str] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += (task / "children").read_text(encoding="ascii").split()
    return [int(name) for name in found]


def test_a_body_is_parsed_to_arrays_by_one_process_that_starts_with_the_first_body():
    async def check(parser: JsonParser) -> None:
        before = set(children())
        assert set(children()) == before
        assert (await parser.parse(SMALL))["query"].shape == (1, 1)
        found = await parser.parse(LARGE)
        assert isinstance(found["query"], NumberList)
        assert found["query"].values.shape == (300_001,)
        assert np.count_nonzero(found["query"].values == 0.5) == 300_000
        assert found["encoding"] == "list"
        assert len(set(children()) - before) == 1

    story(check)


@pytest.mark.parametrize(("body", "kind"), [(LARGE[:-1], BadJson), (LARGE.replace(b"0.5", b"[1]", 1), None)])
def test_the_helper_process_parses_as_the_loop_does(body, kind):
    async def check(parser: JsonParser) -> None:
        if kind is not None:
            with pytest.raises(kind):
                await parser.parse(body)
        else:
            assert (await parser.parse(body))["query"].fault.is_shape

    story(check)


def test_the_limit_of_numbers_is_the_setting():
    async def check(parser: JsonParser) -> None:
        with pytest.raises(CostLimit, match="1,000"):
            await parser.parse(LARGE)

    story(check, numbers=1000)


@pytest.mark.parametrize("numbers", [2**32, 10**30])
def test_the_limit_of_numbers_may_be_as_high_as_no_limit(numbers):
    async def check(parser: JsonParser) -> None:
        assert (await parser.parse(LARGE))["query"].values.shape == (300_001,)

    story(check, numbers=numbers)


def test_a_killed_helper_process_is_replaced_and_the_body_parsed_again():
    async def check(parser: JsonParser) -> None:
        before = set(children())
        await parser.parse(LARGE)
        for _ in range(2):
            (process,) = set(children()) - before
            os.kill(process, signal.SIGKILL)
            assert len(await parser.parse(LARGE)) == 2

    story(check)


def test_a_body_that_kills_the_helper_process_twice_is_an_internal_fault_and_the_next_is_parsed():
    async def check(parser: JsonParser) -> None:
        with pytest.raises(EngineFailed, match="twice"):
            await parser.parse(LARGE)

    story(check, KILLED)


def test_a_disconnect_disturbs_no_other_request():
    async def check(parser: JsonParser) -> None:
        leaving = asyncio.ensure_future(parser.parse(LARGE))
        staying = asyncio.ensure_future(parser.parse(LARGE.replace(b"list", b"base64")))
        await asyncio.sleep(0)
        leaving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await leaving
        assert (await staying)["encoding"] == "base64"
        assert (await parser.parse(LARGE))["encoding"] == "list"

    story(check)


class Counting(JsonParser):
    """A parser that counts its exchanges and holds them until they may go on."""

    def __init__(self) -> None:
        super().__init__(32, 2**20)
        self.num_exchanges = 0
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()

    def _ask(self, body):
        self.num_exchanges += 1
        self.has_begun.set()
        assert self.may_go_on.wait(10)
        return super()._ask(body)


def test_a_body_that_waits_is_dropped_when_its_caller_leaves_and_one_that_is_parsed_is_reported():
    async def main() -> None:
        parser = Counting()
        left: list[asyncio.Future[Any]] = []
        leaving = [asyncio.ensure_future(parser.parse(SMALL, left.append)) for _ in range(12)]
        await asyncio.to_thread(parser.has_begun.wait, 10)
        for task in leaving:
            task.cancel()
        await asyncio.wait(leaving)
        (exchange,) = left
        assert not exchange.done()
        parser.may_go_on.set()
        assert (await parser.parse(SMALL))["query"].shape == (1, 1)
        assert exchange.done()
        assert parser.num_exchanges == 2
        parser.close()

    asyncio.run(main())


def test_the_parser_keeps_no_answer_when_its_caller_has_left():
    def held() -> int:
        return sum(view.nbytes for view in gc.get_objects() if type(view) is memoryview and view.nbytes > 2**20)

    async def check(parser: JsonParser) -> None:
        gc.collect()
        before = held()  # by other tests
        document = await parser.parse(LARGE)
        assert held() > before + 2**20
        del document
        await until(lambda: held() <= before)

    story(check)


def test_the_end_of_the_parser_ends_an_exchange_and_starts_no_process():
    async def check(parser: JsonParser) -> None:
        before = set(children())
        parsing = asyncio.ensure_future(parser.parse(LARGE))
        await until(lambda: set(children()) != before)
        parser.close()
        with pytest.raises(EngineFailed):
            await parsing
        assert set(children()) == before

    story(check, (sys.executable, "-c", "import time; time.sleep(60)"))


@on_loop
async def test_an_exchange_that_fails_after_its_caller_has_left_is_no_line_in_the_log():
    parser = Counting()
    left: list[asyncio.Future[Any]] = []
    leaving = asyncio.ensure_future(parser.parse(SMALL, left.append))
    await asyncio.to_thread(parser.has_begun.wait, 10)
    leaving.cancel()
    await asyncio.wait([leaving])
    parser._command = KILLED
    parser.may_go_on.set()
    await asyncio.wait(left)
    left.clear()
    gc.collect()  # of a future whose error nobody has looked at the loop complains
    parser.close()


class Body(bytearray):
    """A body that a weak reference can follow."""


def test_a_body_that_kills_the_helper_process_twice_leaves_the_memory_without_a_collection():
    async def check(parser: JsonParser) -> None:
        body = Body(LARGE)
        kept = weakref.ref(body)
        # Not `pytest.raises`, which keeps the error and so the body.
        with contextlib.suppress(EngineFailed):
            await parser.parse(body)
        del body
        await until(lambda: kept() is None)

    gc.disable()
    try:
        story(check, KILLED)
    finally:
        gc.enable()


def test_the_helper_process_ends_with_its_worker_and_holds_none_of_its_descriptors():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(COMMAND, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert process.wait(20) == 0


def test_the_process_imports_no_torch():
    program = "import sys; import service.wire.json_process; print('torch' in sys.modules)"
    check = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert check.stdout == "False\n"
