"""Preemption: a long batch computes in steps, and others compute between them.

Lives here: the points at which a forward pass may stop for a while, and the batch that does.
Must not know: what is computed, who computes in between, why.
Invariants: what is computed, and in which pieces, is the same whether it stops or not: only the time between two pieces
differs; a stopped batch keeps its thread and its tensors, and nothing of the engine; a batch that was dropped ends at its next
point.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

R = TypeVar("R")

_of_thread = threading.local()


class Dropped(BaseException):
    """Nobody waits for this batch any more. No Exception, so that no handler takes it for a failure of the batch."""


def preemption_point() -> None:
    """Between two pieces of a forward pass: stop here if it is time to. It costs 0.1 µs where nothing is to be stopped."""
    steps: Steps[object] | None = getattr(_of_thread, "steps", None)
    if steps is not None:
        steps.stop_if_due()


def stopped_s() -> float:
    """How long the batch of this thread has been stopped so far, in seconds; 0 outside a batch in steps."""
    steps: Steps[object] | None = getattr(_of_thread, "steps", None)
    return 0.0 if steps is None else steps.stopped_s


class Steps(Generic[R]):
    """One batch on a thread of its own, in steps of `step_s` and what is left of the piece then.

    `turn` is held while it computes; `tell` hears that it has stopped, and that it goes on; `first` is the future of its first
    step. A step's future gives the batch's result, or this object where the batch has stopped: then `resume` or `drop` it.
    """

    def __init__(self, turn: threading.Lock, step_s: float, tell: Callable[[bool], None]) -> None:
        self.first: Future[R | Steps[R]] = Future()
        self.stopped_s = 0.0
        self._turn = turn
        self._step_s = step_s
        self._tell = tell
        self._step = self.first
        self._goes_on = threading.Semaphore(0)
        self._is_dropped = False
        self._due = 0.0

    def run(self, work: Callable[[], R]) -> None:
        """On the thread: all of it; a batch that was called off before it began does nothing."""
        if not self.first.set_running_or_notify_cancel():
            return
        try:
            with self._turn:
                _of_thread.steps = self
                self._due = time.perf_counter() + self._step_s
                try:
                    result = work()
                finally:
                    _of_thread.steps = None
        except BaseException as error:  # noqa: BLE001 (a batch's failure is its future's)
            self._step.set_exception(error)
        else:
            self._step.set_result(result)

    def stop_if_due(self) -> None:
        """On the thread; raises Dropped."""
        now = time.perf_counter()
        if now < self._due:
            return
        step, self._step = self._step, Future()
        self._step.set_running_or_notify_cancel()  # so that nobody can call it off
        self._tell(True)
        self._turn.release()
        try:
            step.set_result(self)
            self._goes_on.acquire()
        finally:
            self._turn.acquire()
        self.stopped_s += time.perf_counter() - now
        if self._is_dropped:
            raise Dropped
        self._due = time.perf_counter() + self._step_s

    def resume(self) -> Future[R | Steps[R]]:
        """The next step of a batch that has stopped."""
        step = self._step
        self._tell(False)
        self._goes_on.release()
        return step

    def drop(self) -> None:
        """End a batch that has stopped; its future fails with Dropped."""
        self._is_dropped = True
        self.resume()

    def finish(self) -> None:
        """From now on it does not stop, and goes on if it has."""
        self._step_s = self._due = math.inf
        self._goes_on.release()
