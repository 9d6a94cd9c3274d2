"""RetryPolicy: decides whether to retry a call, how long to wait first, and when to stop.

Invariants: a call is retried only if there was no answer, the service refused it for now, or its engine is down; never after a
wrong request, a failure or a deadline. Calls are pure, so a retry after a broken connection is safe too. A wait is never shorter
than Retry-After, has jitter so that clients do not retry in step, and is not begun if the deadline would pass in it. The clock
and the random numbers are passed in.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from attention_client.errors import ConnectionFailed, EngineDown, Refused

FIRST_WAIT_S = 0.1
MAX_WAIT_S = 5.0
SPREAD = 0.5
_TRANSIENT = (ConnectionFailed, Refused, EngineDown)
_FOR_EVER_S = 1e9


class Deadline:
    """`timeout_s` seconds from now, for all attempts together; None is no deadline."""

    def __init__(self, timeout_s: float | None, now: Callable[[], float]) -> None:
        self.timeout_s = timeout_s
        self._now = now
        self._end = math.inf if timeout_s is None else now() + timeout_s

    def left_s(self) -> float:
        """Return the seconds left: infinite without a deadline, negative after it."""
        return self._end - self._now()

    def left_ms(self) -> int | None:
        """Return the whole milliseconds left, at least 1; None without a deadline, or with one in decades."""
        left_s = self.left_s()
        return None if left_s > _FOR_EVER_S else max(1, int(left_s * 1000))


class RetryPolicy:
    """Backoff hook of one call, which stamina calls after each failed attempt; `draw` returns numbers from 0 to 1."""

    def __init__(self, deadline: Deadline, draw: Callable[[], float]) -> None:
        self._deadline = deadline
        self._draw = draw
        self._next_wait_s = FIRST_WAIT_S

    def __call__(self, error: BaseException) -> bool | float:
        """Return the seconds to wait before the next attempt, or False to raise the error."""
        if not isinstance(error, _TRANSIENT):
            return False
        wait_s = max(self._next_wait_s, error.retry_after_s or 0.0) * (1 + SPREAD * self._draw())
        self._next_wait_s = min(MAX_WAIT_S, 2 * self._next_wait_s)
        return wait_s if wait_s < self._deadline.left_s() else False
