"""Inline batches: which batches the loop computes itself, which jobs join them, and what the loop does between them."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
import uvloop

from service.batching.admission import WINDOW
from service.batching.runner import FAR_TOO_LONG, MAX_SEQUENCES, TICKS_TO_ARRIVE
from service.errors import DeadlineExceeded
from tests.doubles import GateEngine, on_loop, run, turns
from tests.unit.batching.room import Room, cost_of, ended, error_of, in_room, result_of


class AtOnce(GateEngine):
    """Answers before it returns, and takes its time for it; the room's clock goes on meanwhile."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__(is_open=True)
        self.seconds = seconds
        self.room_of: Room | None = None

    def run(self, batch, **hints):
        assert self.room_of is not None
        self.room_of.clock._now += self.seconds  # calls that are due come when the loop has a turn
        return super().run(batch, **hints)


def room_with(engine: AtOnce, **limits) -> Room:
    engine.room_of = Room(engine=engine, **limits)
    return engine.room_of


async def learn(room: Room, seconds: float = 1.0) -> None:
    """A batch of 1,000 flops has taken so long."""
    await room.send_running("known")
    room.clock.advance(seconds)
    room.engine.release()
    await turns()


@pytest.mark.parametrize(("flops", "is_inline"), [(2_000, True), (2_001, False)])
@in_room(inline_s=2.0)
async def test_a_batch_is_inline_if_it_ends_in_time_at_the_speed_of_the_last_ones(room: Room, flops, is_inline):
    await learn(room)
    room.send("x", cost=cost_of(flops=flops - 1000))
    room.send("y")
    await turns()
    assert room.engine.batches == [["known"], ["x", "y"]]
    assert room.engine.inline_flags == [False, is_inline], "of the first one nothing is known"


@in_room(inline_s=2.0)
async def test_a_batch_of_many_sequences_is_not_inline(room: Room):
    await learn(room)
    room.send("x", cost=cost_of(sequences=MAX_SEQUENCES, flops=1))
    room.send("y", cost=cost_of(sequences=1, flops=1))
    await turns()
    assert room.engine.inline_flags == [False, False]


@in_room(inline_s=2.0)
async def test_the_speed_of_another_lane_does_not_count(room: Room):
    await learn(room)
    await room.send_running("x", lane="b")
    assert room.engine.inline_flags == [False, False]


@on_loop
async def test_after_an_inline_batch_that_took_far_too_long_none_is_inline_for_a_while():
    engine = AtOnce(seconds=1.0)
    async with room_with(engine, inline_s=2.0) as room:
        await ended(room.send("known"))
        engine.seconds = 2.0 * FAR_TOO_LONG + 0.1
        await ended(room.send("stall"))
        engine.seconds = 1.0
        await ended(room.send("next"))
        assert engine.inline_flags == [False, True, False]


@on_loop
async def test_the_time_of_an_inline_pass_that_the_thread_repeats_counts():
    """It failed on the loop, and the engine hands over a future that is not done."""
    engine = AtOnce(seconds=1.0)
    async with room_with(engine, inline_s=2.0) as room:
        for _ in range(WINDOW):
            await ended(room.send("known"))
        engine.seconds, engine.is_open = 2.0 * FAR_TOO_LONG + 0.1, False
        (client,) = await room.send_running("stumbles")
        engine.open()
        assert result_of(await ended(client)) == ("answer", "stumbles")
        engine.seconds = 1.0
        await ended(room.send("next"))
        assert engine.inline_flags[-3:] == [True, True, False]


@on_loop
async def test_a_pass_repeated_in_the_thread_has_the_whole_time_limit():
    engine = AtOnce(seconds=4.0)
    async with room_with(engine, inline_s=8.0, max_compute_s=5.0) as room:
        await ended(room.send("known"))
        engine.is_open = False
        (client,) = await room.send_running("stumbles")
        room.clock.advance(4.9)
        await turns()
        engine.open()
        assert result_of(await ended(client)) == ("answer", "stumbles")


@in_room(inline_s=2.0)
async def test_after_a_failed_inline_batch_none_is_inline_for_a_while(room: Room):
    await learn(room)
    await room.send_running("x")
    room.engine.fail(ValueError("x"))
    await turns()
    await room.send_running("y")
    assert room.engine.inline_flags == [False, True, False]


@in_room()
async def test_a_limit_of_zero_turns_inline_batches_off(room: Room):
    await learn(room)
    await room.send_running("x")
    assert room.engine.inline_flags == [False, False]


async def come_one_after_the_other(room: Room, payloads: list[str], num_turns: int) -> None:
    for payload in payloads:
        room.send(payload)
        for _ in range(num_turns):
            await asyncio.sleep(0)


@pytest.mark.parametrize("num_turns", [1, 2])
@in_room(inline_s=8.0)
async def test_before_an_inline_batch_requests_are_admitted_while_ticks_bring_more(room: Room, num_turns):
    """A request takes two turns of the loop from its socket to the queue."""
    await learn(room)
    await come_one_after_the_other(room, ["u", "v", "w", "x"], num_turns)
    await turns()
    assert room.engine.batches[1:] == [["u", "v", "w", "x"]]


