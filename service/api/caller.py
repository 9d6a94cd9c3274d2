"""Caller: the client as the server sees it: the body received so far; a disconnect cancels the request's task.

Invariants: our own transport reports both through the scope (`CALLER`), without a task or a timer. Any other ASGI server reports
them through `receive`, at the cost of a task. A disconnect is reported once, on the event loop.

CancelOnDisconnect: cancels the task that serves a caller when the caller disconnects, and raises ClientGone.
Invariant: it ends only its own cancellation; one from outside (shutdown) goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from service.http.asgi import CALLER, ClientGone, Message, Receive, Scope

Part = bytes | bytearray | memoryview


class Caller(Protocol):
    async def receive(self) -> Message:
        """Return the next ASGI message: a part of the body, or the disconnect."""

    def take_body(self) -> list[Part] | None:
        """Return the whole body in parts if it is here and still unread; after that, `receive` gives only the disconnect."""

    def when_come(self, tell: Callable[[int], object] | None) -> None:
        """Call `tell` with the number of body bytes that are here, and again with that of each later part; None cancels this.

        If `tell` raises a ServiceError, `receive` raises it, or this method does.
        """

    def when_gone(self, tell: Callable[[], object] | None) -> None:
        """Call `tell` when the caller disconnects before its answer is complete, at once if it already has; None cancels this.

        Call this only after the body has been received.
        """


def caller_of(scope: Scope, receive: Receive) -> Caller:
    found: Caller | None = scope.get(CALLER)
    return found or _Heard(receive)


class _Heard:
    """The caller as any ASGI server reports it, through `receive` alone."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._tell_come: Callable[[int], object] | None = None
        self._listening: asyncio.Task[None] | None = None

    async def receive(self) -> Message:
        message = await self._receive()
        if self._tell_come is not None and message["type"] == "http.request":
            self._tell_come(len(message.get("body", b"")))
        return message

    def take_body(self) -> list[Part] | None:
        return None

    def when_come(self, tell: Callable[[int], object] | None) -> None:
        self._tell_come = tell

    def when_gone(self, tell: Callable[[], object] | None) -> None:
        if self._listening is not None:
            self._listening.cancel()
        self._listening = None if tell is None else asyncio.ensure_future(self._listen(tell))

    async def _listen(self, tell: Callable[[], object]) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        tell()


class CancelOnDisconnect:
    """A context manager for the task that serves the caller."""

    __slots__ = ("_caller", "_is_gone", "_serving")

    def __init__(self, caller: Caller) -> None:
        serving = asyncio.current_task()
        assert serving is not None, "an endpoint runs in a task. This is a bug."
        self._serving = serving
        self._caller = caller
        self._is_gone = False

    def __enter__(self) -> None:
        self._caller.when_gone(self._leave)

    def _leave(self) -> None:
        self._is_gone = True
        self._serving.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, record: TracebackType | None
    ) -> None:
        self._caller.when_gone(None)
        if self._is_gone and isinstance(error, asyncio.CancelledError):
            # This cancellation is our own and ends here; one from outside (shutdown) goes on.
            self._serving.uncancel()
            raise ClientGone from None
