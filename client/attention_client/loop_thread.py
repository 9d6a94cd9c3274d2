"""LoopThread: runs an event loop on its own thread, for synchronous callers.

Invariants: submitted work can be cancelled, unlike a thread that blocks on a socket. The thread never keeps the interpreter
alive. It belongs to the process that started it: a fork copies the object but not the thread, and must not touch the loop.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from attention_client.errors import ConnectionFailed

Result = TypeVar("Result")


class Work(Generic[Result]):
    """A submitted coroutine's future; in a forked process `result` raises, because its answer never arrives there."""

    def __init__(self, thread: LoopThread, future: Future[Result]) -> None:
        self._thread = thread
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def result(self) -> Result:
        self._thread.check_ours()
        return self._future.result()

    def cancel(self) -> None:
        if self._thread.is_ours:
            self._future.cancel()


class LoopThread:
    """The constructor starts the thread; `farewell` runs on the loop last, after all work has ended."""

    def __init__(self, farewell: Callable[[], Awaitable[None]]) -> None:
        self._farewell = farewell
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._started = threading.Event()
        self._closing = threading.Lock()  # between submit and stop: accepted work becomes a task before the loop stops
        self._is_closed = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="attention-client", daemon=True)
        self._thread.start()
        self._started.wait()

    @property
    def is_ours(self) -> bool:
        """Whether the thread runs in this process, not in the parent of a fork."""
        return self._pid == os.getpid()

    def check_ours(self) -> None:
        """Raise RuntimeError in a process forked after the start."""
        if not self.is_ours:
            raise RuntimeError("this was begun before the process was forked; begin it anew in this process")

    def submit(self, coroutine: Coroutine[Any, Any, Result]) -> Work[Result]:
        """Run the coroutine on the loop. A cancel of the work cancels it; a stop makes it raise ConnectionFailed."""
        assert self._loop is not None, "the thread has started. This is a bug."
        if not self.is_ours:
            coroutine.close()
        self.check_ours()
        with self._closing:
            if not self._is_closed:
                return Work(self, asyncio.run_coroutine_threadsafe(self._until_stopped(coroutine), self._loop))
        coroutine.close()
        raise RuntimeError("the client is closed")

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Wait for the coroutine's result; an interrupt (Ctrl-C) cancels the coroutine."""
        submitted = self.submit(coroutine)
        try:
            return submitted.result()
        finally:
            submitted.cancel()

    def stop(self, *, wait: bool = True) -> None:
        """Cancel the work that still runs and end the thread; a second call does nothing."""
        if not self.is_ours or not self._thread.is_alive():
            return
        assert self._loop is not None, "the thread has started. This is a bug."
        assert self._stopping is not None, "the thread has started. This is a bug."
        try:
            self._loop.call_soon_threadsafe(self._stopping.set)
        except RuntimeError:
            return  # the loop has closed meanwhile
        if wait and threading.current_thread() is not self._thread:
            self._thread.join()

    async def _main(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        self._started.set()
        await self._stopping.wait()
        with self._closing:
            self._is_closed = True
        for _ in range(2):  # submitted work becomes a task in one iteration of the loop and starts in the next
            await asyncio.sleep(0)
        # Cancel before `farewell`: otherwise a call would see its connection vanish and retry.
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._farewell()

    async def _until_stopped(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        try:
            return await coroutine
        except asyncio.CancelledError:
            if self._stopping is not None and self._stopping.is_set():
                raise ConnectionFailed("the client was closed before the answer came") from None
            raise
