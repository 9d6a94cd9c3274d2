"""DecodingThread: the one thread in which large bodies are decoded, so that the event loop does not wait for them.

The decoders hold the interpreter lock, so a thread alone frees nobody: after each slice of work the thread lets go of
the lock for a moment, and whoever waits for it (the loop, the compute thread) goes on.

Laws: first come, first served, one at a time; what runs here is a coroutine that waits for nothing but Pace, so one
step runs it to its end; whoever stops waiting for the result stops the work at the next slice; after `close` nothing
runs any more.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from service.wire.pace import hand_over

R = TypeVar("R")

_WORK_S = 0.0005
_PAUSE_S = 0.00002
"""Long enough for another thread to wake up and take the lock; the system makes some 70 µs of it."""


class _Abandoned(Exception):
    """Nobody waits for this work any more."""


class DecodingThread:
    """Made once per process; closed when nothing is decoded any more."""

    def __init__(self, pause: Callable[[float], None] = time.sleep) -> None:
        self._pause = pause
        self._is_closed = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="decoding")

    async def run(self, work: Callable[[], Coroutine[Any, Any, R]]) -> R:
        """What the coroutine made by `work` returns or raises, run in the thread.

        Cancelling the caller ends the work. Raises RuntimeError where `close` came before the result.
        """
        is_abandoned = threading.Event()
        future = self._thread.submit(self._finish, work, is_abandoned)
        try:
            return await asyncio.wrap_future(future)
        except _Abandoned:
            raise RuntimeError("the decoding thread is closed") from None
        finally:
            is_abandoned.set()

    def close(self) -> None:
        """Stops what runs at its next slice and what has not begun, and waits for the thread's end: some milliseconds."""
        self._is_closed.set()
        self._thread.shutdown(wait=True)

    def _finish(self, work: Callable[[], Coroutine[Any, Any, R]], is_abandoned: threading.Event) -> R:
        def stop_if_abandoned() -> None:
            if is_abandoned.is_set() or self._is_closed.is_set():
                raise _Abandoned

        stop_if_abandoned()
        pause_at_s = time.perf_counter() + _WORK_S

        def give_way() -> None:
            nonlocal pause_at_s
            stop_if_abandoned()
            if time.perf_counter() >= pause_at_s:
                self._pause(_PAUSE_S)
                pause_at_s = time.perf_counter() + _WORK_S

        token = hand_over.set(give_way)
        try:
            return _run(work())
        finally:
            hand_over.reset(token)


def _run(coroutine: Coroutine[Any, Any, R]) -> R:
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: R = end.value
        return result
    coroutine.close()
    raise AssertionError("decoding waited for something other than its pace. This is a bug.")
