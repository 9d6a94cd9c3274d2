"""The real clock calls back on the loop, never early, and not at all once cancelled."""

from __future__ import annotations

import asyncio
import time

import pytest
import uvloop

from service.loop_time import LoopClock
from tests.doubles import run

LOOPS = [pytest.param(asyncio.new_event_loop, id="asyncio"), pytest.param(uvloop.new_event_loop, id="uvloop")]


@pytest.mark.parametrize("loop_factory", LOOPS)
@pytest.mark.parametrize("delay_s", [-1.0, 0.0, 0.0004, 0.0011, 0.0029])
def test_a_call_is_made_and_never_early(loop_factory, delay_s):
    async def main():
        clock = LoopClock()
        called: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        when = clock.now() + delay_s
        clock.call_at(when, lambda: called.set_result(clock.now()))
        assert await asyncio.wait_for(called, 10) >= when

    run(main, loop_factory=loop_factory)


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_a_cancelled_call_is_never_made_and_cancelling_again_is_harmless(loop_factory):
    async def main():
        clock, later = LoopClock(), asyncio.Event()
        handle = clock.call_at(clock.now(), lambda: pytest.fail("called"))
        handle.cancel()
        handle.cancel()
        last = clock.call_at(clock.now() + 0.002, later.set)
        await asyncio.wait_for(later.wait(), 10)
        last.cancel()

    run(main, loop_factory=loop_factory)


def test_time_is_finer_than_a_millisecond_on_uvloop():
    async def main():
        clock = LoopClock()
        assert time.monotonic() - 1 < clock.now() <= time.monotonic()
        assert len({clock.now() for _ in range(100)}) > 50

    run(main, loop_factory=uvloop.new_event_loop)


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_no_call_is_early_after_a_long_tick(loop_factory):
    """uvloop's time is that of the tick's begin, in whole milliseconds."""

    async def main():
        clock = LoopClock()
        for number in range(50):
            time.sleep(0.003 + 0.0001 * (number % 7))  # noqa: ASYNC251 (the tick that takes long)
            called: asyncio.Future[float] = asyncio.get_running_loop().create_future()
            when = clock.now() + 0.0005 * (number % 4)
            clock.call_at(when, lambda called=called: called.set_result(clock.now()))  # type: ignore[misc]
            assert await asyncio.wait_for(called, 10) >= when

    run(main, loop_factory=loop_factory)
