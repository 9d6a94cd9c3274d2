"""Byte budget: bounded whatever comes, and small bodies find room where large ones are refused."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.api.request_context import ByteBudget, Reservation
from service.errors import QueueFull
from service.limits import context_limits
from service.settings import load_settings

MAX = 1000


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 400), st.booleans())))
def test_all_reservations_together_stay_within_the_limit_and_are_released(steps):
    byte_budget = ByteBudget(MAX, "bodies are being received")
    reservations, held = [Reservation(byte_budget) for _ in range(10)], [0] * 10
    for who, num_bytes, ends in steps:
        if ends:
            reservations[who].release()
            held[who] = 0
        try:
            reservations[who].grow(num_bytes)
            held[who] += num_bytes
        except QueueFull:
            held[who] = 0
        assert byte_budget.num_bytes == sum(held) <= MAX
    for reservation in reservations:
        reservation.release()
        reservation.release()
    assert byte_budget.num_bytes == 0


@given(st.lists(st.integers(1, MAX), max_size=40))
def test_no_reservation_takes_more_than_half_of_the_free_bytes(sizes):
    byte_budget = ByteBudget(MAX, "bodies are being received")
    for size in sizes:
        free = MAX - byte_budget.num_bytes
        with contextlib.suppress(QueueFull):
            Reservation(byte_budget).grow(size)
        assert MAX - byte_budget.num_bytes >= free // 2


def test_the_largest_reservation_fits_an_unused_budget_and_an_empty_one_always_fits():
    byte_budget = ByteBudget(MAX, "answers are being sent")
    with pytest.raises(QueueFull):
        Reservation(byte_budget).grow(byte_budget.max_bytes // 2 + 1)
    largest = Reservation(byte_budget)
    largest.grow(byte_budget.max_bytes // 2)
    largest.grow(0)


def test_a_growing_body_is_refused_above_the_free_bytes_and_frees_its_own():
    byte_budget = ByteBudget(MAX, "bodies are being received")
    large, small = Reservation(byte_budget), Reservation(byte_budget)
    large.grow(300)
    large.grow(200)
    small.grow(200)
    with pytest.raises(QueueFull, match="700 of at most 1,000 bytes of bodies are being received"):
        large.grow(1)
    assert byte_budget.num_bytes == 200, "others have the room of a refused body at once"
    small.grow(300)


def test_medium_reservations_leave_a_fifth_free_for_small_ones():
    """A flood of bodies of 0.9 MiB filled all of the budget, and with it the process's memory."""
    byte_budget = ByteBudget(8000, "bodies are being received")
    with contextlib.suppress(QueueFull):
        while True:
            Reservation(byte_budget).grow(100)
    assert 8000 - byte_budget.num_bytes == 8000 // 5
    small = Reservation(byte_budget)
    small.grow(10)


@pytest.mark.parametrize("num_bodies", range(1, 13))
def test_of_bodies_of_the_largest_size_that_arrive_together_at_least_four_fit(num_bodies):
    """None is decoded before all have arrived or are refused. As many as fit, and not one less, are accepted."""
    settings = load_settings()
    byte_budget = ByteBudget(context_limits(settings).intake_bytes, "bodies are being received")
    arriving, piece = [Reservation(byte_budget) for _ in range(num_bodies)], 2**18
    for _ in range(settings.max_body_bytes // piece):
        for reservation in [*arriving]:
            try:
                reservation.grow(piece)
            except QueueFull:
                arriving.remove(reservation)
    assert len(arriving) == min(num_bodies, 4)
