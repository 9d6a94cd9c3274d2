"""Limits: what the settings mean to the rooms."""

from __future__ import annotations

import math

import pytest

from service.limits import batch_limits, context_limits, queue_limits, transport_limits
from service.settings import MIB, child_environment, load_settings


@pytest.mark.parametrize(
    ("given", "wait_s"),
    [
        ({}, 0.1),
        ({"queue_capacity": 256}, 0.0),
        ({"queue_capacity": 5000}, 0.0),
        ({"standing_wait_ms": 50}, 0.05),
        ({"queue_capacity": 5000, "standing_wait_ms": 50}, 0.05),
        ({"standing_wait_ms": 0}, 0.0),
    ],
)
def test_load_shedding_is_on_unless_a_setting_bounds_the_queue(monkeypatch, given, wait_s):
    settings = load_settings(**given)
    assert queue_limits(settings).standing_wait_s == wait_s
    for name, value in child_environment(settings).items():
        monkeypatch.setenv(name, value)
    assert queue_limits(load_settings()).standing_wait_s == wait_s, "a child reads the same"


@pytest.mark.parametrize(("queue_bytes", "intake_bytes"), [(1024, 5 * 10**6), (10**9, 25 * 10**7)])
def test_four_bodies_of_the_largest_size_fit_an_unused_budget(queue_bytes, intake_bytes):
    limits = context_limits(load_settings(max_body_bytes=10**6, queue_bytes=queue_bytes))
    assert limits.intake_bytes == intake_bytes
    assert limits.answer_bytes >= 4 * limits.request.max_weights_bytes


@pytest.mark.parametrize("queue_bytes", [128 * MIB, 256 * MIB, 400 * MIB])
def test_one_answer_may_have_half_of_the_queue_or_twice_the_largest_body_and_weights(queue_bytes):
    """As its error says: by default a larger queue alone changes nothing."""
    settings = load_settings(queue_bytes=queue_bytes)
    most = context_limits(settings).answer_bytes // 2
    assert most == max(queue_bytes // 2, 2 * (settings.max_body_bytes + settings.max_weights_bytes))


def test_a_batch_has_limits_of_its_own_on_a_gpu_where_no_setting_gives_them():
    given = load_settings(max_batch_tokens=5000)
    cpu, gpu = (batch_limits(given, is_gpu=is_gpu) for is_gpu in (False, True))
    assert (cpu.max_requests, cpu.max_tokens, cpu.max_cells) == (16, 5000, 2**24)
    assert (gpu.max_requests, gpu.max_tokens, gpu.max_cells) == (128, 5000, 2**28)
    assert context_limits(given, is_gpu=True).max_shared == gpu, "requests are sorted by the size of the same batch"


@pytest.mark.parametrize(
    ("given", "age_s"), [({}, math.inf), ({"connection_max_age_s": 0}, math.inf), ({"connection_max_age_s": 0.5}, 0.5)]
)
def test_a_connection_has_no_greatest_age_unless_a_setting_gives_one(given, age_s):
    assert transport_limits(load_settings(**given)).max_age_s == age_s
