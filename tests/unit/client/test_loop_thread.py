"""LoopThread: submitted work ends, whenever the thread is stopped."""

from __future__ import annotations

import asyncio
import threading

import pytest

from attention_client.errors import ConnectionFailed
from attention_client.loop_thread import LoopThread


async def nothing() -> None:
    pass


async def for_ever() -> None:
    await asyncio.Event().wait()


def test_once_the_end_has_begun_nothing_is_taken_any_more():
    """A loop drops work submitted after its last iteration, so a caller would wait for it for ever."""
    told: list[RuntimeError] = []

    async def farewell() -> None:
        with pytest.raises(RuntimeError, match="closed") as refused:
            thread.submit(for_ever())
        told.append(refused.value)

    thread = LoopThread(farewell)
    thread.stop()
    assert len(told) == 1
    with pytest.raises(RuntimeError, match="closed"):
        thread.submit(for_ever())


def test_what_is_submitted_in_the_turn_of_the_end_is_told_so():
    entered, goes_on = threading.Event(), threading.Event()

    async def hold() -> None:
        entered.set()
        goes_on.wait(20)

    thread = LoopThread(nothing)
    held = thread.submit(hold())
    assert entered.wait(20)
    thread.stop(wait=False)
    late = [thread.submit(for_ever()) for _ in range(3)]
    goes_on.set()
    for work in late:
        with pytest.raises(ConnectionFailed, match="closed"):
            work.result()
    held.result()
