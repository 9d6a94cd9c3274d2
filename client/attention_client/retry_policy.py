"""RetryPolicy: whether to ask again, how long to wait before, and when to stop.

Laws: only what is safe and useful is asked again (calls are pure, so a broken connection is safe too): nobody answered, or a
refusal that says "later"; never a request that is wrong, a fault, or a deadline; a wait is never shorter than Retry-After, is
spread so that callers do not come back in step, and is not begun if the deadline would pass in it. No clock and no
dice of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from attention_client.errors import ConnectionFailed, EngineDown, Refused, ServiceError

FIRST_WAIT_S = 0.1
MAX_WAIT_S = 5.0
SPREAD = 0.5
_TRANSIENT = (ConnectionFailed, Refused, EngineDown)


class Deadline:
    """`timeout_s` seconds from now, for all attempts together; None is never."""

    def __init__(self, timeout_s: float | None, now: Callable[[], float]) -> None:
        self.timeout_s = timeout_s
        self._now = now
        self._end = math.inf if timeout_s is None else now() + timeout_s

    def left_s(self) -> float:
        """Seconds; infinite without a deadline, negative after it."""
        return self._end - self._now()

    def left_ms(self) -> int | None:
        """Whole milliseconds, at least 1; None without a deadline."""
        return None if self.timeout_s is None else max(1, int(self.left_s() * 1000))


class RetryPolicy:
    """The backoff hook that stamina asks after each failed attempt of one call; `draw` gives numbers from 0 to 1."""

    def __init__(self, deadline: Deadline, draw: Callable[[], float]) -> None:
        self._deadline = deadline
        self._draw = draw
        self._num_failures = 0

    def __call__(self, error: BaseException) -> bool | float:
        """Seconds to wait, or False: the error goes to the caller."""
        if not isinstance(error, _TRANSIENT):
            return False
        wait_s = self._wait_s(error)
        self._num_failures += 1
        return wait_s if wait_s < self._deadline.left_s() else False

    def _wait_s(self, error: ServiceError) -> float:
        growing = min(MAX_WAIT_S, FIRST_WAIT_S * 2.0 ** min(self._num_failures, 10))
        return max(growing, error.retry_after_s or 0.0) * (1 + SPREAD * self._draw())
