"""attend_many: makes many calls, a few at a time, and yields answers in item order; shared by both clients.

Invariants: at most `window` items are started and not yet yielded, so neither memory nor the service's queue grows with the
number of items. An item is taken from its iterator only when the window has room. A consumer that stops early cancels
everything in flight. With an async iterable, a ready answer is yielded even while the next item is awaited. rich is imported only
for a progress bar, which goes to stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Coroutine, Generator, Iterable, Iterator
from typing import Any, Literal, Protocol, TypeVar, get_args

from attention_client.answer import Answer, read_answer
from attention_client.arrays import Array
from attention_client.errors import InvalidInput, ServiceError
from attention_client.http_transport import HttpTransport
from attention_client.options import check_count, checked_timeout
from attention_client.request import Call, Request, attend_call

DEFAULT_WINDOW = 8

OnError = Literal["raise", "yield"]
Built = tuple[Request[Array], Call] | ServiceError


def check_items(items: object) -> None:
    if not isinstance(items, Iterable):
        raise InvalidInput(
            "items must be queries or Requests in something to iterate over (AsyncClient: also asynchronously)"
        )


def check_many(window: int, timeout_s: float | None, on_error: OnError) -> None:
    """Check the arguments when attend_many is called, not at the first answer. Raises InvalidInput."""
    check_count(window, "window")
    checked_timeout(timeout_s)
    if on_error not in get_args(OnError):
        raise InvalidInput('on_error must be "raise" or "yield"')


def built(layer: str, item: Array | Request[Array]) -> Built[Array]:
    """Copy the item's bytes into a call at once, because the caller may reuse the array for the next item."""
    request = item if isinstance(item, Request) else Request(item)
    try:
        return request, attend_call(layer, request)
    except ServiceError as error:
        return error


async def answered(http: HttpTransport, what: Built[Array], timeout_s: float | None) -> Answer[Array] | ServiceError:
    if isinstance(what, ServiceError):
        return what
    request, call = what
    try:
        return read_answer(await http.ask(call, timeout_s=timeout_s), request)
    except ServiceError as error:
        return error


def settled(outcome: Answer[Array] | ServiceError, number: int, on_error: OnError) -> Answer[Array] | ServiceError:
    if isinstance(outcome, ServiceError):
        outcome.add_note(f"item {number} of attend_many")
        if on_error == "raise":
            raise outcome
    return outcome


Item = TypeVar("Item")
Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)


class Pending(Protocol[Result_co]):
    """The methods of a future that `in_order` uses."""

    def done(self) -> bool: ...
    def result(self) -> Result_co: ...
    def cancel(self) -> object: ...


def in_order(items: Iterable[Item], start: Callable[[Item], Pending[Result]], window: int) -> Generator[Result]:
    """Yield results in item order. `start` begins the work on one item; an error of a future is raised in its position."""
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
    """Work like `in_order`, with tasks; the generator ends only after the tasks that it cancels have ended."""
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

    # A separate task, so that a late or missing item does not delay the answers that are ready.
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


@contextlib.contextmanager
def progress_bar(layer: str, items: Any, *, is_wanted: bool) -> Iterator[Callable[[], None]]:
    """Yield a function to call after each finished item; the bar's total is the length of `items` if it has one."""
    if not is_wanted:
        yield lambda: None
        return
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(layer, total=len(items) if hasattr(items, "__len__") else None)
        yield lambda: bar.advance(task)
