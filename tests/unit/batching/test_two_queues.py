"""Long requests wait in a queue of their own and compute beside the short ones: which are long, and what both queues share."""

from __future__ import annotations

import asyncio

import pytest

from service.batching.runner import MAX_SEQUENCES
from service.errors import CostLimit, DeadlineExceeded, EngineDown, EngineFailed, QueueFull
from tests.doubles import turns
from tests.unit.batching.room import Room, cost_of, ended, error_of, in_room, result_of

RATE = 1000.0  # flops per second of the self-check: with `long_s` of a second, requests of more flops are long
SHORT, LONG = cost_of(flops=1000), cost_of(flops=5000)


async def whale(room: Room, payload: str = "whale", **options) -> asyncio.Task:
    """A long request on the engine's thread of long batches."""
    room.engine.first_rate = RATE
    client = room.send(payload, "deep", cost=LONG, **options)
    await turns()
    assert room.engine.held[True].batch == [payload]
    return client


@in_room(long_s=1.0)
async def test_short_requests_are_answered_beside_a_long_one(room: Room):
    long = await whale(room)
    for number in range(3):
        client = room.send(number, "shallow", cost=SHORT)
        await turns()
        assert room.batcher.num_running == 2
        room.engine.release()
        assert result_of(await ended(client)) == ("answer", number)
    assert not long.done()
    room.engine.release(is_long=True)
    assert result_of(await ended(long)) == ("answer", "whale")


@pytest.mark.parametrize(
    ("first_rate", "cost", "is_long"),
    [
        (RATE, cost_of(flops=1000), False),
        (RATE, cost_of(flops=1001), True),
        (0.0, cost_of(flops=1), True),
        (RATE, cost_of(flops=1, sequences=MAX_SEQUENCES + 1), True),
    ],
    ids=["short", "long", "the first in its dtype", "many sequences"],
)
@in_room(long_s=1.0)
async def test_a_request_is_long_if_it_may_take_longer_than_a_short_batch_may(room, first_rate, cost, is_long):
    room.engine.first_rate = first_rate
    room.send("x", cost=cost)
    await turns()
    assert room.engine.long_flags == [is_long]


@pytest.mark.parametrize(("flops", "is_long"), [(100, False), (101, True)])
@in_room(long_s=1.0)
async def test_the_rate_of_the_lane_decides_once_it_is_known(room: Room, flops, is_long):
    room.engine.first_rate = RATE
    await room.send_running("known")
    room.engine.held[False].progress.seconds = 10.0  # of the processor; 1000 flops
    room.engine.release()
    await turns()
    room.send("x", cost=cost_of(flops=flops))
    await turns()
    assert room.engine.long_flags == [False, is_long]


@in_room()
async def test_no_request_is_long_if_the_engine_has_one_thread(room: Room):
    room.send("x", cost=cost_of(flops=10**15, sequences=1000))
    await turns()
    assert room.engine.long_flags == [False]


@in_room(long_s=1.0)
async def test_a_batch_of_short_requests_stays_short(room: Room):
    room.engine.first_rate = RATE
    await room.send_running("known")
    room.clock.advance(1.0)
    room.engine.release()
    await turns()
    await room.send_running("first")
    for number in range(4):
        room.send(number, cost=cost_of(flops=400))
    await turns()
    room.clock.advance(1.0)
    room.engine.open()
    await turns()
    assert room.engine.batches[2:] == [[0, 1], [2, 3]]


@in_room(long_s=1.0)
async def test_long_batches_run_one_at_a_time_and_no_lane_of_them_starves(room: Room):
    await whale(room)
    for number in range(3):
        room.send(("deep", number), "deep", cost=cost_of(flops=5000, sequences=MAX_SEQUENCES + 1))
        room.send(("deeper", number), "deeper", cost=LONG)
    await turns()
    assert room.engine.batches == [["whale"]]
    room.engine.open()
    await turns(60)
    assert {payload[0] for payload in room.engine.batches[1] + room.engine.batches[2]} == {"deep", "deeper"}


