"""Whatever the engine does and whichever client leaves, no other request is affected."""

from __future__ import annotations

import asyncio

import pytest

from service.batching.job import BatchInfo
from service.errors import (
    CostLimit,
    EngineDown,
    EngineFailed,
)
from tests.doubles import GateEngine, on_loop, turns
from tests.unit.batching.room import Room, cost_of, ended, error_of, in_room, result_of, stage_of


@in_room()
async def test_x1_only_the_culprit_of_a_failed_batch_fails_and_without_the_text_of_the_error(room: Room):
    cause = room.engine.bad[5] = ValueError("secret library text")
    clients = await room.send_running(*range(8))
    room.engine.open()
    await turns(60)
    assert [result_of(client) for client in clients if client is not clients[5]] == [
        ("answer", number) for number in range(8) if number != 5
    ]
    error = error_of(clients[5])
    assert type(error) is EngineFailed
    assert error.__cause__ is cause
    assert "secret" not in error.message
    assert room.engine.batches == [list(range(8)), *[[number] for number in range(8)]]
    assert room.heard.retries == [("a", 8, "ValueError")]
    assert clients[0].result().batch == BatchInfo(1, 1, 10), "an answer says the batch it was computed in"
    assert [done.batch.requests for done in room.heard.batches] == [1] * 7, "each batch that was answered, once"
    assert room.batcher.is_alive


@in_room()
async def test_a_settled_job_is_not_retried(room: Room):
    clients = [room.send("x"), room.send("expires", timeout_s=1), room.send("leaves"), room.send("leaves late")]
    await turns()
    clients[2].cancel()
    room.clock.advance(1)
    await turns()
    room.engine.fail(ValueError("x"))
    await turns()
    assert room.heard.retries == [("a", 2, "ValueError")]
    clients[3].cancel()
    room.engine.open()
    await turns()
    assert room.engine.batches == [["x", "expires", "leaves", "leaves late"], ["x"]]
    assert error_of(clients[0]) is None


@in_room()
async def test_a_lone_failure_is_not_retried(room: Room):
    (client,) = await room.send_running("x")
    room.engine.fail(ValueError("x"))
    await turns()
    assert isinstance(error_of(client), EngineFailed)
    assert room.engine.batches == [["x"]]
    assert room.heard.retries == []
    assert room.heard.batches == []


@in_room()
async def test_a_service_error_is_passed_on_unchanged(room: Room):
    """X3: out of memory for one request is a CostLimit, and its mate is answered."""
    too_large = CostLimit("this request needs more memory than there is")
    clients = await room.send_running("x", "y")
    room.engine.bad["x"] = too_large
    room.engine.open()
    await turns()
    assert error_of(clients[0]) is too_large
    assert result_of(clients[1]) == ("answer", "y")


@pytest.mark.parametrize(
    ("room_for", "batches"),
    [
        (4, [range(8), range(4), range(4, 8)]),
        (3, [range(8), range(4), [0, 1], [2, 3], range(4, 8), [4, 5], [6, 7]]),
        (1, [range(8), range(4), [0, 1], [0], [1], [2, 3], [2], [3], range(4, 8), [4, 5], [4], [5], [6, 7], [6], [7]]),
    ],
    ids=["x2-halves", "x2-quarters", "x2-one-by-one"],
)
@in_room()
async def test_a_batch_that_runs_out_of_memory_is_retried_in_halves_and_all_jobs_are_answered(
    room: Room, room_for, batches
):
    room.engine.room = room_for
    clients = await room.send_running(*range(8))
    room.engine.open()
    await turns(80)
    assert [result_of(client) for client in clients] == [("answer", number) for number in range(8)]
    assert room.engine.batches == [list(batch) for batch in batches], "arrival order is kept"
    failed = [len(batch) for batch in batches if len(batch) > room_for]
    assert room.heard.splits == [("a", size) for size in failed]
    assert room.heard.retries == []


