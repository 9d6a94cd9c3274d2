"""The intake: bounded whatever comes, and small bodies find room where large ones are refused."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.api.intake import Intake
from service.errors import QueueFull

MAX = 1000


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 400), st.booleans())))
def test_all_shares_together_never_hold_more_than_the_limit_and_nothing_is_lost(steps):
    intake = Intake(MAX)
    shares, held = [intake.share() for _ in range(10)], [0] * 10
    for who, num_bytes, ends in steps:
        if ends:
            shares[who].release()
            held[who] = 0
        with contextlib.suppress(QueueFull):
            shares[who].grow(num_bytes)
            held[who] += num_bytes
        assert intake.num_bytes == sum(held) <= MAX
    for share in shares:
        share.release()
        share.release()
    assert intake.num_bytes == 0


@given(st.lists(st.integers(1, MAX), max_size=40))
def test_a_share_never_holds_more_than_was_free_so_a_small_one_still_finds_room(sizes):
    """After n large ones at least 1/2 to the nth is free."""
    intake = Intake(MAX)
    for size in sizes:
        free = MAX - intake.num_bytes
        with contextlib.suppress(QueueFull):
            intake.share().grow(size)
            assert size <= free
    if intake.num_bytes < MAX:
        intake.share().grow(1)


def test_a_body_that_grows_is_refused_where_it_would_hold_more_than_is_left():
    intake = Intake(MAX)
    large, small = intake.share(), intake.share()
    large.grow(300)
    large.grow(200)
    with pytest.raises(QueueFull, match="500 bytes of bodies are being received and decoded, of 1,000 at most"):
        large.grow(1)
    small.grow(400)
    assert intake.num_bytes == 900