@pytest.mark.parametrize("how", ["leaves", "deadline", "shutdown"])
@in_room(long_s=1.0)
async def test_a_batch_stops_when_no_caller_waits_for_it_any_more(room: Room, how):
    long = await whale(room, timeout_s=30.0)
    progress = room.engine.held[True].progress
    await turns()
    assert not progress.is_stopped
    if how == "leaves":
        long.cancel()
    elif how == "deadline":
        room.clock.advance(30.0)
    else:
        await room.batcher.drain(0.0)
    await turns()
    assert progress.is_stopped
    if how == "deadline":
        assert isinstance(error_of(long), DeadlineExceeded)
    room.engine.fail(ValueError("stopped"), is_long=True)
    await turns()
    assert (room.heard.retries, room.heard.splits, room.heard.deaths) == ([], [], [])


@in_room(long_s=1.0, max_requests=2)
async def test_a_batch_with_one_caller_left_does_not_stop(room: Room):
    clients = await room.send_running("x", "y")
    clients[0].cancel()
    await turns()
    assert not room.engine.held[True].progress.is_stopped
    room.engine.release(is_long=True)
    assert result_of(await ended(clients[1])) == ("answer", "y")


@in_room(long_s=1.0, max_compute_s=10.0)
async def test_only_a_batch_without_progress_means_the_engine_is_down(room: Room):
    long = await whale(room)
    progress = room.engine.held[True].progress
    for _ in range(10):
        progress.num_points += 1
        room.clock.advance(8.0)
        await turns()
    assert not isinstance(long.done() and error_of(long), EngineDown)
    short = room.send("short", cost=SHORT)
    await turns()
    room.clock.advance(10.0)
    await turns()
    assert isinstance(error_of(short), EngineDown)
    assert not room.batcher.is_alive


@pytest.mark.parametrize("is_long", [False, True])
@in_room(long_s=1.0)
async def test_an_engine_that_dies_on_one_thread_fails_the_jobs_of_both(room: Room, is_long):
    clients = [await whale(room), room.send("x", cost=SHORT), room.send("y", cost=SHORT), room.send("z", cost=LONG)]
    await turns()
    room.engine.die(is_long=is_long)
    await turns()
    assert [type(error_of(client)) for client in clients] == [EngineDown] * 4
    assert [death.num_jobs for death in room.heard.deaths] == [4]


@in_room(long_s=1.0)
async def test_a_failure_on_one_thread_does_not_affect_the_other(room: Room):
    long, short = await whale(room), room.send("x", cost=SHORT)
    await turns()
    room.engine.fail(ValueError("a secret"))
    assert isinstance(error_of(await ended(short)), EngineFailed)
    room.engine.release(is_long=True)
    assert result_of(await ended(long)) == ("answer", "whale")


