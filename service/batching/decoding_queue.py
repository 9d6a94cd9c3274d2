"""Decoding queue: large bodies are decoded one at a time, in the order of their arrival.

Independent of what a body is, how it is decoded, and HTTP.
Invariants: First come, first decoded. The queue is measured in seconds, by the rates of the last text and the last binary bodies,
because text takes many times as long as binary bodies of its size. A body that would be late is refused before it waits, and
before it is read if its length is known. A burst may fill MAX_WAIT_S or MAX_BODIES, whichever is more. Under sustained overload
(`Congestion`) the limit is two bodies or WAIT_SHARE of the standing wait, whichever is more. Nothing remains of a body
once its `decoding` block has ended, however it ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from service.batching.admission import LONGEST_RETRY_S, WINDOW, Congestion
from service.errors import DeadlineExceeded, QueueFull
from service.loop_time import Clock

# A longer queue adds latency, not throughput. Fewer than MAX_BODIES large bodies may make the wait longer than MAX_WAIT_S.
MAX_WAIT_S = 0.5
MAX_BODIES = 4
# Part of `standing_wait_s` that a request may spend in this queue: afterwards it waits again, to be computed.
WAIT_SHARE = 0.5
# Bodies that an overloaded queue keeps: one that is decoded and the next.
MIN_BODIES = 2
# Bytes per second, assumed until the first body of a form is decoded: the rate for nested lists of numbers.
FIRST_RATE = 32 * 2**20
# Congestion works by lane; all bodies share one. Its unit of work is a microsecond of decoding.
_LANE = "bodies"
_PER_S = 10**6


@dataclass(slots=True)
class _Form:
    """Bodies of one form, text or binary: the bytes that wait, and sizes and seconds of the last decodes."""

    num_bytes: int = 0
    done: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def seconds(self, num_bytes: int) -> float:
        """Return how long so many bytes likely take to decode."""
        seconds, done_bytes = sum([took for _, took in self.done]), sum([size for size, _ in self.done])
        return num_bytes * seconds / done_bytes if seconds and done_bytes else num_bytes / FIRST_RATE


class DecodingQueue:
    """The decoding queue of one process; `standing_wait_s` as in QueueLimits."""

    def __init__(self, clock: Clock, standing_wait_s: float) -> None:
        self._clock = clock
        self._congestion = Congestion(WAIT_SHARE * standing_wait_s, MIN_BODIES)
        self._lock = asyncio.Lock()  # fair: first come, first served
        self._forms = {is_binary: _Form() for is_binary in (False, True)}
        self.num_bodies = 0
        """Bodies that have arrived and are not decoded yet."""
        self.num_bytes = 0
        """Their bytes."""

    @property
    def _queued_s(self) -> float:
        """Seconds that the waiting bodies likely take."""
        return sum([form.seconds(form.num_bytes) for form in self._forms.values()])

    def wait_s(self, num_bytes: int, *, is_binary: bool = False) -> float:
        """Return seconds until a body of this size that arrived now would be decoded; 0 if nothing is ahead of it."""
        return self._queued_s + self._forms[is_binary].seconds(num_bytes) if self.num_bytes else 0.0

    def check(self, num_bytes: int, left_s: float, most_s: float, *, is_binary: bool = False) -> None:
        """Check a body that has arrived or is announced.

        Raise DeadlineExceeded if the caller's own deadline, in `left_s`, is sooner than `most_s` and the body would miss it.
        Raise QueueFull if the wait exceeds `most_s`, or the queue is long or overloaded.
        """
        wait_s, now = self.wait_s(num_bytes, is_binary=is_binary), self._clock.now()
        if left_s < wait_s and left_s < most_s:
            raise DeadlineExceeded(
                f"with the bodies queued ahead decoding would take {wait_s:.3f} s; the deadline is in {left_s:.3f} s"
            )
        queued_s = self._queued_s
        is_overloaded = self._congestion.refuse(_LANE, int(queued_s * _PER_S), now) is not None
        is_long = self.num_bodies >= MAX_BODIES and queued_s > MAX_WAIT_S
        if is_overloaded or is_long or wait_s > most_s:
            retry_after_s = max(1, math.ceil(min(wait_s, LONGEST_RETRY_S)))
            raise QueueFull(f"{self.num_bytes:,} bytes of bodies wait to be decoded", retry_after_s=retry_after_s)

    @contextlib.asynccontextmanager
    async def decoding(self, num_bytes: int, *, is_binary: bool = False) -> AsyncIterator[None]:
        """Enter once all earlier bodies are decoded."""
        form = self._forms[is_binary]
        self.num_bodies += 1
        self.num_bytes += num_bytes
        form.num_bytes += num_bytes
        try:
            async with self._lock:
                started_at, own_s = self._clock.now(), form.seconds(num_bytes)
                left_s = max(0.0, self._queued_s - own_s)
                self._congestion.dispatched(_LANE, int(own_s * _PER_S), int(left_s * _PER_S), _PER_S, started_at)
                yield
                # Only complete decodes count: a body may be refused after a few bytes.
                form.done.append((num_bytes, self._clock.now() - started_at))
        finally:
            self.num_bodies -= 1
            self.num_bytes -= num_bytes
            form.num_bytes -= num_bytes
            if not self.num_bytes:
                self._congestion.idle(self._clock.now())