@in_room()
async def test_x2_an_odd_batch_is_split_too_and_cancelled_jobs_are_not_retried(room: Room):
    room.engine.room = 2
    clients = await room.send_running(*range(5))
    clients[1].cancel()
    await turns()
    room.engine.open()
    await turns(40)
    assert room.engine.batches == [[0, 1, 2, 3, 4], [0, 2], [3, 4]]
    assert room.heard.splits == [("a", 4)]


@in_room()
async def test_x3_a_job_that_alone_runs_out_of_memory_fails_and_the_others_are_answered(room: Room):
    room.engine.bad[5] = CostLimit("too much, even alone")
    clients = await room.send_running(*range(8))
    room.engine.open()
    await turns(80)
    assert [type(error_of(client)) for client in clients] == [
        CostLimit if number == 5 else type(None) for number in range(8)
    ]
    assert len(room.heard.splits) == 3
    assert result_of(await ended(room.send("next"))) == ("answer", "next")


@in_room()
async def test_x1_and_x2_together_retry_halves_first_then_the_culprit_alone(room: Room):
    room.engine.room, room.engine.bad = 2, {3: ValueError("bad")}
    clients = await room.send_running(*range(4))
    room.engine.open()
    await turns(40)
    assert room.engine.batches == [[0, 1, 2, 3], [0, 1], [2, 3], [2], [3]]
    assert [type(error_of(client)) for client in clients] == [type(None)] * 3 + [EngineFailed]


@in_room(max_compute_s=5)
async def test_a_batch_that_does_not_end_ends_the_engine_and_fails_all_jobs(room: Room):
    clients = [*await room.send_running("r", "s"), *await room.send_waiting("w")]
    room.clock.advance(4.9)
    await turns()
    assert not any(client.done() for client in clients)
    room.clock.advance(0.1)
    await turns()
    assert [type(error_of(client)) for client in clients] == [EngineDown] * 3
    assert not room.batcher.is_alive
    assert "stuck" in str(room.heard.deaths[0].error)
    assert await room.batcher.ended_within(60)
    with pytest.raises(EngineDown):
        room.batcher.admit("late", "a", cost_of(), room.clock.now() + 1)


@in_room(max_compute_s=5)
async def test_a_pause_of_the_whole_process_does_not_make_a_batch_stuck(room: Room):
    clients = await room.send_running("r", "s")
    room.clock.pause(20)
    await turns()
    assert room.batcher.is_alive
    room.engine.open()
    await turns()
    assert [error_of(client) for client in clients] == [None, None]


@in_room(max_compute_s=5)
async def test_each_part_of_a_batch_has_the_whole_time_limit(room: Room):
    room.engine.room = 1
    clients = await room.send_running("x", "y")
    for _ in range(3):
        room.clock.advance(4)
        room.engine.release()
        await turns()
    assert [error_of(client) for client in clients] == [None, None]


NONSENSE = {
    "too few": lambda batch: batch[:-1],
    "too many": lambda batch: [*batch, "more"],
    "none": lambda _: None,
    "a number": lambda _: 7,
    "a string": lambda batch: "x" * len(batch),
    "an iterator": lambda batch: iter(batch),
    "a dict": lambda batch: dict.fromkeys(batch),
}


@pytest.mark.parametrize("nonsense", NONSENSE.values(), ids=NONSENSE)
@pytest.mark.parametrize("num_jobs", [1, 3])
@in_room()
async def test_x15_malformed_results_fail_only_that_batch(room: Room, nonsense, num_jobs):
    room.engine.answer = nonsense
    clients = await room.send_running(*range(num_jobs))
    room.engine.open()
    await turns(30)
    assert [type(error_of(client)) for client in clients] == [EngineFailed] * num_jobs
    room.engine.answer = list
    assert result_of(await ended(room.send("next"))) == "next"


FAILURES = [
    ValueError("x"),
    MemoryError(),
    StopIteration(3),
    StopAsyncIteration(),
    SystemExit(1),
    KeyboardInterrupt(),
    asyncio.CancelledError(),
    TimeoutError(),
]


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
@in_room()
async def test_any_exception_of_the_engine_fails_only_that_batch(room: Room, error):
    (client,) = await room.send_running("x")
    room.engine.fail(error)
    await turns()
    assert isinstance(error_of(client), EngineFailed)
    room.engine.open()
    assert result_of(await ended(room.send("next"))) == ("answer", "next")


