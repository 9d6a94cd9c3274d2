"""Rate: how often one caller may ask, as a token bucket for each.

Laws: no clock of its own; a refusal costs no token and says in whole seconds when there will be one; in t seconds a caller gets
at most burst + t × rate requests through.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import NamedTuple

from service.errors import RateLimited

# Sums of fractions come out a little short of the token that is there.
_EPSILON = 1e-6
_HAIR_S = 1e-9


class Rate(NamedTuple):
    per_s: float
    burst: int


class Bucket:
    """Full at first."""

    def __init__(self, rate: Rate, now: float) -> None:
        self._rate = rate
        self._tokens = float(rate.burst)
        self._at = now

    def take(self, now: float) -> float:
        """0.0 and one token less, or the seconds until the next token."""
        tokens = min(float(self._rate.burst), self._tokens + (now - self._at) * self._rate.per_s)
        if tokens < 1 - _EPSILON:
            return (1 - tokens) / self._rate.per_s
        self._tokens, self._at = max(0.0, tokens - 1), now
        return 0.0


class Limiter:
    """A bucket a caller; `now` is monotonic seconds."""

    def __init__(self, rate: Rate, now: Callable[[], float]) -> None:
        self._rate = rate
        self._now = now
        self._buckets: dict[bytes, Bucket] = {}

    @property
    def num_buckets(self) -> int:
        return len(self._buckets)

    def take(self, caller: bytes) -> None:
        """Raises RateLimited."""
        now = self._now()
        bucket = self._buckets.get(caller)
        if bucket is None:
            bucket = self._buckets[caller] = Bucket(self._rate, now)
        if wait_s := bucket.take(now):
            raise RateLimited(
                f"more than {self._rate.per_s:g} requests a second (bursts of {self._rate.burst:,})",
                retry_after_s=max(1, math.ceil(wait_s - _HAIR_S)),
            )

    def keep(self, callers: Collection[bytes]) -> None:
        """Forgets everybody else."""
        self._buckets = {caller: self._buckets[caller] for caller in callers if caller in self._buckets}
