"""Preemption: a long batch computes in steps, so that other batches compute between them.

Lives here: the points at which a forward pass may be preempted, and the batch that is. Independent of what is computed.
Invariants: A batch computes the same pieces, preempted or not; only the time between two pieces differs. A preempted batch
keeps its thread and its tensors, but not the engine's lock. A dropped batch ends at the point where it was preempted.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

R = TypeVar("R")

# The batch in steps of a thread: each thread has a context of its own.
_batch: ContextVar[Steps[Any] | None] = ContextVar("batch", default=None)


class Dropped(BaseException):
    """Ends a batch that no caller waits for; a BaseException, so that no handler takes it for a failure of the batch."""


def preemption_point() -> None:
    """Preempt the batch here, between two pieces of a forward pass, if its step is over; costs 0.1 µs if it is not."""
    if (steps := _batch.get()) is not None:
        steps.preempt_if_due()


def preempted_s() -> float:
    """Return how long the batch of this thread has been preempted so far, in seconds; 0 outside a batch in steps."""
    return 0.0 if (steps := _batch.get()) is None else steps.preempted_s


class Steps(Generic[R]):
    """One batch on its own thread, in steps: a step ends with the piece that runs when `step_s` is over.

    The batch holds `lock` while it computes; `preempted` is set while it waits for its next step.
    `first` is the future of the first step until the batch resumes. A step's future gives the result, or this object if the
    batch is preempted: then call `resume` or `drop`.
    """

    def __init__(
        self, lock: threading.Lock, step_s: float, preempted: threading.Event, on_preempted: Callable[[], object] = int
    ) -> None:
        self.first: Future[R | Steps[R]] = Future()
        self.preempted_s = 0.0
        self._on_preempted = on_preempted
        self._lock = lock
        self._step_s = step_s
        self._preempted = preempted
        self._step = self.first
        self._resumed = threading.Semaphore(0)
        self._is_dropped = False
        self._due = 0.0

    def run(self, work: Callable[[], R]) -> None:
        """Run the whole batch, on its thread; a batch that was cancelled before it began does nothing."""
        if not self.first.set_running_or_notify_cancel():
            return
        try:
            with self._lock:
                _batch.set(self)
                self._due = time.perf_counter() + self._step_s
                try:
                    result = work()
                finally:
                    _batch.set(None)
        except Dropped as error:
            self._step.set_exception(error.with_traceback(None))  # its frames hold this object and the batch's tensors
        except BaseException as error:  # noqa: BLE001 (the future carries the batch's failure)
            self._step.set_exception(error)
            # The traceback's frames, the pool's too, hold this object: with the error it would keep the tensors until a gc.
            self.first = self._step = Future()
        else:
            self._step.set_result(result)

    def preempt_if_due(self) -> None:
        """Preempt the batch if its step is over, on the batch's thread; raise Dropped if the batch is dropped meanwhile."""
        now = time.perf_counter()
        if now < self._due:
            return
        step, self._step = self._step, Future()
        self._step.set_running_or_notify_cancel()  # so that no caller can cancel it
        self._preempted.set()
        self._lock.release()
        try:
            step.set_result(self)
            self._on_preempted()
            self._resumed.acquire()
        finally:
            self._lock.acquire()
        self.preempted_s += time.perf_counter() - now
        if self._is_dropped:
            raise Dropped
        self._due = time.perf_counter() + self._step_s

    def resume(self) -> Future[R | Steps[R]]:
        """Continue a preempted batch; return the future of its next step."""
        step = self.first = self._step  # the future of the step before holds this object: a cycle
        self._preempted.clear()
        self._resumed.release()
        return step

    def drop(self) -> None:
        """End a preempted batch; its future fails with Dropped."""
        self._is_dropped = True
        self.resume()

    def finish(self) -> None:
        """Cancel a batch that has not begun; let any other run to its end in one step, which a preempted batch begins now."""
        self.first.cancel()
        self._step_s = self._due = math.inf
        self._resumed.release()
