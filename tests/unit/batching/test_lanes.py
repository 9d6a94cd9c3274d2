"""Lanes keep count of what waits, and share the engine by the work each was served."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from service.batching.policy import BATCH_OVERHEAD_FLOPS, Lanes
from tests.unit.batching.items import (
    WIDE,
    Item,
    cost,
    drained,
    items,
    lanes_of,
    limits,
)


@given(items, st.data())
def test_a_job_can_be_removed_from_anywhere_once(waiting, data):
    lanes = lanes_of(waiting)
    gone = data.draw(st.lists(st.sampled_from(waiting), unique=True)) if waiting else []
    for item in gone:
        assert lanes.remove(item)
        assert not lanes.remove(item)
    left = [item for item in waiting if item not in gone]
    assert lanes.num_jobs == len(left)
    assert lanes.num_bytes == sum(item.cost.input_bytes for item in left)
    assert lanes.num_flops == sum(item.cost.flops for item in left)
    assert len(lanes._lanes) == len({item.lane for item in left}), "empty lanes disappear"
    for lane in "abcd":
        own = sum(item.cost.flops for item in left if item.lane == lane)
        assert lanes.ahead(lane).flops == min(lanes.num_flops, own * len(lanes._lanes))
    assert Counter(lanes.clear()) == Counter(left)
    assert (lanes.num_jobs, lanes.num_bytes, lanes.num_flops, len(lanes._lanes)) == (0, 0, 0, 0)


def test_the_work_ahead_is_that_of_the_lane_and_as_much_for_each_other_lane():
    lanes = lanes_of([Item("a", cost(flops=10)), Item("a", cost(flops=10)), Item("b", cost(flops=500))])
    assert lanes.ahead("a").flops == 40
    assert lanes.ahead("b").flops == 520, "never more than there is"
    assert lanes.ahead("new").flops == 0, "a new lane is next but for ties"


# Shares


def test_where_each_sequence_is_charged_a_lane_of_many_sequences_gets_fewer_batches():
    """On a GPU each takes launches, whatever its flops."""
    lanes: Lanes[Item] = Lanes(flops_per_sequence=10 * BATCH_OVERHEAD_FLOPS)
    for _ in range(20):
        lanes.append(Item("many", cost()._replace(sequences=9)))
        lanes.append(Item("one", cost()))
    served = [batch[0].lane for batch in itertools.islice(drained(lanes, limits(max_requests=1)), 22)]
    assert Counter(served) == {"many": 3, "one": 19}, "91 units of work each, and 11"


@given(st.integers(1, 10**10), st.integers(1, 10**10), st.integers(1, 5), st.integers(1, 5))
def test_two_busy_lanes_get_equal_shares(flops_a, flops_b, batch_a, batch_b):
    """Start-time fair queueing: the work served differs by at most one batch of each."""
    lanes: Lanes[Item] = Lanes()
    bounds = limits(max_requests=max(batch_a, batch_b))
    most = {
        "a": bounds.max_requests * flops_a + BATCH_OVERHEAD_FLOPS,
        "b": bounds.max_requests * flops_b + BATCH_OVERHEAD_FLOPS,
    }
    served = Counter[Hashable]({"a": 0, "b": 0})
    for _ in range(60):
        for lane, flops in (("a", flops_a), ("b", flops_b)):
            while len(lanes.jobs(lane)) < bounds.max_requests:
                lanes.append(Item(lane, cost(flops=flops)))
        batch = lanes.take(bounds)
        served[batch[0].lane] += sum(item.cost.flops for item in batch) + BATCH_OVERHEAD_FLOPS
        assert abs(served["a"] - served["b"]) <= most["a"] + most["b"]


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 10**8)), min_size=1, max_size=150), st.integers(1, 3))
def test_no_lane_starves(arrivals, max_requests):
    """Whatever comes and goes, a waiting lane is served within a number of batches known beforehand.

    While it waits, virtual time stays at or below its start, which is at most one batch ahead; every batch of another
    lane moves that lane on by at least the overhead.
    """
    lanes: Lanes[Item] = Lanes()
    bounds = limits(max_requests=max_requests)
    largest = max_requests * 10**8 + BATCH_OVERHEAD_FLOPS
    bound = 4 * (-(-largest // BATCH_OVERHEAD_FLOPS) + 1)
    waited: Counter[Hashable] = Counter()
    for lane, flops in arrivals:
        lanes.append(Item(lane, cost(flops=flops)))
        batch = lanes.take(bounds)
        waited[batch[0].lane] = 0
        for other in "abcd":
            if lanes.jobs(other) and other != batch[0].lane:
                waited[other] += 1
                assert waited[other] <= bound


@given(st.integers(1, 30), st.integers(1, 10**9))
def test_a_new_lane_waits_for_at_most_one_batch_of_each_other_lane(num_batches, flops):
    """Q12."""
    lanes: Lanes[Item] = Lanes()
    for lane in "abc":
        for _ in range(num_batches + 2):
            lanes.append(Item(lane, cost(flops=flops)))
    for _ in range(num_batches):
        lanes.take(limits(max_requests=1))
    odd = Item("odd", cost(flops=10**15))
    lanes.append(odd)
    batches = [lanes.take(limits(max_requests=1)) for _ in range(4)]
    assert [odd] in batches
    assert max(Counter(batch[0].lane for batch in batches).values()) == 1


def test_a_new_lane_gets_no_credit_for_the_past():
    """It starts now, not at zero: it is not owed the work of the past."""
    lanes: Lanes[Item] = Lanes()
    one = limits(max_requests=1)
    for _ in range(200):
        lanes.append(Item("old"))
    for _ in range(100):
        lanes.take(one)
    for _ in range(50):
        lanes.append(Item("new"))
    order = [lanes.take(one)[0].lane for _ in range(20)]
    assert Counter(order) == {"old": 10, "new": 10}


def test_a_returning_lane_keeps_its_debt():
    """Else one heavy request at a time would get a batch for each light one of the others."""
    lanes: Lanes[Item] = Lanes()
    one = limits(max_requests=1)
    heavy = 9 * BATCH_OVERHEAD_FLOPS
    for _ in range(40):
        lanes.append(Item("light", cost(flops=0)))
    order = []
    for _ in range(30):
        if not lanes.jobs("heavy"):
            lanes.append(Item("heavy", cost(flops=heavy)))
        order.append(lanes.take(one)[0].lane)
    assert order.count("heavy") == 3, "10 light batches cost what one heavy batch does"


def test_tiny_jobs_do_not_get_a_million_batches_for_one_large_batch():
    lanes: Lanes[Item] = Lanes()
    one = limits(max_requests=1)
    order = []
    for _ in range(200):
        for lane, flops in (("tiny", 1), ("large", 10 * BATCH_OVERHEAD_FLOPS)):
            if not lanes.jobs(lane):
                lanes.append(Item(lane, cost(flops=flops)))
        order.append(lanes.take(one)[0].lane)
    gaps = [later - earlier for earlier, later in pairwise(i for i, lane in enumerate(order) if lane == "large")]
    assert gaps
    assert max(gaps) <= 13


def test_debts_are_forgotten_once_paid_and_all_of_them_at_rest():
    lanes: Lanes[Item] = Lanes()
    for number in range(1000):
        lanes.append(Item(f"lane {number}", cost(flops=number)))
    drained(lanes, WIDE)
    assert len(lanes._lanes) == 0
    lanes.append(Item("waits"))
    lanes.reset_shares()
    assert lanes.num_jobs == 1, "rest is for an empty room and else changes nothing"
    assert lanes._debts
    lanes.clear()
    lanes.reset_shares()
    assert not lanes._debts

    for number in range(1000):  # a lane that always waits moves virtual time on, so the debts of passers-by are dropped
        lanes.append(Item("steady"))
        lanes.append(Item(f"lane {number}"))
        lanes.take(WIDE)
        lanes.take(WIDE)
        assert len(lanes._debts) <= 4
