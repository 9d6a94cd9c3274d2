"""LoopThread: runs an event loop on its own thread, for synchronous callers.

Invariants: submitted work can be cancelled, unlike a thread that blocks on a socket. The thread never keeps the interpreter
alive. It belongs to the process that started it: a fork copies the object but not the thread, so no call there waits for it.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from attention_client.errors import ServiceError

Result = TypeVar("Result")

_FORKED = "this was started before the process was forked; start it again in this process"


class LoopThread:
    """The constructor starts the thread. `stop` runs `shut_down`, which ends the accepted work; then the thread ends."""

    def __init__(self, shut_down: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._shut_down = shut_down
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._stopping = threading.Lock()  # work that was accepted reaches the loop before `shut_down` does
        self._is_stopped = False
        self._thread = threading.Thread(target=_run, args=(self._loop,), name="attention-client", daemon=True)
        self._thread.start()

    @property
    def is_ours(self) -> bool:
        """Whether the thread runs in this process, not in the parent of a fork."""
        return self._pid == os.getpid()

    def submit(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run the coroutine on the loop; cancelling the future cancels it. Raises RuntimeError once stopped, or in a fork."""
        if self.is_ours:  # else the lock may have been held at the fork
            with self._stopping:
                if not self._is_stopped:
                    return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        raise RuntimeError("the client is closed" if self.is_ours else _FORKED)

    def result(self, future: Future[Result]) -> Result:
        """Wait for the result. Raises RuntimeError in a process forked after the start, where no result would come."""
        if not self.is_ours:
            raise RuntimeError(_FORKED)
        try:
            return future.result()
        except ServiceError as error:
            raise error.bare() from error.__cause__  # a copy: the future in this frame keeps the error

    def cancel(self, future: Future[Any]) -> None:
        """Cancel the work. In a forked process this does nothing: the future's lock may have been held at the fork."""
        if self.is_ours:
            future.cancel()

    def stop(self, *, wait: bool = True) -> None:
        """Run `shut_down`, whose error this raises if it waits, and end the thread; a second call only waits for the end."""
        if not self.is_ours:
            return
        ended: Future[None] | None = None
        with self._stopping:
            if not self._is_stopped:
                self._is_stopped = True
                ended = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
                ended.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._loop.stop))
        if wait:
            self._thread.join()
            if ended is not None:
                ended.result()

    async def _end(self) -> None:
        try:
            await self._shut_down()
        finally:
            await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()
