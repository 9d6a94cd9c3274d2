"""An allowance: bounded whatever comes, and small bodies find room where large ones are refused."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.api.byte_budget import Allowance
from service.errors import QueueFull

MAX = 1000


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 400), st.booleans())))
def test_all_shares_together_never_hold_more_than_the_limit_and_nothing_is_lost(steps):
    allowance = Allowance(MAX, "bodies are being received")
    shares, held = [allowance.share() for _ in range(10)], [0] * 10
    for who, num_bytes, ends in steps:
        if ends:
            shares[who].release()
            held[who] = 0
        with contextlib.suppress(QueueFull):
            shares[who].grow(num_bytes)
            held[who] += num_bytes
        assert allowance.num_bytes == sum(held) <= MAX
    for share in shares:
        share.release()
        share.release()
    assert allowance.num_bytes == 0


@given(st.lists(st.integers(1, MAX), max_size=40))
def test_nobody_takes_more_than_half_of_what_is_free_so_a_small_share_still_finds_room(sizes):
    allowance = Allowance(MAX, "bodies are being received")
    for size in sizes:
        free = MAX - allowance.num_bytes
        with contextlib.suppress(QueueFull):
            allowance.share().grow(size)
        assert MAX - allowance.num_bytes >= free // 2


def test_the_largest_share_fits_an_empty_house_and_nothing_more_is_always_room_enough():
    allowance = Allowance(MAX, "answers are being sent")
    with pytest.raises(QueueFull):
        allowance.share().grow(allowance.max_share + 1)
    largest = allowance.share()
    largest.grow(allowance.max_share)
    largest.grow(0)


def test_a_body_that_grows_is_refused_where_it_would_hold_more_than_is_left():
    allowance = Allowance(MAX, "bodies are being received")
    large, small = allowance.share(), allowance.share()
    large.grow(300)
    large.grow(200)
    with pytest.raises(QueueFull, match="500 bytes of bodies are being received, of 1,000 at most"):
        large.grow(1)
    small.grow(250)
    assert allowance.num_bytes == 750
