"""An allowance: bounded whatever comes, and small bodies find room where large ones are refused."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.api.allowance import Allowance
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
def test_a_share_never_holds_more_than_was_free_so_a_small_one_still_finds_room(sizes):
    """After n large ones at least 1/2 to the nth is free."""
    allowance = Allowance(MAX, "bodies are being received")
    for size in sizes:
        free = MAX - allowance.num_bytes
        with contextlib.suppress(QueueFull):
            allowance.share().grow(size)
            assert size <= free
    if allowance.num_bytes < MAX:
        allowance.share().grow(1)


def test_a_body_that_grows_is_refused_where_it_would_hold_more_than_is_left():
    allowance = Allowance(MAX, "bodies are being received")
    large, small = allowance.share(), allowance.share()
    large.grow(300)
    large.grow(200)
    with pytest.raises(QueueFull, match="500 bytes of bodies are being received, of 1,000 at most"):
        large.grow(1)
    small.grow(400)
    assert allowance.num_bytes == 900
