"""Window: many calls, a few at a time, answers in the order of the items.

Laws: at most `window` items are started and not yet handed out, so neither memory nor the service's queue grows with their
number; an item is taken from its iterator only when there is room for it; a consumer who stops early cancels all that is
in flight; an answer that is ready is handed out, where items come asynchronously even while the next one is waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Coroutine, Generator, Iterable
from typing import Any, Protocol, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)


class Pending(Protocol[Result_co]):
    """The part of a future that is needed here."""

    def done(self) -> bool: ...
    def result(self) -> Result_co: ...
    def cancel(self) -> object: ...


def in_order(items: Iterable[Item], start: Callable[[Item], Pending[Result]], window: int) -> Generator[Result]:
    """`start` begins the work on one item; what a future raises is raised at its place."""
    pending: deque[Pending[Result]] = deque()
    try:
        for item in items:
            pending.append(start(item))
            while pending and (len(pending) >= window or pending[0].done()):
                yield pending[0].result()
                pending.popleft()
        while pending:
            yield pending[0].result()
            pending.popleft()
    finally:
        for future in pending:
            future.cancel()


async def in_order_async(
    items: Iterable[Item] | AsyncIterable[Item],
    start: Callable[[Item], Coroutine[Any, Any, Result]],
    window: int,
) -> AsyncGenerator[Result]:
    """The same with tasks; what is cancelled has ended when the generator has."""
    room = asyncio.Semaphore(window)
    pending: deque[asyncio.Task[Result]] = deque()
    news = asyncio.Event()

    async def feed() -> None:
        async with contextlib.aclosing(_each(items)) as source:
            await room.acquire()
            async for item in source:
                pending.append(asyncio.ensure_future(start(item)))
                news.set()
                await room.acquire()

    # A task of its own, so that an item that is long in coming, or never comes, withholds no answer.
    feeding = asyncio.ensure_future(feed())
    feeding.add_done_callback(lambda _: news.set())
    try:
        while pending or not feeding.done():
            if not pending:
                news.clear()
                await news.wait()
                continue
            yield await pending[0]
            pending.popleft()
            room.release()
        await feeding
    finally:
        for task in (feeding, *pending):
            task.cancel()
        await asyncio.gather(feeding, *pending, return_exceptions=True)


async def _each(items: Iterable[Item] | AsyncIterable[Item]) -> AsyncGenerator[Item]:
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item
