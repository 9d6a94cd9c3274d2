"""Rate limit: bounds how often each caller may send requests, with one token bucket a caller.

Invariants: in t seconds at most burst + t × rate requests of one caller are admitted. A refusal costs no token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from service.errors import RateLimited

# Sums of floating-point times miss the exact moment by a rounding error.
_EPSILON_S = 1e-7


class Limiter:
    """A bucket is the time at which it will be full again (generic cell rate algorithm); `now` is in monotonic seconds."""

    def __init__(self, rate_per_s: float, burst: int, now: Callable[[], float]) -> None:
        self.rate_per_s, self.burst, self._now = rate_per_s, burst, now
        self._full_at: dict[bytes, float] = {}

    def take(self, caller: bytes) -> None:
        """Take a token of this caller; raise RateLimited, with the whole seconds until the next token, if there is none."""
        if wait_s := self.wait_s(caller):
            raise RateLimited(
                f"more than {self.rate_per_s:g} requests a second, in bursts of at most {self.burst:,}",
                retry_after_s=max(1, math.ceil(wait_s - _EPSILON_S)),
            )

    def wait_s(self, caller: bytes) -> float:
        """Take a token of this caller and return 0.0, or return the seconds until the next token."""
        now, token_s = self._now(), 1 / self.rate_per_s
        full_at = max(now, self._full_at.get(caller, now)) + token_s
        wait_s = full_at - now - self.burst * token_s
        if wait_s > _EPSILON_S:
            return wait_s
        self._full_at[caller] = full_at
        return 0.0

    def keep(self, callers: Collection[bytes]) -> None:
        """Drop the buckets of all other callers."""
        self._full_at = {caller: self._full_at[caller] for caller in callers if caller in self._full_at}
