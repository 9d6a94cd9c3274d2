"""What is refused and what expires: a full queue, a deadline; each refusal names its value and its limit."""

from __future__ import annotations

import pytest

from service.batching.job import NOTHING
from service.errors import (
    DeadlineExceeded,
    Draining,
    QueueFull,
)
from tests.doubles import on_loop, turns
from tests.unit.batching.room import Room, cost_of, ended, error_of, in_room, result_of


@pytest.mark.parametrize("running", [1, 3])
@pytest.mark.parametrize("over", [0, 1, 7])
@on_loop
async def test_q2_exactly_what_exceeds_the_capacity_is_refused(running, over):
    capacity = 6
    async with Room(capacity=capacity, max_requests=3) as room:
        clients = await room.send_running(*range(running))
        clients += [room.send(number) for number in range(capacity + over)]
        await turns()
        refused = [client for client in clients if client.done()]
        assert [type(error_of(client)) for client in refused] == [QueueFull] * over
        room.engine.open()
        await turns(60)
        assert sum(error_of(client) is None for client in clients) == running + capacity


@in_room(capacity=50, max_requests=4)
async def test_a_burst_of_the_queues_size_from_idle_is_not_refused(room: Room):
    """Q11."""
    room.engine.open()
    clients = [room.send(number) for number in range(50)]
    await turns(100)
    assert [result_of(client) for client in clients] == [("answer", number) for number in range(50)]
    assert {len(batch) for batch in room.engine.batches} <= {1, 2, 3, 4}


@in_room(capacity=3, max_requests=1)
async def test_a_full_queue_names_the_limit_and_a_retry_after(room: Room):
    await room.send_running("x")
    room.clock.advance(0.5)
    room.engine.release()  # 1000 flops in 0.5 s
    await turns()
    await room.send_running("y")
    for number in range(3):
        await room.send_waiting(number)
    late = room.send("late")
    await turns()
    error = error_of(late)
    assert isinstance(error, QueueFull)
    assert error.retry_after_s == 2, "3000 flops wait, at 2000 a second"
    assert "3 requests wait" in error.message
    assert "at most 3" in error.message


@in_room(max_bytes=100)
async def test_the_queue_is_bounded_in_bytes(room: Room):
    await room.send_running("x")
    fits, over, small = (room.send(n, cost=cost_of(input_bytes=n)) for n in (60, 41, 40))
    await turns()
    assert room.heard.queue[-1] == (2, 100)
    error = error_of(over)
    assert isinstance(error, QueueFull)
    assert all(word in error.message for word in ("60", "41", "100"))
    assert error.retry_after_s == 1, "no batch was measured yet"
    room.engine.open()
    await turns()
    assert error_of(fits) is None
    assert error_of(small) is None


@in_room(capacity=1)
async def test_a_cancelled_request_frees_its_queue_entry(room: Room):
    await room.send_running("x")
    (client,) = await room.send_waiting("y")
    client.cancel()
    await turns()
    await room.send_waiting("z")


@in_room()
async def test_q4_a_deadline_that_passes_in_the_queue_fails_at_once_and_the_job_never_runs(room: Room):
    await room.send_running("x")
    client = room.send("y", timeout_s=5)
    await turns()
    room.clock.advance(4.999)
    await turns()
    assert not client.done()
    room.clock.advance(0.001)
    await turns()
    error = error_of(client)
    assert isinstance(error, DeadlineExceeded)
    assert "5.000 s" in error.message
    assert room.batcher.num_queued == 0
    room.engine.open()
    await turns()
    assert room.engine.executed == ["x"]


@in_room()
async def test_a_deadline_that_passes_while_running_fails_at_once_and_the_result_is_discarded(room: Room):
    clients = [room.send("x", timeout_s=5), room.send("y", timeout_s=50)]
    await turns()
    room.clock.advance(5)
    await turns()
    assert isinstance(error_of(clients[0]), DeadlineExceeded)
    assert room.batcher.num_running == 1
    room.engine.release()
    await turns()
    assert result_of(clients[1]) == ("answer", "y")


@pytest.mark.parametrize("timeout_s", [0.0, -1.0])
@in_room()
async def test_a_deadline_that_has_passed_is_not_admitted(room: Room, timeout_s):
    assert isinstance(error_of(await ended(room.send("x", timeout_s=timeout_s))), DeadlineExceeded)
    assert room.engine.executed == []


@in_room(max_requests=1)
async def test_q5_a_deadline_too_short_for_the_work_queued_ahead_is_refused_at_once(room: Room):
    await room.send_running("x")
    room.clock.advance(1.0)
    room.engine.release()  # 1000 flops a second
    await turns()
    await room.send_running("y")
    await room.send_waiting(0, 1, 2)
    hopeless = room.send("hopeless", timeout_s=4.9)
    hopeful = room.send("hopeful", timeout_s=5.1)
    other = room.send("other lane", lane="b", timeout_s=2.1)
    never = room.send("before the batch that runs has ended", lane="b", timeout_s=0.9)
    await turns()
    assert isinstance(error_of(hopeless), DeadlineExceeded)
    assert "the answer would take 5.000 s; the deadline is in 4.900 s" in str(error_of(hopeless))
    assert isinstance(error_of(never), DeadlineExceeded)
    assert not hopeful.done()
    assert not other.done(), "a new lane does not wait for the whole queue"


