"""The batcher dispatches at once when idle and gathers while busy; it starts, drains and stops."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
import uvloop

from service.attention.progress import Progress
from service.batching.job import BatchInfo
from service.errors import (
    Draining,
    EngineDown,
    NotReady,
)
from service.loop_time import LoopClock
from tests.doubles import Death, GateEngine, on_loop, run, turns
from tests.unit.batching.room import Room, cost_of, ended, error_of, in_room, result_of


@in_room()
async def test_an_idle_engine_gets_a_lone_request_at_once(room: Room):
    (client,) = await room.send_running("x")
    room.engine.release()
    await turns()
    outcome = client.result()
    assert (outcome.result, outcome.batch) == (("answer", "x"), BatchInfo(1, 1, 10))


@in_room()
async def test_requests_of_one_loop_tick_share_a_batch(room: Room):
    await room.send_running(*range(8))


@in_room()
async def test_requests_that_arrive_while_the_engine_is_busy_share_the_next_batch(room: Room):
    await room.send_running("x")
    for number in range(5):
        await room.send_waiting(number)
    assert len(room.engine.batches) == 1, "one batch in flight at a time"
    room.engine.release()
    await turns()
    assert room.engine.batches == [["x"], [0, 1, 2, 3, 4]]


@in_room()
async def test_an_outcome_reports_its_batch_queue_time_and_compute_time(room: Room):
    await room.send_running("x")
    clients = [
        room.send("y", cost=cost_of(sequences=2, tokens=30)),
        room.send("z", cost=cost_of(sequences=3, tokens=4)),
    ]
    await turns()
    room.clock.advance(0.5)
    room.engine.release()
    await turns()
    room.clock.advance(0.125)
    room.engine.release()
    await turns()
    for client in clients:
        outcome = client.result()
        assert (outcome.batch, outcome.queue_s, outcome.compute_s) == (BatchInfo(2, 5, 34), 0.5, 0.125)
    assert room.heard.batches[1] == ("a", BatchInfo(2, 5, 34), 0.125)


@in_room(max_wait_s=0.01)
async def test_with_a_wait_an_idle_engine_waits_that_long_from_the_first_request(room: Room):
    room.send("x")
    await turns()
    room.clock.advance(0.006)
    room.send("y")
    await turns()
    room.clock.advance(0.003)
    await turns()
    assert room.engine.batches == []
    room.clock.advance(0.001)
    await turns()
    assert room.engine.batches == [["x", "y"]]


@in_room(max_wait_s=0.01, max_requests=3)
async def test_with_a_wait_a_full_batch_goes_at_once(room: Room):
    await room.send_running(1, 2, 3)


@in_room(max_wait_s=0.01, capacity=2)
async def test_with_a_wait_a_full_queue_goes_at_once(room: Room):
    await room.send_running(1, 2)


@in_room(max_wait_s=0.01)
async def test_with_a_wait_time_spent_while_the_engine_was_busy_counts(room: Room):
    room.send("x")
    await turns()
    room.clock.advance(0.010)
    await turns()
    await room.send_waiting("y")
    room.clock.advance(0.010)
    room.engine.release()
    await turns()
    assert room.engine.batches == [["x"], ["y"]]


@in_room(max_wait_s=3600)
async def test_with_a_wait_an_idle_engine_lets_no_deadline_pass(room: Room):
    patient, hurried = room.send("patient", timeout_s=7200), room.send("hurried", timeout_s=0.010)
    room.engine.is_open = True
    await turns()
    room.clock.advance(0.005)
    await turns()
    assert (result_of(patient), result_of(hurried)) == (("answer", "patient"), ("answer", "hurried"))


@in_room(max_wait_s=3600)
async def test_with_a_wait_draining_stops_waiting(room: Room):
    client = room.send("x")
    await turns()
    room.engine.is_open = True
    assert await room.batcher.drain(10) == 0
    assert result_of(client) == ("answer", "x")


@in_room(max_wait_s=3600)
async def test_with_a_wait_the_last_cancellation_leaves_no_timer(room: Room):
    client = room.send("x")
    await turns()
    client.cancel()
    await turns()
    assert room.clock.num_calls == 0
    room.check_empty()


@on_loop
async def test_an_unstarted_batcher_is_not_ready():
    room = Room()
    assert not room.batcher.is_alive
    assert isinstance(error_of(await ended(room.send("x"))), NotReady)
    assert await room.batcher.drain(1) == 0
    await room.batcher.stop()
    assert isinstance(error_of(await ended(room.send("x"))), Draining)


@in_room()
async def test_a_batcher_starts_once(room: Room):
    with pytest.raises(RuntimeError, match="This is a bug"):
        room.batcher.start()


@in_room()
async def test_begin_drain_is_synchronous_and_admitted_jobs_continue(room: Room):
    clients = [*await room.send_running("x"), *await room.send_waiting("y")]
    room.batcher.begin_drain()
    assert isinstance(error_of(await ended(room.send("late"))), Draining)
    room.engine.open()
    await turns()
    assert [error_of(client) for client in clients] == [None, None]


@in_room(max_requests=2)
async def test_a_drain_that_times_out_fails_the_rest_and_returns_their_number(room: Room):
    clients = [*await room.send_running("r"), *await room.send_waiting("w0", "w1", "w2")]
    drain = asyncio.create_task(room.batcher.drain(7))
    await turns()
    room.clock.advance(6.9)
    room.engine.release()
    await turns()
    assert not drain.done()
    room.clock.advance(0.1)
    await turns()
    assert drain.result() == 3
    assert [type(error_of(client)) for client in clients] == [type(None), Draining, Draining, Draining]
    room.engine.release()  # of the batch in flight: its results go nowhere, the one behind it is not run
    await turns()
    assert room.engine.executed == ["r", "w0", "w1"]


@in_room()
async def test_a_drain_counts_a_cancelled_or_expired_job_as_finished(room: Room):
    (running,) = await room.send_running("r")
    room.send("expires", timeout_s=3)
    drain = asyncio.create_task(room.batcher.drain(10))
    await turns()
    room.clock.advance(3)
    await turns()
    assert not drain.done()
    running.cancel()
    await turns()
    assert drain.result() == 0


@in_room()
async def test_a_cancelled_drain_leaves_no_timer_and_the_batcher_still_drains(room: Room):
    (client,) = await room.send_running("r")
    drain = asyncio.create_task(room.batcher.drain(10))
    await turns()
    drain.cancel()
    await turns()
    assert drain.cancelled()
    assert room.batcher.is_draining
    room.engine.release()
    await turns()
    assert error_of(client) is None
    assert room.clock.num_calls == 0


@in_room()
async def test_stop_ends_the_task_settles_waiting_jobs_and_cancels_the_batch(room: Room):
    clients = [*await room.send_running("r"), *await room.send_waiting("w")]
    _, future, progress = room.engine.held[False]
    await room.batcher.stop()
    await turns()
    assert [type(error_of(client)) for client in clients] == [Draining, Draining]
    assert not room.batcher.is_alive
    assert future.cancelled(), "a batch that had not begun need not"
    assert progress.is_stopped, "one that has begun ends soon"
    assert room.heard.deaths == [], "stopping is not dying"
    assert [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []
    await room.batcher.stop()


@in_room()
async def test_an_engine_found_to_be_down_outside_a_batch_fails_all_jobs_like_one_that_fails_a_batch(room: Room):
    clients = [*await room.send_running("r"), *await room.send_waiting("w")]
    failure = EngineDown("a load hangs")
    for _ in range(2):
        room.batcher.fail(failure)
        await turns()
    assert [type(error_of(client)) for client in clients] == [EngineDown, EngineDown]
    assert not room.batcher.is_alive
    assert room.heard.deaths == [Death(2, failure)]
    with pytest.raises(EngineDown):
        await room.batcher.submit("late", "lane", cost_of(), room.clock.now() + 60)


def test_a_result_after_the_loop_was_closed_is_harmless(caplog):
    engine = GateEngine()

    class Started(GateEngine):
        def run(self, batch, **_):
            future, progress = engine.run(batch)
            future.set_running_or_notify_cancel()
            return future, progress

    async def main():
        async with Room(engine=Started()) as room:
            room.send("x")
            await turns()

    run(main)
    engine.release()
    assert caplog.records == []


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_it_works_with_a_real_clock_and_a_real_thread(loop_factory):
    """Each client gets its own answer, and some share a batch."""

    class Thread:
        def __init__(self) -> None:
            self.pool = ThreadPoolExecutor(1)

        def rate(self, payload):
            return 0.0

        def run(self, batch, **_):
            future = self.pool.submit(lambda: [("answer", payload) for payload in batch])
            return future, Progress()

    async def main():
        engine, clock = Thread(), LoopClock()
        room = Room(capacity=1000, engine=engine, clock=clock)
        batcher, heard = room.batcher, room.heard
        batcher.start()

        async def client(number):
            for turn in range(5):
                payload = 1000 * turn + number
                outcome = await batcher.submit(payload, payload % 3, cost_of(), clock.now() + 60)
                assert outcome.result == ("answer", payload)
                assert outcome.queue_s >= 0
                assert outcome.compute_s > 0

        with engine.pool:
            await asyncio.gather(*[client(number) for number in range(200)])
            assert await batcher.drain(30) == 0
            await batcher.stop()
        assert sum(done.batch.requests for done in heard.batches) == 1000
        assert len(heard.batches) < 1000
        assert heard.queue[-1] == (0, 0)

    run(main, loop_factory=loop_factory)


@in_room(max_wait_s=0.05, max_requests=3)
async def test_the_engine_is_not_idle_while_another_lane_than_the_next_has_a_full_batch(room: Room):
    room.send("one", "a")
    await turns()
    assert room.engine.batches == []
    for number in range(3):
        room.send(number, "b")
    await turns()
    room.engine.open()
    await turns()
    assert room.engine.batches == [["one"], [0, 1, 2]]
