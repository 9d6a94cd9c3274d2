"""A job is settled exactly once, stamps its own times, and a result for a caller that left is no error."""

from __future__ import annotations

import asyncio
import gc
import math

import pytest

from service.batching.job import BatchInfo, Cost, Job
from service.errors import DeadlineExceeded, EngineDown
from tests.doubles import ManualClock, on_loop
from tests.unit.batching.room import stage_of

COST = Cost(sequences=2, tokens=30, cells=100, weights_bytes=7, input_bytes=11, flops=1000)
ALONE = BatchInfo(1, 2, 30)


def new_job(clock: ManualClock | None = None) -> Job[str, str]:
    return Job("x", "lane", COST, deadline=math.inf, clock=clock or ManualClock())


@on_loop
async def test_an_outcome_has_the_result_the_batch_and_the_times_of_the_job():
    clock = ManualClock(5.0)
    job = new_job(clock)
    clock.advance(0.25)
    job.start(ALONE)
    clock.advance(0.5)
    assert job.settle("y")
    outcome = await job.promise
    assert (outcome.result, outcome.batch, outcome.queue_s, outcome.compute_s) == ("y", ALONE, 0.25, 0.5)
    assert (job.accepted_at, job.started_at, job.settled_at) == (5.0, 5.25, 5.75)


@on_loop
async def test_a_retry_changes_the_batch_and_keeps_the_first_start():
    clock = ManualClock(0.0)
    job = new_job(clock)
    job.start(BatchInfo(8, 9, 100))
    clock.advance(1)
    job.start(ALONE)
    clock.advance(1)
    job.settle("y")
    outcome = await job.promise
    assert (outcome.batch, outcome.queue_s, outcome.compute_s) == (ALONE, 0.0, 2.0)


@pytest.mark.parametrize("first", ["settle", "fail"])
@pytest.mark.parametrize("second", ["settle", "fail"])
@on_loop
async def test_only_the_first_ending_counts(first, second):
    clock = ManualClock()
    job = new_job(clock)
    job.start(ALONE)
    end = {"settle": lambda: job.settle("y"), "fail": lambda: job.fail(EngineDown("gone"))}
    assert end[first]() is True
    settled_at = job.settled_at
    clock.advance(1)
    assert end[second]() is False
    assert job.settled_at == settled_at
    if first == "settle":
        assert (await job.promise).result == "y"
    else:
        with pytest.raises(EngineDown):
            await job.promise


@on_loop
async def test_a_result_for_a_cancelled_job_is_dropped_without_an_error():
    job = new_job()
    job.start(ALONE)
    job.promise.cancel()
    assert job.is_settled
    assert job.settle("y") is False
    assert job.settled_at is None, "the caller had left, so the result did not settle it"
    assert job.fail(asyncio.CancelledError()) is True, "its withdrawal ends it"
    assert job.fail(asyncio.CancelledError()) is False
    assert job.settled_at is not None


@on_loop
async def test_a_job_reports_its_phase():
    job = new_job()
    assert (stage_of(job), job.is_settled) == ("queued", False)
    job.start(ALONE)
    assert (stage_of(job), job.is_settled) == ("running", False)
    job.settle("y")
    assert (stage_of(job), job.is_settled) == ("settled", True)


@on_loop
async def test_settling_before_the_start_raises_a_bug_message():
    with pytest.raises(RuntimeError, match="This is a bug"):
        new_job().settle("y")


@pytest.mark.parametrize("end", ["settle", "fail"])
@on_loop
async def test_the_timer_of_a_finished_job_is_cancelled(end):
    clock = ManualClock()
    job = new_job(clock)
    job.timer = clock.call_at(clock.now() + 1, lambda: pytest.fail("called"))
    job.start(ALONE)
    job.settle("y") if end == "settle" else job.fail(DeadlineExceeded("late"))
    assert clock.num_calls == 0
    clock.advance(2)


@on_loop
async def test_an_unawaited_failure_is_not_reported_as_never_retrieved():
    """`run` fails the test on any complaint of the loop."""
    job = new_job()
    job.fail(EngineDown("gone"))
    del job
    gc.collect()
