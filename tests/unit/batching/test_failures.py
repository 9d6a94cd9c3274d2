"""Whatever the engine does, and whoever leaves, only the culprit and the one who left notice."""

from __future__ import annotations

import asyncio

import pytest

from service.batching.job import BatchInfo
from service.batching.observer import CancelEvent, RetryEvent
from service.errors import (
    CostLimit,
    EngineDown,
    EngineFailed,
)
from tests.doubles import GateEngine, run, turns
from tests.unit.batching.room import Room, ended, error_of, result_of


def test_x1_only_the_culprit_of_a_failed_batch_gets_the_error_and_no_text_of_it():
    async def main():
        async with Room() as room:
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
            assert room.heard.retries == [RetryEvent("a", 8, "ValueError")]
            assert clients[0].result().batch == BatchInfo(1, 1, 10), "an answer says the batch it was computed in"
            assert [event.requests for event in room.heard.batches] == [1] * 7, "each batch that was answered, once"
            assert room.batcher.is_alive

    run(main)


def test_a_member_that_is_settled_already_is_not_retried():
    async def main():
        async with Room() as room:
            clients = [room.send("x"), room.send("expires", timeout_s=1), room.send("leaves"), room.send("leaves late")]
            await turns()
            clients[2].cancel()
            room.clock.advance(1)
            await turns()
            room.engine.fail(ValueError("x"))
            await turns()
            assert room.heard.retries == [RetryEvent("a", 2, "ValueError")]
            clients[3].cancel()
            room.engine.open()
            await turns()
            assert room.engine.batches == [["x", "expires", "leaves", "leaves late"], ["x"]]
            assert error_of(clients[0]) is None

    run(main)


def test_a_lone_failure_is_not_tried_again():
    async def main():
        async with Room() as room:
            (client,) = await room.send_running("x")
            room.engine.fail(ValueError("x"))
            await turns()
            assert isinstance(error_of(client), EngineFailed)
            assert room.engine.batches == [["x"]]
            assert room.heard.retries == []
            assert room.heard.batches == []

    run(main)


def test_an_error_of_the_family_is_passed_on_as_itself():
    """X3: out of memory for one request is a CostLimit; X2: for a batch it is not, the members are retried apart."""

    async def main():
        async with Room() as room:
            too_large = CostLimit("this request needs more memory than there is")
            clients = await room.send_running("x", "y")
            room.engine.bad["x"] = too_large
            room.engine.open()
            await turns()
            assert error_of(clients[0]) is too_large
            assert result_of(clients[1]) == ("answer", "y")

    run(main)


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
def test_x15_nonsense_for_results_fails_that_batch_and_nothing_else(nonsense, num_jobs):
    async def main():
        async with Room() as room:
            room.engine.answer = nonsense
            clients = await room.send_running(*range(num_jobs))
            room.engine.open()
            await turns(30)
            assert [type(error_of(client)) for client in clients] == [EngineFailed] * num_jobs
            room.engine.answer = list
            assert result_of(await ended(room.send("next"))) == "next"

    run(main)


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
def test_whatever_the_engine_raises_is_a_failure_of_that_batch(error):
    async def main():
        async with Room() as room:
            (client,) = await room.send_running("x")
            room.engine.fail(error)
            await turns()
            assert isinstance(error_of(client), EngineFailed)
            room.engine.open()
            assert result_of(await ended(room.send("next"))) == ("answer", "next")

    run(main)


def test_an_engine_that_refuses_a_batch_fails_that_batch():
    class Refuses(GateEngine):
        def run(self, batch):
            if "x" in batch:
                raise RuntimeError("cannot")
            return super().run(batch)

    async def main():
        async with Room(engine=Refuses(is_open=True)) as room:
            clients = [room.send("x"), room.send("y")]
            await turns(30)
            assert isinstance(error_of(clients[0]), EngineFailed)
            assert result_of(clients[1]) == ("answer", "y")

    run(main)


def test_a_batch_the_engine_cancels_means_the_engine_is_down():
    async def main():
        async with Room() as room:
            (client,) = await room.send_running("x")
            room.engine.drop()
            await turns()
            assert isinstance(error_of(client), EngineDown)
            assert not room.batcher.is_alive
            assert isinstance(room.heard.deaths[0].error, EngineDown)

    run(main)


def test_the_engine_dying_in_a_retry_is_told_to_everyone():
    async def main():
        async with Room() as room:
            clients = await room.send_running("x", "y", "z")
            room.engine.fail(ValueError("x"))
            await turns()
            room.engine.release()
            await turns()
            room.engine.die()
            await turns()
            assert [type(error_of(client)) for client in clients] == [type(None), EngineDown, EngineDown]

    run(main)


@pytest.mark.parametrize("stage", ["queued", "running", "settled"])
def test_a_client_who_leaves_is_counted_once_with_how_far_he_had_come(stage):
    async def main():
        async with Room() as room:
            if stage == "queued":
                await room.send_running("x")
                (client,) = await room.send_waiting("y")
            else:
                (client,) = await room.send_running("y")
            if stage == "settled":
                (job,) = room.batcher._running
                job.settle("z")
            client.cancel()
            await turns()
            assert isinstance(error_of(client), asyncio.CancelledError)
            assert room.heard.cancelled == [CancelEvent("a", stage)]

    run(main)


def test_a_job_cancelled_in_the_turn_it_would_be_taken_is_never_executed():
    """Its client has not run yet, so it still stands in the queue when the batch is taken."""

    async def main():
        async with Room() as room:
            await room.send_running("x")
            clients = await room.send_waiting("y", "z")
            room.engine.release()
            await asyncio.sleep(0)  # the engine's word has reached the loop, the task runs in the next turn
            clients[0].cancel()
            await turns()
            assert room.engine.batches == [["x"], ["z"]]

    run(main)


def test_a_batch_whose_every_client_leaves_in_its_turn_is_not_run():
    async def main():
        async with Room() as room:
            await room.send_running("x")
            (client,) = await room.send_waiting("y")
            room.engine.release()
            await asyncio.sleep(0)
            client.cancel()
            await turns()
            assert room.engine.batches == [["x"]]
            await room.send_running("z")

    run(main)


def test_x13_all_of_a_running_batch_leave_and_the_next_one_is_served():
    async def main():
        async with Room() as room:
            clients = await room.send_running(*range(8))
            for client in clients:
                client.cancel()
            await turns()
            assert room.batcher.num_running == 0
            room.engine.open()
            await turns()
            assert result_of(await ended(room.send("next"))) == ("answer", "next")

    run(main)
