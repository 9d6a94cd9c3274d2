"""Eight ways a batcher dies, each seen in a well-known server, and that ours does not."""

from __future__ import annotations

import asyncio

import pytest

from service.errors import EngineDown, EngineFailed, QueueFull
from tests.doubles import on_loop, turns
from tests.unit.batching.room import Room, cost_of, error_of, in_room, result_of


async def answers(room, payload):
    """Whether the room still serves."""
    room.engine.open()
    client = room.send(payload)
    await turns()
    return result_of(client) == ("answer", payload)


@in_room()
async def test_death_1_a_result_for_a_cancelled_client_does_not_kill_the_loop(room: Room):
    """Ray Serve #41057: set_result on a cancelled future, and everyone after hangs."""
    clients = await room.send_running("leaves", "stays")
    room.engine.release()
    clients[0].cancel()  # after the engine's word, before it is given out
    await turns()
    assert clients[0].cancelled()
    assert result_of(clients[1]) == ("answer", "stays")
    assert await answers(room, "next")


@pytest.mark.parametrize("num_turns", range(12))
@in_room(max_requests=2)
async def test_death_2_a_cancellation_at_any_moment_leaves_nothing_behind(room: Room, num_turns):
    """Ray Serve #50046, httpcore #1093: the unlucky moment is found by trying them all; the room checks itself."""
    room.engine.is_open = num_turns % 2 == 0
    clients = [room.send(number) for number in range(5)]
    await turns(num_turns)
    for client in clients[1::2]:
        client.cancel()
    await turns(1)
    room.engine.open()
    await turns(30)
    assert all(client.done() for client in clients)
    assert [result_of(client) for client in clients[::2]] == [("answer", 0), ("answer", 2), ("answer", 4)]
    room.check_empty()


@pytest.mark.parametrize(
    "error", [RuntimeError("a bug"), StopIteration(), asyncio.CancelledError("not ours")], ids=repr
)
@in_room()
async def test_death_3_an_exception_outside_the_try_fails_every_job_and_readiness(room: Room, error, monkeypatch):
    """Ray Serve #66140, infinity #668: the worker ended and health stayed green."""
    clients = [*await room.send_running("r"), *await room.send_waiting("w")]

    def broken(*_):
        raise error

    monkeypatch.setattr("service.batching.runner.failure_of", broken)
    room.engine.release()
    await turns()
    assert [type(error_of(client)) for client in clients] == [EngineDown, EngineDown]
    assert not room.batcher.is_alive
    with pytest.raises(EngineDown):
        room.batcher.admit("late", "a", cost_of(), room.clock.now() + 1)


@in_room(max_tokens=50)
async def test_death_4_a_job_larger_than_a_batch_neither_loops_nor_blocks(room: Room):
    """TEI #723, vLLM #1534: larger than the budget, it stays the head of the queue for ever."""
    await room.send_running("first")
    large = room.send("larger than a batch", cost=cost_of(tokens=500))
    after = room.send("after")
    await turns()
    room.engine.open()
    await turns()
    assert result_of(large) == ("answer", "larger than a batch")
    assert result_of(after) == ("answer", "after")
    assert room.engine.batches == [["first"], ["larger than a batch"], ["after"]]


@in_room(capacity=3)
async def test_death_5_a_full_queue_is_an_ordinary_refusal_checked_where_the_job_is_appended(room: Room):
    """TEI #470: a full queue was a panic; infinity: checked in the route, appended unchecked later."""
    await room.send_running("r")
    for number in range(3):  # no await between: the check must see the append before it
        room.batcher.admit(number, "a", cost_of(), room.clock.now() + 9)
    with pytest.raises(QueueFull):
        room.batcher.admit(3, "a", cost_of(), room.clock.now() + 9)
    assert room.batcher.num_queued == 3
    room.engine.open()
    await turns()
    assert await answers(room, "next")


@on_loop
async def test_death_6_a_disconnected_client_leaves_no_entry_in_any_table():
    """LitServe #452, mosec #262: a table of waiters that only an answer empties."""

    def sizes(room):
        """Everything in the batcher that has a length, and in its queues."""
        owners = [room.batcher]
        for dispatcher in room.batcher._dispatchers:
            owners += [dispatcher, dispatcher.runner, dispatcher.queue.lanes, dispatcher.queue.congestion]
        things = [(i, name, thing) for i, owner in enumerate(owners) for name, thing in vars(owner).items()]
        return {(i, name): len(thing) for i, name, thing in things if hasattr(thing, "__len__")}

    async with Room(capacity=1000) as room:
        assert await answers(room, "first")
        room.engine.is_open = False
        before = sizes(room)
        assert before
        for _ in range(5):
            await room.send_running("r")
            clients = await room.send_waiting(*range(50))
            clients += [room.send(number, f"lane {number}") for number in range(50)]
            await turns()
            for client in clients:
                client.cancel()
            await turns()
            room.engine.release()
            await turns()
            assert sizes(room) == before
            assert room.clock.num_calls == 0


@in_room()
async def test_death_7_one_bad_job_does_not_fail_the_others_of_its_batch(room: Room):
    """mosec, LitServe: the whole batch gets one member's error. (Faults of one request are found before the queue.)"""
    room.engine.bad = {2: ValueError("bad"), 6: ValueError("bad too")}
    clients = await room.send_running(*range(8))
    room.engine.open()
    await turns(40)
    assert [error_of(client) is None for client in clients] == [number not in (2, 6) for number in range(8)]
    assert isinstance(error_of(clients[2]), EngineFailed)
    assert isinstance(error_of(clients[6]), EngineFailed)


@in_room()
async def test_death_8_a_job_records_its_own_times_and_each_event_is_emitted_once(room: Room):
    """TEI: a counter incremented twice, the wait computed by subtraction."""
    first = room.send("x")
    await turns()
    room.clock.advance(1)
    second = room.send("y")
    await turns()
    room.clock.advance(2)
    room.engine.release()
    await turns()
    room.clock.advance(4)
    room.engine.release()
    await turns()
    times = [(client.result().queue_s, client.result().compute_s) for client in (first, second)]
    assert times == [(0, 3), (2, 4)]
    assert [(done.batch.requests, done.compute_s) for done in room.heard.batches] == [(1, 3), (1, 4)]
    assert room.heard.queue == [(1, 8), (0, 0), (1, 8), (0, 0)]
