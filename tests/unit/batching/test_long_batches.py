"""Long batches are preempted between two of their steps: what runs there, in which share, and what becomes of the batch."""

from __future__ import annotations

import asyncio

import pytest

from service.batching.policy import BATCH_OVERHEAD_FLOPS, MAX_FLOPS_BETWEEN
from service.errors import CostLimit, DeadlineExceeded, EngineDown, EngineFailed
from tests.doubles import GateEngine, on_loop, turns
from tests.unit.batching.room import Room, cost_of, ended, error_of, in_room, result_of

LONG = cost_of(flops=50 * BATCH_OVERHEAD_FLOPS)


async def whale(room: Room, payload: str = "whale", lane: str = "deep") -> asyncio.Task:
    """A long request on the engine, which has done nothing of it yet; batches do 10 overheads' flops a second."""
    room.send("known", lane, cost=cost_of(flops=10 * BATCH_OVERHEAD_FLOPS))
    await turns()
    room.clock.advance(1.0)
    room.engine.release()
    await turns()
    client = room.send(payload, lane, cost=LONG)
    await turns()
    assert room.engine.batches[-1] == [payload]
    return client


async def step(room: Room, seconds: float = 1.0) -> None:
    room.clock.advance(seconds)
    room.engine.preempt()
    await turns()


@in_room()
async def test_a_batch_of_another_lane_runs_between_two_steps_of_a_long_one(room: Room):
    long = await whale(room)
    minnow = room.send("minnow", "shallow")
    await step(room)
    assert room.engine.in_hand == ["minnow"]
    assert room.batcher.num_running == 2
    room.engine.release()
    assert result_of(await ended(minnow)) == ("answer", "minnow")
    assert room.engine.in_hand == ["whale"]
    room.engine.release()
    assert result_of(await ended(long)) == ("answer", "whale")


@in_room()
async def test_a_long_batch_continues_at_once_if_nothing_else_waits(room: Room):
    long = await whale(room)
    for _ in range(3):
        await step(room)
        assert room.engine.in_hand == ["whale"]
    room.engine.release()
    outcome = (await ended(long)).result()
    assert outcome.compute_s == 3.0
    assert room.heard.batches[-1].compute_s == 3.0


@in_room()
async def test_the_time_of_a_long_batch_is_the_sum_of_its_steps(room: Room):
    long = await whale(room)
    room.send("minnow", "shallow")
    await step(room)
    room.clock.advance(5.0)
    room.engine.release()
    await turns()
    room.clock.advance(2.0)
    room.engine.release()
    await ended(long)
    assert [done.compute_s for done in room.heard.batches[-2:]] == [5.0, 3.0]


@on_loop
async def test_a_batch_that_paused_before_the_loop_checks_continues_as_any_other():
    """A busy machine may keep the loop's thread waiting for longer than a step takes."""

    class StopsAtOnce(GateEngine):
        def run(self, batch, **hints):
            future = super().run(batch, **hints)
            self.preempt()
            return future

    async with Room(engine=StopsAtOnce()) as room:
        client = room.send("whale", cost=LONG)
        await turns()
        assert room.engine.in_hand == ["whale"]
        room.engine.release()
        assert result_of(await ended(client)) == ("answer", "whale")


@in_room()
async def test_its_own_lane_keeps_its_order(room: Room):
    await whale(room)
    room.send("later", "deep")
    await step(room)
    assert room.engine.in_hand == ["whale"]
    room.engine.release()
    await turns()
    assert room.engine.in_hand == ["later"]


@pytest.mark.parametrize(("flops", "runs"), [(MAX_FLOPS_BETWEEN, True), (MAX_FLOPS_BETWEEN + 1, False)])
@in_room()
async def test_another_long_batch_waits_until_the_first_has_ended(room: Room, flops, runs):
    await whale(room)
    room.send("other", "shallow", cost=cost_of(flops=flops))
    await step(room)
    assert room.engine.in_hand == (["other"] if runs else ["whale"])


