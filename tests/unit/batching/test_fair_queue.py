"""A fair queue serves callers equal work, keeps each one's order, and is a plain queue where there is one caller."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from service.batching.job import Work
from service.batching.policy import JOB_OVERHEAD_FLOPS, FairQueue
from tests.unit.batching.items import Item, cost

jobs = st.lists(
    st.builds(Item, st.just("a"), st.builds(cost, flops=st.integers(0, 10**9)), st.sampled_from("xyz")), max_size=30
)


def queue_of(items) -> FairQueue[Item]:
    queue: FairQueue[Item] = FairQueue()
    for item in items:
        queue.append(item)
    return queue


def serve(queue: FairQueue[Item], number: int = 1) -> list[Item]:
    served = list(queue)[:number]
    for item in served:
        assert queue.remove(item, is_served=True)
    return served


@given(jobs)
def test_one_caller_is_served_in_the_order_of_arrival(items):
    for item in items:
        item.caller = None
    queue = queue_of(items)
    assert list(queue) == items
    assert serve(queue, 4) == items[:4]
    assert list(queue) == items[4:]


@given(jobs, st.data())
def test_each_job_is_taken_once_and_callers_keep_their_order(items, data):
    queue = queue_of(items)
    gone = data.draw(st.lists(st.sampled_from(items), unique=True)) if items else []
    for item in gone:
        assert queue.remove(item, is_served=data.draw(st.booleans()))
        assert not queue.remove(item)
        assert item not in queue
    left = [item for item in items if item not in gone]
    assert Counter(queue) == Counter(left)
    assert len(queue) == len(left)
    assert queue.flops == sum(item.cost.flops for item in left)
    for caller in "xyz":
        own = [item for item in left if item.caller == caller]
        assert [item for item in queue if item.caller == caller] == own
        flops, num_callers = sum(item.cost.flops for item in own), len({item.caller for item in left})
        share = Work(min(queue.flops, flops * num_callers), min(len(left), len(own) * num_callers))
        assert queue.fair_share(caller) == share


def test_a_caller_with_few_jobs_does_not_wait_for_all_of_one_with_many():
    flood = [Item(caller="flood") for _ in range(50)]
    late = Item(caller="late")
    queue = queue_of(flood)
    serve(queue, 10)
    queue.append(late)
    assert list(queue).index(late) <= 1


def test_only_callers_that_have_jobs_take_time():
    """The loop walks through the callers several times for each batch; a lane that is never empty sees all keys."""
    queue = queue_of(Item(caller=f"key {number}") for number in range(5))
    for number in range(5, 1000):
        queue.append(Item(caller=f"key {number}"))
        serve(queue)
    assert len(queue._callers) == len(queue) == 5


@given(st.integers(1, 10**9), st.integers(1, 10**9))
def test_busy_callers_get_equal_work(flops_x, flops_y):
    flops = {"x": flops_x, "y": flops_y}
    queue = queue_of(Item(cost=cost(flops=flops[name]), caller=name) for name in "xxyy")
    done = dict.fromkeys("xy", 0)
    for _ in range(60):
        (item,) = serve(queue)
        done[str(item.caller)] += item.cost.flops + JOB_OVERHEAD_FLOPS
        queue.append(Item(cost=item.cost, caller=item.caller))
        assert abs(done["x"] - done["y"]) <= flops_x + flops_y + 2 * JOB_OVERHEAD_FLOPS


def test_an_absent_caller_saves_up_no_credit():
    queue = queue_of([Item(caller="x") for _ in range(20)])
    queue.append(Item(caller="y"))
    serve(queue, 15)
    for _ in range(10):
        queue.append(Item(caller="y"))
    order = [item.caller for item in queue]
    assert order[:8].count("x") >= 3


def test_a_returning_caller_keeps_its_debt():
    queue = queue_of([Item(cost=cost(flops=10**9), caller="x"), Item(caller="y"), Item(caller="y")])
    assert serve(queue)[0].caller == "x"
    queue.append(Item(caller="x"))
    assert [item.caller for item in queue] == ["y", "y", "x"]


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=30), st.data())
def test_a_job_that_leaves_unserved_is_not_charged(flops, data):
    """A caller whose jobs were withdrawn or have expired is served as if it had never sent them."""
    left = [Item(cost=cost(flops=some), caller="x") for some in flops]
    kept = data.draw(st.lists(st.sampled_from(left), unique=True).map(lambda some: sorted(some, key=left.index)))
    others = [Item(cost=cost(flops=10**8), caller="y") for _ in range(30)]
    queue, never_sent = queue_of([*others, *left]), queue_of([*others, *kept])
    for item in left:
        assert item in kept or queue.remove(item)
    late = Item(caller="x")
    for one in (queue, never_sent):
        one.append(late)
    assert list(queue) == list(never_sent)


def test_a_caller_that_withdrew_all_its_jobs_waits_no_longer_for_them():
    queue = queue_of(Item(caller="waits") for _ in range(200))
    serve(queue)
    for item in [Item(caller="leaves") for _ in range(100)]:
        queue.append(item)
        assert queue.remove(item)
    late = Item(caller="leaves")
    queue.append(late)
    assert list(queue).index(late) <= 1