@in_room(inline_s=8.0)
async def test_jobs_of_another_lane_do_not_stop_an_inline_batch_from_growing(room: Room):
    await learn(room)
    room.send("u")
    room.send("large", lane="b", cost=cost_of(flops=10**6))
    await come_one_after_the_other(room, ["v", "w"], num_turns=1)
    await turns()
    assert room.engine.batches[1:] == [["u", "v", "w"]]


@on_loop
async def test_a_request_whose_deadline_passes_before_the_inline_batch_is_not_computed():
    async with room_with(AtOnce(seconds=1.0), max_requests=1) as room:
        first, late = room.send("first"), room.send("late", timeout_s=1.0)
        await turns()
        assert result_of(first) == ("answer", "first")
        assert isinstance(error_of(late), DeadlineExceeded)
        assert room.engine.batches == [["first"]]


@in_room(inline_s=8.0)
async def test_an_inline_batch_starts_after_a_tick_without_a_request(room: Room):
    await learn(room)
    await come_one_after_the_other(room, ["u", "v"], num_turns=5)
    assert room.engine.batches[1:] == [["u"]]


@pytest.mark.parametrize(
    ("limits", "batch"),
    [({"inline_s": 2.0}, ["u", "v", "w"]), ({"inline_s": 8.0, "max_requests": 2}, ["u", "v"])],
    ids=["too long to be waited for", "full"],
)
@on_loop
async def test_a_full_inline_batch_starts_without_another_tick(limits, batch):
    async with Room(**limits) as room:
        await learn(room)
        await come_one_after_the_other(room, ["u", "v", "w", "x", "y"], num_turns=1)
        assert room.engine.batches[1] == batch


@in_room(inline_s=8.0)
async def test_a_request_cancelled_while_others_are_admitted_is_not_computed(room: Room):
    await learn(room)
    client = room.send("x")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    client.cancel()
    await turns()
    assert room.engine.batches == [["known"]]
    room.engine.open()
    assert result_of(await ended(room.send("next"))) == ("answer", "next")


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_between_two_inline_batches_the_loop_admits_new_requests(loop_factory):
    async def main():
        async with room_with(AtOnce(), max_requests=1) as room:
            seen = Counter[int]()
            clients = [room.send(number) for number in range(5)]
            await asyncio.sleep(0)  # they have been admitted
            while not all(client.done() for client in clients):
                seen[len(room.engine.batches)] += 1
                await asyncio.sleep(0)
            assert {seen[number] for number in range(1, 5)} == {TICKS_TO_ARRIVE}

    run(main, loop_factory=loop_factory)


@on_loop
async def test_full_inline_batches_share_a_tick_until_they_have_blocked_the_loop_for_as_long_as_one_may():
    """Under overload a tick takes longer than a batch, and an engine with one batch a tick would idle."""
    engine = AtOnce(seconds=1.0)
    async with room_with(engine, inline_s=3.0, max_requests=1) as room:
        await ended(room.send("known"))
        clients = [room.send(number) for number in range(8)]
        seen = []
        while not all(client.done() for client in clients):
            await asyncio.sleep(0)
            seen.append(len(room.engine.batches) - 1)
        assert list(dict.fromkeys(seen)) == [0, 3, 6, 8]


@on_loop
async def test_an_inline_batch_that_is_not_full_waits_for_a_tick():
    engine = AtOnce(seconds=1.0)
    async with room_with(engine, inline_s=8.0, max_requests=2) as room:
        await ended(room.send("known"))
        for number in range(5):
            room.send(number)
        await asyncio.sleep(0)
        seen = set()
        for _ in range(20):
            await asyncio.sleep(0)
            seen.add(len(room.engine.batches) - 1)
        assert seen == {2, 3}, "two full ones, then the last one alone"


@on_loop
async def test_a_deadline_that_passed_during_an_inline_batch_fails_and_the_others_are_answered():
    async with room_with(AtOnce(seconds=1.0)) as room:
        late, patient = room.send("late", timeout_s=1.0), room.send("patient", timeout_s=1.1)
        await turns()
        assert isinstance(error_of(late), DeadlineExceeded)
        assert "no answer within the 1.000 s" in str(error_of(late))
        assert result_of(patient) == ("answer", "patient")
        assert patient.result().compute_s == 1.0


@on_loop
async def test_a_batch_that_has_ended_refuses_no_request_for_lack_of_time():
    engine = AtOnce(1.0)
    async with room_with(engine, inline_s=2.0) as room:
        await room.send_running("known")
        first = room.batcher.admit("inline", "a", cost_of(), room.clock.now() + 60)
        await first.promise
        assert room.engine.inline_flags == [False, True]
        assert room.batcher.num_queued == room.batcher.num_running == 0
        hurried = room.batcher.admit("hurried", "a", cost_of(), room.clock.now() + 0.5)
        engine.seconds = 0.0
        await hurried.promise
