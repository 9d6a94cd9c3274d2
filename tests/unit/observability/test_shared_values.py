"""Shared values: prometheus_client values, kept in memory during a loop tick and written to shared files at its end."""

import asyncio
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.mmap_dict import MmapedDict

from service.observability.shared_values import SharedValues


@pytest.fixture
def opened():
    """Yield a function that makes shared values; close them at the end of the test."""
    with contextlib.ExitStack() as stack:
        yield lambda directory, slot=0: stack.enter_context(contextlib.closing(SharedValues(directory, slot)))


def value_of(values, name="x_total"):
    return values("counter", "x", name, ("layer",), ("a",), "Help")


def in_files(directory, slot=0):
    """Return what another process would read: (file, name in its key) → value."""
    found = {}
    for path in directory.glob(f"*_{slot}.db"):
        for key, value, _, _ in MmapedDict.read_all_values_from_file(str(path)):
            found[path.name, key.split('"')[3]] = value
    return found


def test_changes_of_a_loop_tick_are_in_the_files_at_its_end(tmp_path, opened):
    async def story():
        value = value_of(opened(tmp_path))
        value.inc(2)
        value.inc(0.5)
        assert value.get() == 2.5
        assert in_files(tmp_path)["counter_0.db", "x_total"] == 0
        await asyncio.sleep(0)
        assert in_files(tmp_path)["counter_0.db", "x_total"] == 2.5

    asyncio.run(story())


def test_without_a_loop_every_change_is_in_the_files_at_once(tmp_path, opened):
    value = value_of(opened(tmp_path))
    value.set(7)
    assert in_files(tmp_path)["counter_0.db", "x_total"] == 7


def test_the_next_process_of_a_slot_continues_its_values_and_another_slot_does_not(tmp_path, opened):
    value_of(opened(tmp_path)).inc(3)
    assert value_of(opened(tmp_path)).get() == 3
    assert value_of(opened(tmp_path, 1)).get() == 0


def test_each_mode_of_gauges_has_its_own_file(tmp_path, opened):
    opened(tmp_path, 4)("gauge", "g", "g", (), (), "Help", multiprocess_mode="livesum", pid=1).set(1)
    assert in_files(tmp_path, 4) == {("gauge_livesum_4.db", "g"): 1}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-5, 5)), max_size=30))
def test_sums_hold_all_changes_in_any_division_into_ticks(tmp_path_factory, rollout):
    directory = tmp_path_factory.mktemp("values")

    async def story():
        with contextlib.closing(SharedValues(directory, 0)) as values:
            each = {name: value_of(values, name) for name in "abc"}
            for name, amount in rollout:
                each[name].inc(amount)
                if amount == 0:
                    await asyncio.sleep(0)

    asyncio.run(story())
    expected = {name: sum(amount for one, amount in rollout if one == name) for name in "abc"}
    assert in_files(directory) == {("counter_0.db", name): total for name, total in expected.items()}


def test_unwritten_changes_are_in_the_files_at_the_end(tmp_path):
    async def story():
        with contextlib.closing(SharedValues(tmp_path, 0)) as values:
            value_of(values).inc(4)
            assert in_files(tmp_path)["counter_0.db", "x_total"] == 0

    asyncio.run(story())
    assert in_files(tmp_path)["counter_0.db", "x_total"] == 4
