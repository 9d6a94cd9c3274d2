"""attend_many: many calls, a few at a time, answers in the order of the items; shared by both clients.

Invariants: at most `window` items are started and not yet handed out, so neither memory nor the service's queue grows with their
number; an item is taken from its iterator only when there is room for it; a consumer that stops early cancels everything
in flight; a ready answer is handed out, where items come asynchronously even while the next one is awaited; rich is imported
only for a progress bar, which goes to stderr.
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
    """At the call, not at the first answer."""
    check_count(window, "window")
    checked_timeout(timeout_s)
    if on_error not in get_args(OnError):
        raise InvalidInput('on_error must be "raise" or "yield"')


def built(layer: str, item: Array | Request[Array]) -> Built[Array]:
    """The item's bytes, taken at once: the caller may fill the same array anew for the next item."""
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


@contextlib.contextmanager
def progress_bar(layer: str, items: Any, *, is_wanted: bool) -> Iterator[Callable[[], None]]:
    """Gives what to call for each item that is done; the total is the length of `items` where it has one."""
    if not is_wanted:
        yield lambda: None
        return
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(layer, total=len(items) if hasattr(items, "__len__") else None)
        yield lambda: bar.advance(task)
