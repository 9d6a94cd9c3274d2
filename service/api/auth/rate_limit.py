"""Rate limit: bounds how often each caller may send requests, with one token bucket a caller.

Invariants: in t seconds at most burst + t × rate requests of one caller are admitted. A refusal costs no token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import NamedTuple

from service.errors import RateLimited

# Sums of fractions come out slightly below the whole token that they should give.
_EPSILON = 1e-6
_HAIR_S = 1e-9


class Rate(NamedTuple):
    per_s: float
    burst: int


class Bucket:
    """A token bucket, full at first."""

    def __init__(self, rate: Rate, now: float) -> None:
        self._rate = rate
        self._tokens = float(rate.burst)
        self._at = now

    def take(self, now: float) -> float:
        """Take a token and return 0.0, or return the seconds until the next token."""
        tokens = min(float(self._rate.burst), self._tokens + (now - self._at) * self._rate.per_s)
        if tokens < 1 - _EPSILON:
            return (1 - tokens) / self._rate.per_s
        self._tokens, self._at = max(0.0, tokens - 1), now
        return 0.0


class Limiter:
    """Holds one bucket for each caller; `now` returns monotonic seconds."""

    def __init__(self, rate: Rate, now: Callable[[], float]) -> None:
        self._rate = rate
        self._now = now
        self._buckets: dict[bytes, Bucket] = {}

    @property
    def num_buckets(self) -> int:
        return len(self._buckets)

    def take(self, caller: bytes) -> None:
        """Take a token of this caller; raise RateLimited, with the whole seconds until the next token, if there is none."""
        now = self._now()
        bucket = self._buckets.get(caller)
        if bucket is None:
            bucket = self._buckets[caller] = Bucket(self._rate, now)
        if wait_s := bucket.take(now):
            raise RateLimited(
                f"more than {self._rate.per_s:g} requests a second, in bursts of at most {self._rate.burst:,}",
                retry_after_s=max(1, math.ceil(wait_s - _HAIR_S)),
            )

    def keep(self, callers: Collection[bytes]) -> None:
        """Drop the buckets of all other callers."""
        self._buckets = {caller: self._buckets[caller] for caller in callers if caller in self._buckets}
