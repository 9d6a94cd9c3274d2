"""Retry policy: which errors are retried, after how long, and until when."""

import asyncio
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_client import errors
from attention_client.answer import retry_after_s
from attention_client.errors import BadAnswer, ConnectionFailed
from attention_client.http_transport import MAX_WAIT_S, SPREAD, RetryPolicy
from tests.doubles import ManualClock

ASKED_AGAIN = [
    errors.QueueFull("x"), errors.NotReady("x"), errors.Draining("x"), errors.Refused("x"), errors.EngineDown("x"),
    ConnectionFailed("x"),
]  # fmt: skip
NEVER = [
    errors.BadShape("x"), errors.BodyTooLarge("x"), errors.LayerNotFound("x"), errors.ClientTimeout("x"),
    errors.EngineFailed("x"), errors.DeadlineExceeded("x"), BadAnswer("x"), ValueError("x"), KeyboardInterrupt(),
    asyncio.CancelledError(),
]  # fmt: skip


def patience(draw: float = 0.0) -> RetryPolicy:
    return RetryPolicy(lambda: math.inf, lambda: draw)


@pytest.mark.parametrize("error", ASKED_AGAIN, ids=lambda error: error.code)
def test_a_transient_failure_may_be_retried(error):
    error.retry_after_s = None
    assert patience()(error) == 0.1


@pytest.mark.parametrize("error", NEVER, ids=lambda error: type(error).__name__)
def test_a_permanent_failure_may_not_be_retried(error):
    assert patience()(error) is False


def test_waits_double_up_to_a_limit():
    ask = patience()
    waits = [ask(ConnectionFailed("x")) for _ in range(2000)]
    assert waits[:4] == [0.1, 0.2, 0.4, 0.8]
    assert set(waits[6:]) == {MAX_WAIT_S}


@given(st.floats(0, 1), st.floats(0, 3600), st.integers(0, 20))
def test_a_wait_is_never_shorter_than_retry_after_and_never_much_longer(draw, retry_after, before):
    ask, error = patience(draw=draw), errors.QueueFull("x")
    error.retry_after_s = retry_after
    for _ in range(before):
        ask(ConnectionFailed("x"))
    wait = ask(error)
    assert retry_after <= wait <= max(retry_after, MAX_WAIT_S) * (1 + SPREAD)


def test_two_clients_do_not_retry_in_step():
    error = errors.QueueFull("x")
    error.retry_after_s = 4
    assert {patience(draw=draw)(error) for draw in (0.0, 0.5, 1.0)} == {4.0, 5.0, 6.0}


def test_a_wait_that_would_outlast_the_deadline_is_not_begun():
    clock, error = ManualClock(), errors.QueueFull("x")
    error.retry_after_s = 5
    end = clock.now() + 8
    ask = RetryPolicy(lambda: end - clock.now(), lambda: 0.0)
    assert ask(error) == 5
    clock.advance(3.0)
    assert ask(error) is False


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("3", 3.0), (" 0 ", 0.0), ("", None), ("soon", None), ("-1", None), ("1.5", None),
     ("Fri, 31 Dec 1999 23:59:59 GMT", None), ("²", None), ("9" * 400, 999999999.0)],
)  # fmt: skip
def test_retry_after_is_read_as_seconds(value, seconds):
    assert retry_after_s({"retry-after": value}) == seconds
