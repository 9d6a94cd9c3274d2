"""Client: calls the attention service from synchronous code, through an AsyncClient on an event loop of its own thread.

Invariant: calls run on an event loop, so deadlines are exact, and calls in flight can be cancelled, unlike a thread that blocks
on a socket.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable
from concurrent.futures import Future
from typing import Any, Concatenate, ParamSpec, Self, overload

from attention_client.answer import Answer, Result
from attention_client.arrays import Array
from attention_client.async_client import (
    DEFAULT_WINDOW,
    AsyncClient,
    Item,
    Items,
    OnError,
    Outcome,
    check_many,
    started,
)
from attention_client.errors import ServiceError
from attention_client.options import ClientOptions
from attention_client.request import Request

Given = ParamSpec("Given")

_FORKED = "this was started before the process was forked; start it again in this process"


def _plain(
    method: Callable[Concatenate[AsyncClient, Given], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate[Client, Given], Result]:
    """Return the method of AsyncClient as one of Client, with its types and its docstring."""

    @functools.wraps(method)
    def call(self: Client, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        thread, client = self._started()
        work = thread.submit(method(client, *args, **kwargs))
        try:
            return thread.result(work)
        finally:
            thread.cancel(work)  # an interrupt (Ctrl-C) ends the call

    return call


class Client(ClientOptions):
    """Calls a service; use it as a context manager. Threads may share one, and a forked process may go on using it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # By process id: a lock that another thread holds at a fork stays held in the child.
        self._locks: dict[int, threading.Lock] = {}
        self._running: tuple[LoopThread, AsyncClient] | None = None
        self._is_closed = False

    attend = _plain(AsyncClient.attend)
    attend_json = _plain(AsyncClient.attend_json)
    attend_text = _plain(AsyncClient.attend_text)
    attend_text_json = _plain(AsyncClient.attend_text_json)
    attention = _plain(AsyncClient.attention)
    attention_json = _plain(AsyncClient.attention_json)
    layers = _plain(AsyncClient.layers)
    layer = _plain(AsyncClient.layer)
    models = _plain(AsyncClient.models)
    states = _plain(AsyncClient.states)
    is_ready = _plain(AsyncClient.is_ready)

    @overload
    def attend_many(
        self, layer: str, items: Items[Array], *, window: int = ..., timeout_s: float | None = ...
    ) -> Generator[Answer[Array]]: ...

    @overload
    def attend_many(
        self, layer: str, items: Items[Array], *, on_error: OnError, window: int = ..., timeout_s: float | None = ...
    ) -> Generator[Outcome[Array]]: ...

    def attend_many(
        self,
        layer: str,
        items: Items[Array],
        *,
        window: int = DEFAULT_WINDOW,
        timeout_s: float | None = None,
        on_error: OnError = "raise",
    ) -> Generator[Outcome[Array]]:
        """Yield answers in the order of the items, which are queries or Requests, with at most `window` (8) in flight.

        Items are taken one by one as the window has room, so the iterator may be endless. `timeout_s` (seconds) limits each
        item. An item that fails raises in its position, with a note of its number, and cancels the calls in flight. With
        `on_error="yield"` its error is yielded instead of its answer, and the other calls continue. Leaving the loop early
        cancels the calls in flight. Raises InvalidInput for arguments that are not valid.
        """
        check_many(items, window, timeout_s, on_error)
        thread, client = self._started()
        numbers = itertools.count()

        def start(item: Array | Request[Array]) -> Future[Outcome[Array]]:
            # This use of `self` keeps the client alive while its answers are awaited, even if the caller drops it.
            self._check_open()
            return thread.submit(started(client.http, layer, item, next(numbers), timeout_s, on_error))

        return in_order(items, start, thread, window)

    def close(self) -> None:
        """Close the client: calls in flight raise ConnectionFailed, later ones RuntimeError."""
        with self._lock:
            self._is_closed = True
            if self._running is not None:
                self._running[0].stop()
                self._running = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _lock(self) -> threading.Lock:
        return self._locks.setdefault(os.getpid(), threading.Lock())

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("the client is closed")

    def _started(self) -> tuple[LoopThread, AsyncClient]:
        """Return this process's event loop and its client, which are made at the first call and again after a fork."""
        with self._lock:
            self._check_open()
            if self._running is None or not self._running[0].is_ours:
                client = AsyncClient(**{field.name: getattr(self, field.name) for field in dataclasses.fields(self)})
                thread = LoopThread(client.close)
                weakref.finalize(self, thread.stop, wait=False)
                self._running = thread, client
            return self._running


def in_order(
    items: Iterable[Item], start: Callable[[Item], Future[Result]], thread: LoopThread, window: int
) -> Generator[Result]:
    """Yield results in item order; `start` submits the work on one item to the thread."""
    pending: deque[Future[Result]] = deque()
    try:
        for item in items:
            pending.append(start(item))
            while pending and (len(pending) >= window or pending[0].done()):
                yield thread.result(pending[0])
                pending.popleft()
        while pending:
            yield thread.result(pending[0])
            pending.popleft()
    finally:
        for future in pending:
            thread.cancel(future)


class LoopThread:
    """Runs an event loop on its own thread; the constructor starts it. `stop` runs `shut_down`, which ends the accepted work.

    Invariants: the thread never keeps the interpreter alive. It belongs to the process that started it: a fork copies the object
    but not the thread, so no call there waits for it.
    """

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
        """Run `shut_down`, whose error this raises if it waits, and end the thread; a second call does nothing."""
        if not self.is_ours:
            return
        with self._stopping:
            if self._is_stopped:
                return
            self._is_stopped = True
            ended = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
            ended.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._loop.stop))
        if wait:
            self._thread.join()
            ended.result()

    async def _end(self) -> None:
        try:
            await self._shut_down()
        finally:
            await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()
