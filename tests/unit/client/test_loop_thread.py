"""LoopThread: work that was accepted ends, whenever the thread is stopped."""

from __future__ import annotations

import asyncio
import threading

import pytest

from attention_client.sync_client import LoopThread


async def nothing() -> None:
    pass


def test_after_the_end_began_no_call_is_accepted():
    """A loop drops work submitted after its last iteration, so a caller would wait for it for ever."""
    told: list[RuntimeError] = []

    async def shut_down() -> None:
        with pytest.raises(RuntimeError, match="closed") as refused:
            thread.submit(nothing())
        told.append(refused.value)

    thread = LoopThread(shut_down)
    thread.stop()
    thread.stop()
    assert len(told) == 1
    with pytest.raises(RuntimeError, match="closed"):
        thread.submit(nothing())


def test_what_is_submitted_before_the_end_has_started_when_the_shut_down_runs():
    entered, goes_on, ends = threading.Event(), threading.Event(), asyncio.Event()
    num_started = 0

    async def hold() -> None:
        entered.set()
        goes_on.wait(20)

    async def wait_for_the_end() -> bool:
        nonlocal num_started
        num_started += 1
        return await ends.wait()

    async def shut_down() -> None:
        assert num_started == 3
        ends.set()

    thread = LoopThread(shut_down)
    thread.submit(hold())
    assert entered.wait(20)
    late = [thread.submit(wait_for_the_end()) for _ in range(3)]
    thread.stop(wait=False)
    goes_on.set()
    assert [work.result(20) for work in late] == [True] * 3


def test_a_shut_down_that_fails_ends_the_thread_and_is_reported_by_the_first_stop():
    async def shut_down() -> None:
        raise OSError("the transport is broken")

    thread = LoopThread(shut_down)
    with pytest.raises(OSError, match="the transport is broken"):
        thread.stop()
    thread.stop()
