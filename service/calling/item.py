"""Item: one of those that `attend_many` of both clients asks, from its bytes to its outcome.

Must not know: threads, event loops, in what order items are asked (`window.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

from service.calling.answer import Answer, read_answer
from service.calling.arrays import Array
from service.calling.line import Line
from service.calling.line_options import check_count, checked_timeout
from service.calling.request import Call, Request, attend_call
from service.errors import InvalidInput, ServiceError

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


async def answered(line: Line, what: Built[Array], timeout_s: float | None) -> Answer[Array] | ServiceError:
    if isinstance(what, ServiceError):
        return what
    request, call = what
    try:
        return read_answer(await line.ask(call, timeout_s=timeout_s), request)
    except ServiceError as error:
        return error


def settled(outcome: Answer[Array] | ServiceError, number: int, on_error: OnError) -> Answer[Array] | ServiceError:
    if isinstance(outcome, ServiceError):
        outcome.add_note(f"item {number} of attend_many")
        if on_error == "raise":
            raise outcome
    return outcome
