"""In-flight calls: each ends within its limit, or all at once; a call from another event loop is refused."""

import asyncio

import pytest

from attention_client.errors import ConnectionFailed
from attention_client.in_flight import InFlight
from tests.doubles import run, turns


async def hang(calls: InFlight, timeout_s: float | None = None) -> None:
    async with calls.within(timeout_s):
        await asyncio.Event().wait()


def test_ending_ends_every_call_and_waits_until_none_is_left():
    async def main() -> None:
        calls = InFlight()
        hanging = [asyncio.ensure_future(hang(calls, timeout_s)) for timeout_s in (None, 60.0)]
        await turns()
        await asyncio.gather(calls.end(), calls.end())
        assert all(task.done() for task in hanging)
        for task in hanging:
            with pytest.raises(ConnectionFailed, match="closed"):
                await task
        with pytest.raises(RuntimeError, match="closed"):
            await hang(calls)
        await calls.end()

    run(main)


def test_a_call_that_is_over_is_not_ended():
    async def main() -> None:
        calls = InFlight()
        async with calls.within(None):
            pass
        with pytest.raises(TimeoutError):
            await hang(calls, 0.001)
        await calls.end()
        await asyncio.sleep(0)

    run(main)


def test_a_call_cancelled_while_all_end_is_cancelled():
    async def main() -> None:
        calls = InFlight()
        task = asyncio.ensure_future(hang(calls))
        await turns()
        task.cancel()
        await calls.end()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main)


def test_another_loop_is_told_so():
    calls = InFlight()
    run(lambda: use(calls))
    with pytest.raises(RuntimeError, match="one for each loop"):
        run(lambda: use(calls))
    with pytest.raises(RuntimeError, match="one for each loop"):
        run(calls.end)


async def use(calls: InFlight) -> None:
    async with calls.within(None):
        pass