@in_room(long_s=1.0)
async def test_a_short_batch_that_runs_out_of_memory_beside_a_long_one_runs_after_it_and_before_the_next(room: Room):
    """P5: two of them beside a long one are more than there is room for, and neither is at fault."""
    await whale(room)
    later = room.send("later", "deep", cost=LONG)
    short = [room.send(number, cost=SHORT._replace(flops=SHORT.flops // 2)) for number in range(2)]
    await turns()
    room.engine.fail(CostLimit("beside the long one"))
    await turns()
    assert not room.engine.is_held()
    room.engine.release(is_long=True)
    await turns()
    assert room.engine.in_hand == [0, 1]
    assert not room.engine.is_held(is_long=True)
    room.engine.release()
    assert [result_of(await ended(client)) for client in short] == [("answer", 0), ("answer", 1)]
    assert room.heard.splits == []
    assert room.engine.held[True].batch == ["later"]
    assert not later.done()


@in_room(long_s=1.0)
async def test_alone_too_a_batch_that_is_too_large_is_split_and_its_culprit_fails(room: Room):
    await whale(room)
    short = [room.send(number, cost=SHORT) for number in range(2)]
    await turns()
    room.engine.bad[1] = CostLimit("too much, even alone")
    room.engine.release()
    await turns()
    room.engine.open()
    await turns(40)
    assert [type(error_of(client)) for client in short] == [type(None), CostLimit]


# Limits that hold for both queues together


@in_room(long_s=1.0, capacity=3)
async def test_the_capacity_is_that_of_both_queues(room: Room):
    await whale(room)
    room.send("running", cost=SHORT)
    await turns()
    waiting = [room.send(0, cost=SHORT), room.send(1, cost=LONG), room.send(2, cost=SHORT)]
    await turns()
    assert room.batcher.num_queued == 3
    for cost in (SHORT, LONG):
        assert isinstance(error_of(await ended(room.send("over", cost=cost))), QueueFull)
    assert not any(client.done() for client in waiting)


@in_room(long_s=1.0, max_bytes=100)
async def test_the_bytes_are_those_of_both_queues(room: Room):
    await whale(room)
    room.send("running", cost=SHORT)
    await turns()
    for cost in (SHORT, LONG):
        room.send("fits", cost=cost._replace(input_bytes=50))
    await turns()
    assert room.heard.queue[-1] == (2, 100)
    assert isinstance(error_of(await ended(room.send("over", cost=SHORT))), QueueFull)


@in_room(long_s=1.0, capacity=50, max_requests=1)
async def test_the_share_of_a_caller_is_that_of_both_queues(room: Room):
    await whale(room)
    await room.send_running("x")
    flood = [room.send(n, cost=(SHORT, LONG)[n % 2], caller="flood", timeout_s=10**6) for n in range(60)]
    await turns()
    assert sum(not client.done() for client in flood) == 40


# Forecasts


@pytest.mark.parametrize(("timeout_s", "expected"), [(9.9, DeadlineExceeded), (30.0, type(None))])
@in_room(long_s=100.0, max_requests=1)
async def test_the_first_forecasts_follow_the_self_check(room: Room, timeout_s, expected):
    """A first batch that takes 20 times as long as the self-check says changes no forecast."""
    room.engine.first_rate = RATE
    await room.send_running("cold")
    room.clock.advance(20.0)
    room.engine.release()
    await turns()
    await room.send_running("x")
    await room.send_waiting(*range(9))
    client = room.send("late", timeout_s=timeout_s)  # behind ten requests of a second, and takes a second
    await turns()
    assert (type(error_of(client)) if client.done() else type(None)) is expected


@pytest.mark.parametrize(
    ("timeout_s", "own_s", "expected"),
    [(9.0, 20.0, DeadlineExceeded), (9.0, 9.0, QueueFull), (3.0, 9.0, QueueFull), (20.0, 20.0, type(None))],
    ids=["the caller's decides", "the service's decides", "both do", "in time"],
)
@in_room(long_s=100.0, max_requests=1)
async def test_a_forecast_beyond_the_services_own_deadline_is_a_full_queue(room, timeout_s, own_s, expected):
    room.engine.first_rate = RATE
    await room.send_running("x")
    await room.send_waiting(*range(9))
    now = room.clock.now()
    client = asyncio.ensure_future(
        room.batcher.submit("late", "a", cost_of(), now + timeout_s, own_deadline=now + own_s)
    )
    await turns()
    error = error_of(client) if client.done() else None
    assert type(error) is expected
    assert error is None or "11.000 s" in str(error)
    assert not isinstance(error, QueueFull) or error.retry_after_s == 9
    client.cancel()


@pytest.mark.parametrize(("num_short", "is_admitted"), [(0, True), (1, False)])
@in_room(long_s=1.0, max_requests=1)
async def test_a_long_request_beside_a_saturated_thread_gets_half_of_the_core(room, num_short, is_admitted):
    await whale(room)
    room.send("running", cost=SHORT)
    await turns()
    for number in range(num_short):
        room.send(number, cost=SHORT)
    client = room.send("next", "deep", cost=LONG, timeout_s=15.0)  # after 5 s, for 5 s; with half a core 20 s
    await turns()
    assert client.done() is not is_admitted


@in_room(long_s=1.0, max_wait_s=5.0, capacity=2)
async def test_with_a_wait_a_capacity_that_the_other_queue_fills_is_no_reason_to_wait(room: Room):
    room.engine.first_rate = RATE
    room.send("running", "deep", cost=LONG, timeout_s=100.0)
    await turns()
    room.clock.advance(5.0)
    await turns()
    room.send("short", cost=SHORT, timeout_s=100.0)
    await turns()
    assert not room.engine.is_held(), "it waits for others to join it"
    room.send("waiting", "deep", cost=LONG, timeout_s=100.0)
    await turns()
    assert room.engine.in_hand == ["short"]