@in_room()
async def test_a_batch_between_two_steps_holds_only_jobs_that_stay_short(room: Room):
    await whale(room)
    for number in range(3):
        room.send(number, "shallow", cost=cost_of(flops=MAX_FLOPS_BETWEEN // 2))
    await step(room)
    assert room.engine.in_hand == [0, 1]


@in_room()
async def test_busy_lanes_and_a_long_batch_get_equal_shares(room: Room):
    await whale(room)
    seconds = dict.fromkeys(("whale", "b", "c"), 0.0)
    for number in range(400):
        for lane in ("b", "c"):
            room.send((lane, number), lane, cost=cost_of(flops=BATCH_OVERHEAD_FLOPS))
        await turns()
        held = room.engine.in_hand
        lane = held[0] if held == ["whale"] else held[0][0]
        took = 0.05 if lane == "whale" else 0.02 * len(held)
        seconds[lane] += took
        room.clock.advance(took)
        room.engine.preempt() if lane == "whale" else room.engine.release()
        await turns()
    room.batcher.give_up()
    assert 0.2 < seconds["whale"] / sum(seconds.values()) < 0.6


@in_room()
async def test_a_cancelled_long_batch_is_dropped_at_its_next_step(room: Room):
    long = await whale(room)
    long.cancel()
    await turns()
    await step(room)
    assert room.engine.dropped == [["whale"]]
    assert not room.engine.is_busy


@in_room()
async def test_a_long_batch_whose_deadline_passes_between_two_steps_is_dropped_and_fails(room: Room):
    long = await whale(room)
    room.send("minnow", "shallow")
    await step(room)
    room.clock.advance(61.0)
    room.engine.release()
    assert isinstance(error_of(await ended(long)), DeadlineExceeded)
    assert room.engine.dropped == [["whale"]]


@in_room(max_compute_s=10.0)
async def test_a_step_that_does_not_end_means_the_engine_is_down(room: Room):
    long = await whale(room)
    for _ in range(4):
        await step(room, 8.0)  # each step ends in time, all together do not
    assert not long.done()
    room.clock.advance(10.0)
    assert isinstance(error_of(await ended(long)), EngineDown)
    assert not room.batcher.is_alive


@in_room()
async def test_an_engine_that_dies_between_two_steps_fails_all_jobs(room: Room):
    long, minnow = await whale(room), room.send("minnow", "shallow")
    await step(room)
    room.engine.die()
    assert isinstance(error_of(await ended(long)), EngineDown)
    assert isinstance(error_of(await ended(minnow)), EngineDown)
    assert room.engine.dropped == [["whale"]]


@in_room()
async def test_a_failure_between_two_steps_does_not_affect_the_long_batch(room: Room):
    long, minnow = await whale(room), room.send("minnow", "shallow")
    await step(room)
    room.engine.fail(ValueError("a secret"))
    assert isinstance(error_of(await ended(minnow)), EngineFailed)
    room.engine.release()
    assert result_of(await ended(long)) == ("answer", "whale")


@in_room()
async def test_a_later_step_that_runs_out_of_memory_fails_its_job(room: Room):
    long = await whale(room)
    await step(room)
    room.engine.fail(CostLimit("too much"))
    assert isinstance(error_of(await ended(long)), CostLimit)


@in_room(step_s=0.025)
async def test_a_request_that_may_run_between_two_steps_is_not_refused_for_the_length_of_the_long_one(room: Room):
    """The long one takes five seconds more; a request that may run between waits for at most one step."""
    await whale(room)
    soon, own = room.send("minnow", "shallow", timeout_s=1.5), room.send("later", "deep", timeout_s=1.5)
    await turns()
    assert not soon.done()
    assert isinstance(error_of(own), DeadlineExceeded)


@in_room(step_s=0.025)
async def test_after_a_step_in_which_another_lane_ran_its_jobs_still_wait_for_one_step_at_most(room: Room):
    await whale(room)
    minnow = room.send("minnow", "shallow")
    await step(room, 0.025)
    room.clock.advance(1.0)
    room.engine.release()
    await ended(minnow)
    assert room.engine.in_hand == ["whale"]
    own, other = room.send("own", "deep", timeout_s=1.5), room.send("other", "shallow", timeout_s=1.5)
    await turns()
    assert isinstance(error_of(own), DeadlineExceeded), "it runs after the long batch"
    assert not other.done()
    room.engine.open()
    await turns(20)


@pytest.mark.parametrize(("timeout_s", "last_s"), [(60.0, 2.0), (4.0, 1.0)])
@in_room(max_wait_s=3.0)
async def test_between_two_steps_too_a_batch_waits_for_max_wait_ms_or_half_of_the_time_to_a_deadline(
    room, timeout_s, last_s
):
    room.send("whale", "deep", cost=LONG)
    await turns()
    room.clock.advance(3.0)
    await turns()
    room.send("minnow", "shallow", timeout_s=timeout_s)
    await turns()
    await step(room)
    assert room.engine.in_hand == ["whale"]
    await step(room, last_s)
    assert room.engine.in_hand == ["minnow"]


@pytest.mark.parametrize("last_s", [0.024, 0.010])
@in_room(max_requests=1, capacity=10**4)
async def test_the_last_step_of_a_long_batch_counts_in_its_share(room: Room, last_s):
    """Two lanes that always have work: batches of two steps in one, short batches in the other."""
    await whale(room, "first")
    seconds = {"long": 0.0, "short": 0.0}
    for _ in range(2):
        room.send("long", "deep", cost=LONG)
    for _ in range(600):
        room.send("short", "shallow", cost=cost_of(flops=BATCH_OVERHEAD_FLOPS // 100))
    await turns()
    is_first_step = True
    for _ in range(500):
        is_long = room.engine.in_hand != ["short"]
        took = 0.005 if not is_long else 0.025 if is_first_step else last_s
        seconds["long" if is_long else "short"] += took
        room.clock.advance(took)
        if is_long and is_first_step:
            room.engine.preempt()
        else:
            room.engine.release()
            if is_long:
                room.send("long", "deep", cost=LONG)
        if is_long:
            is_first_step = not is_first_step
        await turns()
    room.batcher.give_up()
    share = seconds["long"] / sum(seconds.values())
    assert 0.4 < share < 0.56, share


@in_room(max_wait_s=3.0)
async def test_between_two_steps_a_lane_is_due_by_its_oldest_job(room: Room):
    """The first job in fair order is younger: its caller has had less work done."""
    room.send("whale", "deep", cost=LONG)
    await turns()
    room.clock.advance(3.0)
    await turns()
    for number in range(2):
        room.send(number, "shallow", caller="much", cost=cost_of(flops=MAX_FLOPS_BETWEEN - 1))
    await turns()
    await step(room, 3.0)
    assert room.engine.in_hand == [0]
    room.clock.advance(2.0)
    room.engine.release()
    await turns()
    assert room.engine.in_hand == ["whale"], "the other lane has had more than its share"
    room.clock.advance(4.0)
    room.send("young", "shallow", caller="little")
    await turns()
    assert [job.payload for job in room.batcher._lanes.jobs("shallow")] == ["young", 1]
    await step(room)
    assert room.engine.in_hand == ["young"]