@in_room()
async def test_no_timer_is_left_when_a_job_is_finished(room: Room):
    room.engine.open()
    await ended(room.send("x"))
    assert room.clock.num_calls == 0


@in_room(max_cells=100)
async def test_the_queue_is_bounded_in_attention_scores_but_admits_any_one_job(room: Room):
    await room.send_running("x")
    whale, over = room.send("whale", cost=cost_of(cells=5000)), room.send("over", cost=cost_of(cells=1))
    await turns()
    error = error_of(over)
    assert isinstance(error, QueueFull)
    assert all(word in error.message for word in ("5000 attention scores", "has 1;", "at most 100"))
    room.engine.open()
    await turns()
    assert error_of(whale) is None


class Overload:
    """Clients come five times as fast as they are served: 20 a batch of 4, a batch every 20 ms."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self.clients: list = []

    async def go_on(self, ticks: int, *, arriving: int = 20, lane: str = "a") -> None:
        for _ in range(ticks):
            self.clients += [self.room.send(object(), lane, cost=cost_of(flops=10)) for _ in range(arriving)]
            await turns()
            self.room.clock.advance(0.02)
            self.room.engine.release()
            await turns()

    @property
    def refusals(self) -> list[BaseException]:
        errors = [error_of(client) for client in self.clients if client.done()]
        return [error for error in errors if error is not None]


@in_room(capacity=1000, max_requests=4, standing_wait_s=0.1)
async def test_sustained_overload_limits_the_queue_to_100_ms_of_work_and_batches_stay_full(room: Room):
    await room.send_running("x")
    overload = Overload(room)
    await overload.go_on(5)
    assert overload.refusals == [], "so far it could be a burst"
    await overload.go_on(90)
    assert all(isinstance(error, QueueFull) for error in overload.refusals)
    assert "requests of this kind have arrived faster than they can be computed" in str(overload.refusals[-1])
    assert 20 - 4 <= room.batcher.num_queued <= 20, "five batches take 0.1 s"
    assert {len(batch) for batch in room.engine.batches[1:]} == {4}
    await overload.go_on(30, arriving=1)  # 0.6 s, longer than CALM_S
    num_refused = len(overload.refusals)
    await overload.go_on(5, arriving=20)
    assert len(overload.refusals) == num_refused, "what was over is forgotten: a burst is a burst again"
    room.engine.open()
    await turns(200)


@in_room(capacity=1000, max_requests=4, standing_wait_s=0.1)
async def test_clients_that_leave_end_an_overload_only_with_the_last_one(room: Room):
    await room.send_running("x")
    overload = Overload(room)
    await overload.go_on(40)
    room.clock.advance(1.0)  # longer than CALM_S
    *others, last = [client for client in overload.clients if not client.done()][4:]  # four are computed
    for client in others:
        client.cancel()
    await turns()
    assert (room.batcher.num_queued, room.batcher.num_running, room.batcher.num_overloaded) == (1, 4, 1)
    last.cancel()
    await turns()
    assert (room.batcher.num_queued, room.batcher.num_running, room.batcher.num_overloaded) == (0, 4, 0)
    room.engine.open()
    await turns()


@in_room(capacity=200, max_requests=4)
async def test_with_load_shedding_off_only_the_capacity_bounds_the_queue(room: Room):
    await room.send_running("x")
    overload = Overload(room)
    await overload.go_on(60)
    assert room.batcher.num_queued >= 196
    assert "200 requests wait" in str(overload.refusals[-1])
    room.engine.open()
    await turns(400)


@in_room(capacity=1000, max_requests=4, standing_wait_s=0.1)
async def test_one_overloaded_lane_refuses_no_job_of_another_lane(room: Room):
    await room.send_running("x")
    overload = Overload(room)
    await overload.go_on(40)
    overload.clients += [room.send(object()) for _ in range(20)]
    await turns()
    with pytest.raises(QueueFull):
        room.batcher.check_lane("a", NOTHING)
    room.batcher.check_lane("b", NOTHING)
    light = await room.send_waiting("light", lane="b")
    await overload.go_on(3)
    assert error_of(light[0]) is None, "it waits for its share, not for those before it"
    room.engine.open()
    await turns(200)


async def keep_up(room: Room, ticks: int) -> None:
    """Four jobs a batch, a batch every 20 ms: none is left when the next one arrives."""
    for _ in range(ticks):
        clients = [room.send(object(), cost=cost_of(flops=10)) for _ in range(4)]
        await turns()
        room.clock.advance(0.02)
        room.engine.release()
        await turns()
        assert [result_of(client) for client in clients]


@in_room(capacity=1000, max_requests=4, standing_wait_s=0.1)
async def test_bodies_that_wait_to_be_parsed_are_work_of_their_lane(room: Room):
    arrivals = [room.batcher.note_arrival("a", cost_of(flops=10)) for _ in range(100)]
    await keep_up(room, 10)
    assert room.batcher.is_congested
    with pytest.raises(QueueFull, match="arrived faster"):
        room.batcher.check_lane("a", NOTHING)
    room.batcher.check_lane("b", NOTHING)
    for end in arrivals:
        end()
    room.batcher.check_lane("a", NOTHING)
    room.clock.advance(1.0)  # longer than CALM_S
    await keep_up(room, 1)
    assert not room.batcher.is_congested


@in_room(capacity=1000, max_requests=4, standing_wait_s=0.1)
async def test_bodies_of_one_caller_that_wait_to_be_parsed_refuse_no_other_caller(room: Room):
    arrivals = [room.batcher.note_arrival("a", cost_of(flops=10), "busy") for _ in range(100)]
    await keep_up(room, 10)
    with pytest.raises(QueueFull):
        room.batcher.check_lane("a", NOTHING, "busy")
    room.batcher.check_lane("a", NOTHING, "calm")
    for end in arrivals:
        end()


@in_room(capacity=2, max_requests=1)
async def test_the_early_check_raises_the_error_of_a_later_submit(room: Room):
    await room.send_running("x")
    room.batcher.check_open()
    await room.send_waiting("y", "z")
    with pytest.raises(QueueFull, match="2 requests wait"):
        room.batcher.check_open()
    assert room.batcher.num_queued == 2
    room.batcher.begin_drain()
    with pytest.raises(Draining):
        room.batcher.check_open()
    room.engine.open()
    await turns()


# Requests of several callers


@pytest.mark.parametrize(("capacity", "num_admitted"), [(50, 40), (2, 1), (3, 2), (256, 204)])
@on_loop
async def test_one_caller_gets_at_most_four_fifths_of_the_queue(capacity, num_admitted):
    async with Room(capacity=capacity, max_requests=1) as room:
        await room.send_running("x")
        flood = [room.send(number, caller="flood") for number in range(300)]
        await turns()
        assert sum(not client.done() for client in flood) == num_admitted
        assert {type(error_of(client)) for client in flood if client.done()} == {QueueFull}
        num_free = capacity - num_admitted
        others = [room.send(("other", number), caller=f"other {number}") for number in range(num_free)]
        await turns()
        assert [client for client in others if client.done()] == []


@in_room(capacity=50, max_requests=1)
async def test_without_callers_all_jobs_share_the_whole_queue(room: Room):
    await room.send_running("x")
    clients = [room.send(number) for number in range(60)]
    await turns()
    assert sum(not client.done() for client in clients) == 50


@pytest.mark.parametrize("limit", [(500, 10**9), (10**9, 500)])
@on_loop
async def test_the_bytes_and_scores_of_a_caller_are_bounded_by_the_free_part(limit):
    cost = cost_of(input_bytes=10, cells=10)

    async with Room(max_requests=1, max_bytes=limit[0], max_cells=limit[1]) as room:
        await room.send_running("x")
        flood = [room.send(number, cost=cost, caller="flood") for number in range(60)]
        await turns()
        assert sum(not client.done() for client in flood) == 40
        other = room.send("other", cost=cost, caller="other")
        await turns()
        assert not other.done()


@in_room(max_bytes=100, max_requests=1)
async def test_only_the_queue_bounds_the_first_job_of_a_caller(room: Room):
    await room.send_running("x")
    whole = room.send("whole", cost=cost_of(input_bytes=100), caller="a")
    await turns()
    assert not whole.done()


@in_room(max_requests=1, capacity=1000, standing_wait_s=0.5)
async def test_sustained_overload_refuses_only_the_caller_that_causes_it(room: Room):
    for _ in range(4):
        await room.send_running("known")
        room.clock.advance(0.1)
        room.engine.release()
        await turns()
    flood = [room.send(number, caller="flood") for number in range(40)]
    await turns()
    for _ in range(4):
        room.clock.advance(0.1)
        room.engine.release()
        flood += [room.send("more", caller="flood") for _ in range(2)]
        await turns()
    more, other = room.send("more", caller="flood"), room.send("other", caller="other")
    await turns()
    assert isinstance(error_of(more), QueueFull)
    assert not other.done()
    room.clock.advance(0.1)
    room.engine.release()
    await turns()
    room.clock.advance(0.1)
    room.engine.release()
    await turns()
    assert result_of(other) == ("answer", "other"), "not behind all of the flood"
    assert sum(not client.done() for client in flood) > 30
