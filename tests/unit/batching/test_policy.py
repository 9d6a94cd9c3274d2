"""The policy keeps its limits, keeps lane order and always makes progress."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from hypothesis import given
from hypothesis import strategies as st

from service.batching.policy import Lanes, full_batch, size_class
from tests.unit.batching.items import (
    WIDE,
    Item,
    cost,
    costs,
    drained,
    items,
    keeps,
    lanes_of,
    limits,
    some_limits,
)

# What every choice has in common


@given(items, some_limits)
def test_a_batch_keeps_every_limit_except_a_lone_oversize_job(waiting, bounds):
    for batch in drained(lanes_of(waiting), bounds):
        assert keeps(batch, bounds) or len(batch) == 1


@given(items, some_limits)
def test_the_policy_always_progresses_and_takes_each_job_once(waiting, bounds):
    lanes = lanes_of(waiting)
    batches = drained(lanes, bounds)
    assert Counter(item for batch in batches for item in batch) == Counter(waiting)
    assert (lanes.num_jobs, lanes.num_bytes, lanes.num_flops, len(lanes._lanes)) == (0, 0, 0, 0)


@given(items, some_limits)
def test_a_batch_has_one_lane_and_keeps_the_order_of_one_caller(waiting, bounds):
    served: dict[Hashable, list[Item]] = {}
    for batch in drained(lanes_of(waiting), bounds):
        assert len({item.lane for item in batch}) == 1
        served.setdefault(batch[0].lane, []).extend(batch)
    for lane, jobs in served.items():
        assert jobs == [item for item in waiting if item.lane == lane]


@given(items, some_limits)
def test_a_batch_is_as_large_as_its_lane_and_the_limits_allow(waiting, bounds):
    lanes = lanes_of(waiting)
    while lanes.num_jobs:
        jobs = list(lanes.next_jobs)
        batch = lanes.take(bounds)
        assert jobs[: len(batch)] == batch
        assert len(batch) == len(jobs) or not keeps(jobs[: len(batch) + 1], bounds)


@given(items, some_limits, st.builds(Item, st.just("a"), costs))
def test_a_later_job_of_the_same_caller_never_joins_a_full_batch(waiting, bounds, late):
    lanes, with_late = lanes_of(waiting), lanes_of(waiting)
    full = full_batch(lanes.next_jobs, bounds)
    if waiting:
        late = Item(next(iter(lanes.next_jobs)).lane, late.cost)
    with_late.append(late)
    joined = late in with_late.take(bounds)
    assert not (full and joined)


def test_an_empty_queue_gives_no_batch_and_is_not_full():
    assert Lanes().take(WIDE) == []
    assert not full_batch(Lanes().next_jobs, WIDE)


def test_is_full_when_any_limit_is_reached():
    pair = [Item(cost=cost(5, cells=7, weights_bytes=3)), Item(cost=cost(5, cells=7, weights_bytes=3))]
    assert not full_batch(lanes_of(pair).next_jobs, WIDE)
    assert full_batch(lanes_of(pair).next_jobs, limits(max_requests=2))
    assert full_batch(lanes_of(pair).next_jobs, limits(max_tokens=10))
    assert full_batch(lanes_of(pair).next_jobs, limits(max_cells=14))
    assert full_batch(lanes_of(pair).next_jobs, limits(max_weights_bytes=5)), "the second is left out"
    assert not full_batch(lanes_of(pair).next_jobs, limits(max_weights_bytes=6)), "one without weights may still join"


def test_each_limit_cuts_a_batch_where_it_is_reached():
    jobs = [Item(cost=cost(5, cells=7, weights_bytes=3)) for _ in range(4)]
    for bounds in (limits(max_requests=3), limits(max_tokens=15), limits(max_cells=21), limits(max_weights_bytes=9)):
        assert [len(batch) for batch in drained(lanes_of(jobs), bounds)] == [3, 1]


def test_an_oversize_job_runs_alone_and_does_not_block_its_lane():
    jobs = [Item(), Item(cost=cost(99)), Item()]
    assert drained(lanes_of(jobs), limits(max_tokens=10)) == [[jobs[0]], [jobs[1]], [jobs[2]]]


@given(some_limits, costs)
def test_size_class_separates_small_large_and_oversize_jobs(bounds, job):
    fits_eight = all(
        8 * have <= most
        for have, most in (
            (job.tokens, bounds.max_tokens),
            (job.cells, bounds.max_cells),
            (job.weights_bytes, bounds.max_weights_bytes),
        )
    )
    fits = job.tokens <= bounds.max_tokens and job.cells <= bounds.max_cells
    fits = fits and job.weights_bytes <= bounds.max_weights_bytes
    assert size_class(job, bounds) == (0 if fits_eight else 1 if fits else 2)
