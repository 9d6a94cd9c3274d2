"""The real clock calls back on the loop, never early, and not at all once cancelled."""

from __future__ import annotations

import asyncio
import time

import pytest
import uvloop

from service.loop_time import LoopClock, _Call
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


def test_a_call_the_loop_makes_early_is_scheduled_again_and_made_once():
    async def main():
        clock, called = LoopClock(), []
        far = _Call(asyncio.get_running_loop(), clock.now() + 3600, lambda: pytest.fail("early"))
        far._fire()
        far.cancel()
        due = _Call(asyncio.get_running_loop(), clock.now(), lambda: called.append(1))
        due._fire()
        due._fire()
        assert called == [1]
        due.cancel()

    run(main)
