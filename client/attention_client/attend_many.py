"""attend_many: makes many calls, a few at a time, and yields answers in item order; shared by both clients.

Invariants: at most `window` items are started and not yet yielded, so neither memory nor the service's queue grows with the
number of items. An item is taken from its iterator only when the window has room, and after the answers that are ready. A
consumer that stops early cancels everything in flight.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Coroutine, Generator, Iterable
from concurrent.futures import Future
from typing import Any, Literal, TypeVar, get_args

from attention_client.answer import Answer
from attention_client.arrays import Array
from attention_client.errors import InvalidInput, ServiceError
from attention_client.http_transport import HttpTransport
from attention_client.loop_thread import LoopThread
from attention_client.options import check_count, checked_timeout
from attention_client.request import Call, Request, attend_call

DEFAULT_WINDOW = 8

Items = Iterable[Array | Request[Array]]
Outcome = Answer[Array] | ServiceError
OnError = Literal["raise", "yield"]
Item = TypeVar("Item")
Result = TypeVar("Result")


def check_many(items: object, window: int, timeout_s: float | None, on_error: OnError, *kinds: type) -> None:
    """Check the arguments when attend_many is called, not at the first answer. Raises InvalidInput."""
    check_count(window, "window")
    checked_timeout(timeout_s)
    if on_error not in get_args(OnError):
        raise InvalidInput('on_error must be "raise" or "yield"')
    if not isinstance(items, (Iterable, *kinds)):
        raise InvalidInput("items must be an iterable of queries or Requests (AsyncClient: also an async iterable)")


def started(
    http: HttpTransport, layer: str, item: Array | Request[Array], nth: int, timeout_s: float | None, on_error: OnError
) -> Coroutine[Any, Any, Outcome[Array]]:
    """Copy the item's bytes at once, because the caller may reuse the array; return the coroutine that asks."""
    call: Call[Answer[Array]] | ServiceError
    try:
        call = attend_call(layer, item if isinstance(item, Request) else Request(item))
    except ServiceError as error:
        call = error

    async def outcome() -> Outcome[Array]:
        try:
            if isinstance(call, ServiceError):
                raise call
            return await http.ask(call, timeout_s)
        except ServiceError as error:
            error.add_note(f"item {nth} of attend_many")
            if on_error == "raise":
                raise
            return error.bare()  # frames would keep the request for as long as the caller keeps the error

    return outcome()


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


async def in_order_async(
    items: Iterable[Item] | AsyncIterable[Item], start: Callable[[Item], Coroutine[Any, Any, Result]], window: int
) -> AsyncGenerator[Result]:
    """Work like `in_order`, with tasks; the generator ends only after the tasks that it cancels have ended."""
    pending: deque[asyncio.Task[Result]] = deque()
    try:
        async for item in _each(items):
            pending.append(asyncio.ensure_future(start(item)))
            while pending and (len(pending) >= window or pending[0].done()):
                yield await pending[0]
                pending.popleft()
        while pending:
            yield await pending[0]
            pending.popleft()
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


async def _each(items: Iterable[Item] | AsyncIterable[Item]) -> AsyncGenerator[Item]:
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item
