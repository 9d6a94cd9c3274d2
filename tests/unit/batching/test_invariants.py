"""The seven invariants of the batcher, each a test of its name."""

from __future__ import annotations

import asyncio

import pytest

from service.errors import (
    CostLimit,
    DeadlineExceeded,
    Draining,
    EngineDown,
    EngineFailed,
    QueueFull,
)
from tests.doubles import turns
from tests.unit.batching.room import Room, cost_of, ended, error_of, in_room, result_of


@in_room()
async def test_every_admitted_job_is_settled_exactly_once(room: Room):
    """Answered, failed, expired, cancelled, drained: each client hears once, and late results go nowhere."""
    room.engine.bad["bad"] = ValueError("x")
    running = await room.send_running("answered", "bad", "expires", "cancelled")
    late = room.send("drained")
    await turns()
    running[3].cancel()
    await turns()
    room.engine.release()
    await turns()
    while room.engine.is_busy and room.engine.batches[-1] != ["expires"]:
        room.engine.release()
        await turns()
    room.clock.advance(60)
    await turns()
    assert await room.batcher.drain(0.0) == 0
    assert [type(error_of(client)) for client in [*running, late]] == [
        type(None),
        EngineFailed,
        DeadlineExceeded,
        asyncio.CancelledError,
        DeadlineExceeded,
    ]
    room.engine.release()  # of the expired one
    await turns()


@pytest.mark.parametrize("stage", ["in the same turn", "queued", "running"])
@in_room()
async def test_a_cancelled_client_never_affects_other_jobs(room: Room, stage):
    if stage != "running":
        await room.send_running("first")
    clients = [room.send(number) for number in range(8)]
    if stage != "in the same turn":
        await turns()
    clients[3].cancel()
    await turns()
    room.engine.open()
    await turns()
    assert isinstance(error_of(clients[3]), asyncio.CancelledError)
    assert [result_of(client) for client in clients if client is not clients[3]] == [
        ("answer", number) for number in range(8) if number != 3
    ]
    assert (3 in room.engine.executed) == (stage == "running"), "what waits and is cancelled is never executed"


@in_room(max_bytes=80, max_tokens=20)
async def test_nothing_is_admitted_that_could_never_run(room: Room):
    room.engine.open()
    fits = cost_of(tokens=50, input_bytes=80)
    assert result_of(await ended(room.send("fits", cost=fits))) == ("answer", "fits"), "though it fills a batch"
    error = error_of(await ended(room.send("over", cost=fits._replace(input_bytes=81))))
    assert isinstance(error, CostLimit)
    assert "needs 81 bytes of decoded tensors (ATTENTION_QUEUE_BYTES), expected at most 80;" in error.message
    assert room.engine.executed == ["fits"]


@in_room(capacity=5)
async def test_no_await_separates_check_and_append(room: Room):
    """A burst in one turn never overfills the queue, and the whole of it may fill it."""
    clients = [room.send(number) for number in range(9)]
    await turns()
    refused = [client for client in clients if client.done()]
    assert [type(error_of(client)) for client in refused] == [QueueFull] * 4
    assert max(num_jobs for num_jobs, _ in room.heard.queue) == 5
    room.engine.open()
    await turns()
    assert sum(error_of(client) is None for client in clients) == 5


@pytest.mark.parametrize("how", ["engine says so", "the loop has a bug", "cancelled from outside"])
@in_room()
async def test_if_the_loop_dies_every_job_fails_and_the_service_is_not_ready(room: Room, how, monkeypatch):
    clients = [*await room.send_running("r0", "r1"), *await room.send_waiting("w0", "w1", lane="b")]
    if how == "engine says so":
        room.engine.die()
    elif how == "the loop has a bug":
        monkeypatch.setattr(room.heard, "batch_done", lambda *_: 1 / 0)
        monkeypatch.setattr("service.batching.job.Job.settle", lambda *_: False)
        room.engine.release()
    else:
        next(task for task in asyncio.all_tasks() if task.get_name() == "batcher").cancel()
    await turns()
    assert [type(error_of(client)) for client in clients] == [EngineDown] * 4
    assert len({id(error_of(client)) for client in clients}) == 4, "each has an error of its own"
    assert not room.batcher.is_alive
    assert isinstance(error_of(await ended(room.send("late"))), EngineDown)
    assert [death.num_jobs for death in room.heard.deaths] == [4]
    assert await room.batcher.drain(10) == 0, "a dead room has nothing to wait for"


@in_room(max_requests=2)
async def test_draining_admits_nothing_and_settles_everything_before_its_deadline(room: Room):
    clients = [*await room.send_running("r"), *await room.send_waiting("w0", "w1", "w2")]
    drain = asyncio.create_task(room.batcher.drain(30))
    await turns()
    assert room.batcher.is_draining
    assert isinstance(error_of(await ended(room.send("late"))), Draining)
    for _ in range(3):
        assert not drain.done()
        room.engine.release()
        await turns()
    assert drain.result() == 0
    assert [error_of(client) for client in clients] == [None] * 4
    assert room.engine.executed == ["r", "w0", "w1", "w2"]


@in_room(max_requests=4)
async def test_arrival_order_within_a_lane_and_no_lane_starves(room: Room):
    await room.send_running("first")
    await room.send_waiting(*range(20), lane="stream")
    odd = (await room.send_waiting("odd", lane="odd"))[0]
    room.engine.release()
    await turns()
    room.engine.release()
    await turns()
    room.engine.release()
    await turns()
    assert odd.done(), "it waits for at most one batch of the stream"
    room.engine.open()
    await turns(40)
    assert [payload for payload in room.engine.executed if isinstance(payload, int)] == list(range(20))


@in_room()
async def test_shares_start_afresh_after_the_batcher_was_empty(room: Room):
    await room.send_running("much work", lane="heavy")
    room.engine.release()
    await turns()
    await room.send_running("x", lane="other")
    await room.send_waiting("came first", lane="heavy")
    await room.send_waiting("came second", lane="light")
    room.engine.release()
    await turns()
    assert room.engine.batches[-1] == ["came first"]
