"""Speed: forecasts when a job will be answered; InlinePolicy decides which batches the loop's thread computes.

Independent of clocks, jobs and the engine.
Invariants: Before the first batch there is no forecast. Retry-After follows the mean rate. A refusal for lack of time follows the
median rate, so that a single stall (a page fault, a paused machine) refuses nothing. Small batches predict large ones badly, and
the reverse, so a forecast is the shorter of that by work and that by number of jobs. If nothing is ahead there is no forecast
either, so a request that only a guess calls late is tried.

Invariants of the inline policy: A batch is judged by the rates of its own lane's last batches, because their times include what
flops do not show of a layer or a dtype. A lane has no inline batch before its first batch has run. Flops predict many small
sequences worst, so such batches never run inline. At most one batch in seventeen is misjudged: after a wait far too long, or a
failed batch, the next sixteen batches of that lane do not run inline.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Hashable
from typing import NamedTuple

# Work charged for every batch besides its jobs' flops. One token through a 512-wide layer (2 MFLOP) took 0.17 ms on two
# cores that do 170 GFLOP/s, so a batch costs about 2**24 flops however small it is. Without this charge, a lane of tiny
# jobs would be owed millions of batches for one large batch of another lane.
BATCH_OVERHEAD_FLOPS = 2**24
WINDOW = 16  # batches: enough for a mixture of sizes, few enough to follow a change of load
SHORTEST_S = 1e-6  # a coarse clock may measure 0
LONGEST_RETRY_S = 60


class Work(NamedTuple):
    """An amount of work, in so many jobs."""

    flops: int
    num_jobs: int


class Speed:
    """The rates of the last batches, and the batch that runs."""

    __slots__ = ("_batch_s", "_batches", "_began", "_charge_rate", "_rate", "_running", "_s_a_job")

    def __init__(self) -> None:
        self._batches: deque[tuple[Work, float]] = deque(maxlen=WINDOW)
        self._rate = self._charge_rate = self._s_a_job = self._batch_s = 0.0
        self._running = Work(0, 0)
        self._began = 0.0

    @property
    def rate(self) -> float:
        """Flops per second of the median batch; 0 before the first."""
        return self._rate

    def begin(self, work: Work, now: float) -> None:
        """Record that a batch begins."""
        self._running, self._began = work, now

    def rest(self) -> None:
        """Record that nothing runs."""
        self._running = Work(0, 0)

    def note(self, work: Work, seconds: float) -> None:
        """Record how long a batch took."""
        self._batches.append((Work(max(work.flops, 1), max(work.num_jobs, 1)), max(seconds, SHORTEST_S)))
        # Lists, not generators: those would cost a call for each item, after every batch.
        self._rate = statistics.median_low([work.flops / took for work, took in self._batches])
        charges = [(work.flops + BATCH_OVERHEAD_FLOPS) / took for work, took in self._batches]
        self._charge_rate = statistics.median_low(charges)
        self._s_a_job = statistics.median_low([took / work.num_jobs for work, took in self._batches])
        self._batch_s = statistics.median_low([took for _, took in self._batches])

    def charge_of(self, seconds: float) -> float:
        """Return the flops charged for batches that take so long together, overheads included; 0 before the first batch."""
        return self._charge_rate * seconds

    def less(self, work: Work, seconds: float) -> Work:
        """Return what is left of a batch after that time."""
        return Work(max(0, work.flops - int(self._rate * seconds)), work.num_jobs)

    def retry_after_s(self, flops: int) -> int:
        """Return whole seconds until that much queued work is likely done, at least 1 and at most 60."""
        if not self._batches:
            return 1
        rate = sum(work.flops for work, _ in self._batches) / sum(seconds for _, seconds in self._batches)
        return max(1, math.ceil(min(flops / rate, LONGEST_RETRY_S)))

    def is_sure_in(self, left_s: float, flops: int) -> bool:
        """Whether `finish_s` is less than `left_s` even if all queued `flops` and the whole running batch come first."""
        return self._batch_s + (self._running.flops + flops) / (self._rate or math.inf) < left_s

    def finish_s(self, flops: int, ahead: Work, beside: Work, now: float, most_left_s: float = math.inf) -> float:
        """Return seconds until a job of `flops` is likely answered, with `ahead` to be done before it and `beside` in its lane.

        The sum of what is left of the running batch (at most `most_left_s`), the work ahead, and the job's own batch. Other
        waiting jobs fill that batch up to the usual length. 0 if nothing is known or nothing is ahead.
        """
        if not self._batches or not (ahead.num_jobs or self._running.num_jobs):
            return 0.0
        passed_s, rate, s_a_job = now - self._began, self._rate, self._s_a_job
        left_s = min(self._running.flops / rate - passed_s, most_left_s)
        by_work = self._finish_s(left_s, ahead.flops / rate, flops / rate, beside.flops / rate)
        left_s = min(self._running.num_jobs * s_a_job - passed_s, most_left_s)
        by_number = self._finish_s(left_s, ahead.num_jobs * s_a_job, s_a_job, beside.num_jobs * s_a_job)
        return min(by_work, by_number)

    def _finish_s(self, left_s: float, ahead_s: float, own_s: float, beside_s: float) -> float:
        return max(0.0, left_s) + ahead_s + max(own_s, min(self._batch_s, own_s + beside_s))


MAX_SEQUENCES = 64
# A paused machine doubles the time of one batch in a hundred; a misjudged batch took ten times as long and more.
FAR_TOO_LONG = 3
# Layers come and go, and each has few lanes; above this number all records are dropped, doubts too.
MAX_LANES = 1024


class _Pace:
    """The rates of the last batches of one lane."""

    __slots__ = ("doubts", "rate", "rates")

    def __init__(self) -> None:
        self.rates: deque[float] = deque(maxlen=WINDOW)
        self.rate = 0.0
        self.doubts = 0


class InlinePolicy:
    """A batch runs inline if it likely ends in `inline_s`; with 0 none does."""

    __slots__ = ("_inline_s", "_lanes")

    def __init__(self, inline_s: float) -> None:
        self._inline_s = inline_s
        self._lanes: dict[Hashable, _Pace] = {}

    def is_inline(self, lane: Hashable, flops: int, sequences: int) -> bool:
        """Whether a batch of this lane, with that much work in that many sequences, runs inline."""
        pace = self._lanes.get(lane)
        if pace is None or pace.doubts or sequences > MAX_SEQUENCES:
            return False
        return flops <= pace.rate * self._inline_s

    def note(self, lane: Hashable, flops: int, seconds: float, *, waited_s: float) -> None:
        """Record how long a batch of this lane took, and for how much of that the loop waited."""
        if not self._inline_s:
            return
        pace = self._lanes.get(lane) or self._begin(lane)
        if waited_s > FAR_TOO_LONG * self._inline_s:
            pace.doubts = WINDOW  # so many batches run off the loop before one runs inline again
        elif pace.doubts:
            pace.doubts -= 1
        pace.rates.append(flops / seconds if seconds else 0.0)
        pace.rate = statistics.median_low(pace.rates)

    def failed(self, lane: Hashable) -> None:
        """Record that a batch of this lane failed: how long the loop waited for it is unknown."""
        if (pace := self._lanes.get(lane)) is not None:
            pace.doubts = WINDOW

    def _begin(self, lane: Hashable) -> _Pace:
        if len(self._lanes) >= MAX_LANES:
            self._lanes.clear()
        pace = self._lanes[lane] = _Pace()
        return pace
