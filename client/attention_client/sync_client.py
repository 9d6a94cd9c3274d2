"""Client: calls the attention service from synchronous code, through an AsyncClient on an event loop of its own thread.

Invariants: calls run on an event loop, so deadlines are exact and calls in flight can be cancelled. Threads may share one
client; a forked process gets its own loop. A call that fails raises a ServiceError, of the class that the service raised.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, overload

from attention_client import attend_many as many
from attention_client.answer import Answer
from attention_client.arrays import Array
from attention_client.async_client import AsyncClient
from attention_client.attend_many import Items, OnError, Outcome
from attention_client.loop_thread import LoopThread
from attention_client.options import ClientOptions
from attention_client.request import Request

Given = ParamSpec("Given")
Result = TypeVar("Result")


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
    attention = _plain(AsyncClient.attention)
    attention_json = _plain(AsyncClient.attention_json)
    layers = _plain(AsyncClient.layers)
    layer = _plain(AsyncClient.layer)
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
        window: int = many.DEFAULT_WINDOW,
        timeout_s: float | None = None,
        on_error: OnError = "raise",
    ) -> Generator[Outcome[Array]]:
        """Yield answers in the order of the items, which are queries or Requests, with at most `window` (8) in flight.

        Items are taken one by one as the window has room, so the iterator may be endless. `timeout_s` (seconds) limits each
        item. An item that fails raises in its position, with a note of its number, and cancels the calls in flight. With
        `on_error="yield"` its error is yielded instead of its answer, and the other calls continue. Leaving the loop early
        cancels the calls in flight. Raises InvalidInput for arguments that are not valid.
        """
        many.check_many(items, window, timeout_s, on_error)
        thread, client = self._started()
        numbers = itertools.count()

        def start(item: Array | Request[Array]) -> Future[Outcome[Array]]:
            # This use of `self` keeps the client alive while its answers are awaited, even if the caller drops it.
            self._check_open()
            return thread.submit(many.started(client.http, layer, item, next(numbers), timeout_s, on_error))

        return many.in_order(items, start, thread, window)

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
