"""Decoding queue: large bodies are decoded one at a time, in the order of their arrival.

Independent of what a body is, how it is decoded, and HTTP.
Invariants: First come, first decoded. The queue is measured in bytes and, by the rate of the last bodies, in seconds. A body that
would be late is refused before it waits, and before it is read if its length is known. A burst may fill MAX_WAIT_S or MAX_BODIES,
whichever is more. Under sustained overload (`Congestion`) the limit is two bodies or WAIT_SHARE of the standing wait, whichever
is more. Nothing remains of a body once its `decoding` block has ended, however it ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import AsyncIterator

from service.batching.admission import LONGEST_RETRY_S, WINDOW, Congestion
from service.errors import DeadlineExceeded, QueueFull
from service.loop_time import Clock

# A longer queue adds latency, not throughput. The wait exceeds MAX_WAIT_S only behind fewer than MAX_BODIES bodies, large ones.
MAX_WAIT_S = 0.5
MAX_BODIES = 4
# Part of `standing_wait_s` that a request may spend in this queue: afterwards it waits again, to be computed.
WAIT_SHARE = 0.5
# Bodies that an overloaded queue keeps: one that is decoded and the next.
MIN_BODIES = 2
# Bytes per second, assumed until the first body is decoded: the rate for nested lists of numbers.
FIRST_RATE = 32 * 2**20
# Congestion works by lane; all bodies share one.
_LANE = "bodies"


class DecodingQueue:
    """The decoding queue of one process; `standing_wait_s` as in QueueLimits."""

    def __init__(self, clock: Clock, standing_wait_s: float) -> None:
        self._clock = clock
        self._congestion = Congestion(WAIT_SHARE * standing_wait_s, MIN_BODIES)
        self._lock = asyncio.Lock()  # fair: first come, first served
        self._done: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self.num_bodies = 0
        """Bodies that have arrived and are not decoded yet."""
        self.num_bytes = 0
        """Their bytes."""

    def wait_s(self, num_bytes: int) -> float:
        """Return seconds until a body of this size that arrived now would be decoded; 0 if nothing is ahead of it."""
        return (self.num_bytes + num_bytes) / self._rate if self.num_bytes else 0.0

    def check(self, num_bytes: int, left_s: float, most_s: float) -> None:
        """Check a body that has arrived or is announced.

        Raise DeadlineExceeded if the caller's own deadline, in `left_s`, is sooner than `most_s` and the body would miss it.
        Raise QueueFull if the wait exceeds `most_s`, or the queue is long or overloaded.
        """
        wait_s, now = self.wait_s(num_bytes), self._clock.now()
        if left_s < wait_s and left_s < most_s:
            raise DeadlineExceeded(
                f"with the bodies queued ahead decoding would take {wait_s:.3f} s; the deadline is in {left_s:.3f} s"
            )
        is_overloaded = self._congestion.refuse(_LANE, self.num_bytes, now) is not None
        is_long = self.num_bodies >= MAX_BODIES and self.num_bytes > MAX_WAIT_S * self._rate
        if is_overloaded or is_long or wait_s > most_s:
            retry_after_s = max(1, math.ceil(min(wait_s, LONGEST_RETRY_S)))
            raise QueueFull(f"{self.num_bytes:,} bytes of bodies wait to be decoded", retry_after_s=retry_after_s)

    @contextlib.asynccontextmanager
    async def decoding(self, num_bytes: int) -> AsyncIterator[None]:
        """Enter once all earlier bodies are decoded."""
        self.num_bodies += 1
        self.num_bytes += num_bytes
        try:
            async with self._lock:
                started_at, left = self._clock.now(), self.num_bytes - num_bytes
                self._congestion.dispatched(_LANE, num_bytes, left, self._rate, started_at)
                yield
                # Only complete decodes count: a body may be refused after a few bytes.
                self._done.append((num_bytes, self._clock.now() - started_at))
        finally:
            self.num_bodies -= 1
            self.num_bytes -= num_bytes
            if not self.num_bytes:
                self._congestion.idle(self._clock.now())

    @property
    def _rate(self) -> float:
        """Bytes per second over the last bodies."""
        seconds = sum([seconds for _, seconds in self._done])
        return sum([num_bytes for num_bytes, _ in self._done]) / seconds if seconds else FIRST_RATE
