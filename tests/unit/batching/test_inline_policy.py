"""Inline policy: batches are judged by the rates of their own lane, and run off the loop for a while after a misjudgement."""

from __future__ import annotations

import pytest

from service.batching.admission import WINDOW
from service.batching.runner import FAR_TOO_LONG, MAX_LANES, MAX_SEQUENCES, InlinePolicy


def taught(*seconds: float, lane: str = "a") -> InlinePolicy:
    """A policy that has noted batches of 1,000 flops with these seconds; a batch that ends in 2 s runs inline."""
    inline_policy = InlinePolicy(2.0, overhead_flops=0)
    for took in seconds:
        inline_policy.note(lane, 1000, took, waited_s=0.0)
    return inline_policy


def test_a_lane_without_history_is_not_inline():
    assert not taught().is_inline("a", 0, 1)
    assert not taught(1.0).is_inline("b", 1, 1), "the rates of one lane say nothing of another"


@pytest.mark.parametrize(("flops", "is_inline"), [(2000, True), (2001, False)])
def test_a_batch_is_inline_if_it_ends_in_time_at_the_speed_of_its_lane(flops, is_inline):
    assert taught(1.0).is_inline("a", flops, 1) is is_inline


def test_the_overhead_of_a_batch_counts_as_work():
    """A lane of tiny requests would else seem slow, and a larger one long: 60 rows waited behind 3,000."""
    inline_policy = InlinePolicy(2.0, overhead_flops=900)
    for _ in range(WINDOW):
        inline_policy.note("a", 100, 1.0, waited_s=0.0)
    assert inline_policy.rate("a") == 1000
    assert inline_policy.is_inline("a", 1100, 1)
    assert not inline_policy.is_inline("a", 1101, 1)


def test_the_speed_is_the_median_of_the_last_batches():
    assert taught(1.0, 50.0, 1.0).is_inline("a", 2000, 1), "one stall changes nothing"
    assert not taught(*[1.0] * WINDOW, *[2.0] * WINDOW).is_inline("a", 1001, 1), "the past is forgotten"


@pytest.mark.parametrize(("sequences", "is_inline"), [(MAX_SEQUENCES, True), (MAX_SEQUENCES + 1, False)])
def test_many_sequences_are_never_inline(sequences, is_inline):
    assert taught(1.0).is_inline("a", 0, sequences) is is_inline


def test_a_misjudged_lane_is_not_inline_for_a_while_and_others_are():
    inline_policy = taught(*[1.0] * WINDOW)
    inline_policy.note("b", 1000, 1.0, waited_s=0.0)
    inline_policy.note("a", 1000, 2.0 * FAR_TOO_LONG + 0.1, waited_s=2.0 * FAR_TOO_LONG + 0.1)
    for _ in range(WINDOW):
        assert not inline_policy.is_inline("a", 1, 1)
        inline_policy.note("a", 1000, 1.0, waited_s=0.0)
    assert inline_policy.is_inline("a", 1, 1)
    assert inline_policy.is_inline("b", 1, 1)


def test_a_lane_with_a_failed_batch_is_not_inline_for_a_while():
    inline_policy = taught(1.0)
    inline_policy.failed("a")
    inline_policy.failed("unknown")
    assert not inline_policy.is_inline("a", 1, 1)


def test_a_lane_with_a_partly_inline_batch_is_not_inline_for_a_while():
    inline_policy = taught(*[1.0] * WINDOW)
    inline_policy.note("a", 1000, 1000.0, waited_s=2.0 * FAR_TOO_LONG)
    assert inline_policy.is_inline("a", 1, 1)
    inline_policy.note("a", 1000, 1000.0, waited_s=2.0 * FAR_TOO_LONG + 0.1)
    assert not inline_policy.is_inline("a", 1, 1)


def test_a_batch_of_the_thread_may_take_any_time():
    inline_policy = taught(*[1.0] * WINDOW)
    inline_policy.note("a", 10**6, 1000.0, waited_s=0.0)
    assert inline_policy.is_inline("a", 2000, 1)


def test_batches_of_no_measured_time_make_nothing_inline():
    assert not taught(0.0).is_inline("a", 1, 1)


def test_a_limit_of_zero_makes_nothing_inline_and_keeps_no_history():
    inline_policy = InlinePolicy(0.0)
    inline_policy.note("a", 1000, 1.0, waited_s=0.0)
    assert not inline_policy.is_inline("a", 0, 1)


def test_short_lived_lanes_do_not_fill_the_memory():
    inline_policy = taught(1.0)
    for number in range(MAX_LANES):
        inline_policy.note(number, 1000, 1.0, waited_s=0.0)
    assert len(inline_policy._lanes) <= MAX_LANES
    assert inline_policy.is_inline(MAX_LANES - 1, 2000, 1)
