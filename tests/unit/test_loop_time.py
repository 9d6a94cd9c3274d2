"""LoopTick: many ask, it is done once, at the end of the loop's turn."""

import asyncio

from service.loop_time import LoopTick


def test_without_a_loop_the_work_runs_at_once():
    done = []
    turn = LoopTick(lambda: done.append("now"))
    turn.ask()
    turn.ask()
    assert done == ["now", "now"]


def test_all_requests_of_one_tick_run_the_work_once_before_later_events():
    async def story():
        order = []
        turn = LoopTick(lambda: order.append("turn"))
        turn.ask()
        asyncio.get_running_loop().call_soon(order.append, "later")
        turn.ask()
        assert order == []
        await asyncio.sleep(0)
        assert order == ["turn", "later"]
        turn.ask()
        await asyncio.sleep(0)
        assert order == ["turn", "later", "turn"]

    asyncio.run(story())


def test_work_that_requests_another_run_runs_again():
    async def story():
        order: list[int] = []

        def work():
            order.append(len(order))
            if len(order) < 3:
                turn.ask()

        turn = LoopTick(work)
        turn.ask()
        await asyncio.sleep(0)
        assert order == [0]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert order == [0, 1, 2]

    asyncio.run(story())


def test_a_loop_that_ended_first_does_not_block_later_work():
    done = []
    turn = LoopTick(lambda: done.append("done"))
    first = asyncio.new_event_loop()
    first.call_soon(turn.ask)
    first.call_soon(first.stop)
    first.run_forever()
    first.close()
    assert done == []

    async def story():
        turn.ask()
        await asyncio.sleep(0)

    asyncio.run(story())
    assert done == ["done"]
