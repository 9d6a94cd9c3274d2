"""The decoding queue: large bodies are decoded one at a time, in the order in which they came.

Lives here: who is next, how long it takes until then, and which body is refused because that is too long.
Must not know: what a body is, how it is decoded, HTTP.
Invariants: first come, first decoded; what waits counts in bytes and, by the pace of the last bodies, in seconds; a body that
would be late is refused before it waits, and before it is read where its length is known; a burst may wait for MAX_WAIT_S or
MAX_BODIES, a queue that stands (`congestion.py`) for two bodies and the allowed wait; whoever leaves leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import AsyncIterator

from service.batching.clock import Clock
from service.batching.congestion import Congestion
from service.batching.speed import LONGEST_RETRY_S, WINDOW
from service.errors import DeadlineExceeded, QueueFull

# A longer wait than that helps nobody, except behind a few bodies of the largest size.
MAX_WAIT_S = 0.5
MAX_BODIES = 4
# Until the first body is decoded: nested lists of numbers.
FIRST_RATE = 32 * 2**20
# There is one queue for all bodies; congestion is asked by lane.
_LANE = "bodies"


class DecodingQueue:
    """One for each process; `standing_wait_s` as in QueueLimits."""

    def __init__(self, clock: Clock, standing_wait_s: float) -> None:
        self._clock = clock
        self._congestion = Congestion(standing_wait_s)
        self._turn = asyncio.Lock()  # fair: first come, first served
        self._done: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._num_bodies = 0
        self.num_bytes = 0
        """Of bodies that are here and not decoded yet."""

    def wait_s(self, num_bytes: int) -> float:
        """Seconds until a body of this size that came now would be decoded; 0 where nothing is ahead of it."""
        return (self.num_bytes + num_bytes) / self._rate if self.num_bytes else 0.0

    def check(self, num_bytes: int, left_s: float, most_s: float) -> None:
        """For a body that has come, or is announced: raise DeadlineExceeded where the caller's own deadline, `left_s` from now,
        is sooner than `most_s` and too soon for it, QueueFull where it would be too late for anybody or the queue stands.
        """
        wait_s, now = self.wait_s(num_bytes), self._clock.now()
        if left_s < wait_s and left_s < most_s:
            raise DeadlineExceeded(
                f"with the bodies ahead of this one it takes {wait_s:.3f} s to decode; its deadline is in {left_s:.3f} s"
            )
        stands = self._congestion.standing_s(_LANE, self.num_bytes, now) is not None
        is_long = self._num_bodies >= MAX_BODIES and self.num_bytes > MAX_WAIT_S * self._rate
        if stands or is_long or wait_s > most_s:
            retry_after_s = max(1, math.ceil(min(wait_s, LONGEST_RETRY_S)))
            raise QueueFull(f"{self.num_bytes:,} bytes of bodies wait to be decoded", retry_after_s=retry_after_s)

    @contextlib.asynccontextmanager
    async def turn(self, num_bytes: int) -> AsyncIterator[None]:
        """Entered when all bodies that came before are decoded."""
        self._num_bodies += 1
        self.num_bytes += num_bytes
        try:
            async with self._turn:
                started_at, left = self._clock.now(), self.num_bytes - num_bytes
                self._congestion.dispatched(_LANE, num_bytes, left, self._rate, started_at)
                yield
                # Only of what was decoded to its end; a refusal may come after a few bytes.
                self._done.append((num_bytes, self._clock.now() - started_at))
        finally:
            self._num_bodies -= 1
            self.num_bytes -= num_bytes
            if not self.num_bytes:
                self._congestion.rest()

    @property
    def _rate(self) -> float:
        """Bytes a second over the last bodies."""
        seconds = sum([seconds for _, seconds in self._done])
        return sum([num_bytes for num_bytes, _ in self._done]) / seconds if seconds else FIRST_RATE
