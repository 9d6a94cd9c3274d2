"""The rate limit: a token bucket, pure, with its invariant over all sequences of arrivals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.api.auth.access import Limiter
from service.errors import RateLimited
from tests.doubles import ManualClock

RATES = st.tuples(st.floats(0.01, 1000), st.integers(1, 50))
GAPS = st.lists(st.floats(0, 20) | st.just(0.0), max_size=100)


@given(RATES, GAPS)
def test_t_seconds_admit_at_most_burst_plus_t_times_the_rate(rate, gaps):
    clock, taken = ManualClock(1e5), [1e5]
    per_s, burst = rate
    limiter = Limiter(per_s, burst, clock.now)
    for gap in gaps:
        clock.advance(gap)
        if limiter.wait_s(b"x") == 0:
            taken.append(clock.now())
    for first in range(1, len(taken)):
        for last in range(first, len(taken)):
            passed = taken[last] - taken[first]
            assert last - first + 1 <= burst + passed * per_s + 1e-3


@given(RATES, GAPS)
def test_a_caller_that_waits_for_retry_after_is_admitted(rate, gaps):
    clock = ManualClock(1e6)
    per_s, burst = rate
    limiter = Limiter(per_s, burst, clock.now)
    for gap in [*gaps, 0.0]:
        clock.advance(gap)
        try:
            limiter.take(b"x")
        except RateLimited as refused:
            wait_s = refused.retry_after_s
        else:
            continue
        assert wait_s is not None
        assert wait_s == int(wait_s) >= 1
        clock.advance(wait_s)
        limiter.take(b"x")


@given(RATES, GAPS)
def test_a_refused_request_costs_no_token(rate, gaps):
    """A client that repeats refused requests gets exactly as much as one that sends a request whenever there is a token."""
    times = [0.0]
    per_s, burst = rate
    eager, patient = (Limiter(per_s, burst, lambda: times[-1]) for _ in range(2))
    now = 0.0
    for gap in gaps:
        times.append(now := now + gap)
        while (wait_s := patient.wait_s(b"x")) == 0:
            assert eager.wait_s(b"x") == 0
        for part in (0.0, 0.25, 0.5, 0.9):
            times.append(now + wait_s * part)
            assert eager.wait_s(b"x") > 0


@pytest.mark.parametrize(("per_s", "waits"), [(10.0, 1), (1.0, 1), (0.5, 2), (0.3, 4), (1 / 60, 60)])
def test_a_refusal_gives_the_whole_seconds_until_the_next_token(per_s, waits):
    limiter = Limiter(per_s, 1, ManualClock().now)
    limiter.take(b"x")
    with pytest.raises(RateLimited) as refused:
        limiter.take(b"x")
    assert refused.value.retry_after_s == waits


def test_each_caller_has_its_own_bucket():
    limiter = Limiter(1, 1, ManualClock().now)
    for caller in (b"a", b"b"):
        limiter.take(caller)
        with pytest.raises(RateLimited):
            limiter.take(caller)
    limiter.keep([b"b", b"c"])
    limiter.take(b"a")  # its bucket was dropped, so it begins with a full one
    with pytest.raises(RateLimited):
        limiter.take(b"b")