@on_loop
async def test_an_engine_that_refuses_a_batch_fails_that_batch():
    class Refuses(GateEngine):
        def run(self, batch, **hints):
            if "x" in batch:
                raise RuntimeError("cannot")
            return super().run(batch, **hints)

    async with Room(engine=Refuses(is_open=True)) as room:
        clients = [room.send("x"), room.send("y")]
        await turns(30)
        assert isinstance(error_of(clients[0]), EngineFailed)
        assert result_of(clients[1]) == ("answer", "y")


@in_room()
async def test_a_batch_the_engine_cancels_means_the_engine_is_down(room: Room):
    (client,) = await room.send_running("x")
    room.engine.drop()
    await turns()
    assert isinstance(error_of(client), EngineDown)
    assert not room.batcher.is_alive
    assert isinstance(room.heard.deaths[0].error, EngineDown)


@in_room()
async def test_an_engine_that_dies_in_a_retry_fails_all_jobs(room: Room):
    clients = await room.send_running("x", "y", "z")
    room.engine.fail(ValueError("x"))
    await turns()
    room.engine.release()
    await turns()
    room.engine.die()
    await turns()
    assert [type(error_of(client)) for client in clients] == [type(None), EngineDown, EngineDown]


@pytest.mark.parametrize("stage", ["queued", "running", "settled"])
@in_room()
async def test_a_caller_that_leaves_at_any_stage_is_cancelled_and_its_job_is_settled_once(
    room: Room, stage, monkeypatch
):
    jobs, admit = [], room.batcher.admit

    def recorded(*args):
        jobs.append(admit(*args))
        return jobs[-1]

    monkeypatch.setattr(room.batcher, "admit", recorded)
    if stage == "queued":
        await room.send_running("x")
        (client,) = await room.send_waiting("y")
    else:
        (client,) = await room.send_running("y")
    job = jobs[-1]
    if stage == "settled":
        job.settle("z")
    client.cancel()
    assert stage_of(job) == stage
    await turns()
    assert isinstance(error_of(client), asyncio.CancelledError)
    assert stage_of(job) == "settled"
    assert not job.fail(ValueError("a second end"))


@in_room()
async def test_a_job_cancelled_in_the_tick_of_its_start_never_runs(room: Room):
    """Its client has not run yet, so it still stands in the queue when the batch is taken."""
    await room.send_running("x")
    clients = await room.send_waiting("y", "z")
    room.engine.release()
    await asyncio.sleep(0)  # the engine's word has reached the loop, the task runs in the next turn
    clients[0].cancel()
    await turns()
    assert room.engine.batches == [["x"], ["z"]]


@in_room()
async def test_a_batch_cancelled_entirely_in_the_tick_of_its_start_never_runs(room: Room):
    await room.send_running("x")
    (client,) = await room.send_waiting("y")
    room.engine.release()
    await asyncio.sleep(0)
    client.cancel()
    await turns()
    assert room.engine.batches == [["x"]]
    await room.send_running("z")


@in_room()
async def test_x13_a_running_batch_may_be_cancelled_entirely_and_the_next_one_runs(room: Room):
    clients = await room.send_running(*range(8))
    for client in clients:
        client.cancel()
    await turns()
    assert room.batcher.num_running == 0
    room.engine.open()
    await turns()
    assert result_of(await ended(room.send("next"))) == ("answer", "next")


@pytest.mark.parametrize("failure", [ValueError("x"), CostLimit("too much")])
@in_room()
async def test_a_failed_batch_that_no_caller_waits_for_is_not_retried_or_reported_as_retried(room: Room, failure):
    clients = await room.send_running("x", "y")
    for client in clients:
        client.cancel()
    await turns()
    room.engine.fail(failure)
    await turns()
    assert room.engine.batches == [["x", "y"]]
    assert (room.heard.retries, room.heard.splits) == ([], [])
