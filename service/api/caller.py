"""Caller: who waits for the answer, as the server knows him: the body that he has sent already, and the moment he leaves.

Laws: our own transport says both without a task or a timer, in the scope (`CALLER`); of any other ASGI server they are heard
through `receive`, at the cost of a task. Whoever asks to be told is told once, on the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from service.http.asgi import CALLER, Message, Receive, Scope

Part = bytes | bytearray | memoryview


class Caller(Protocol):
    async def receive(self) -> Message:
        """ASGI's: a part of the body, or the disconnect."""

    def take_body(self) -> list[Part] | None:
        """The whole body in its parts where all of it is here and none is received; then `receive` is only the disconnect."""

    def when_come(self, tell: Callable[[int], object] | None) -> None:
        """Calls `tell` with how many bytes of the body are here, at once, and whenever more have come; None calls that off.

        A ServiceError that it raises is what `receive` raises, or this.
        """

    def when_gone(self, tell: Callable[[], object] | None) -> None:
        """Calls `tell` when the caller leaves before his answer is complete, at once if he has; None calls that off.

        To be asked for when the body has been received.
        """


def caller_of(scope: Scope, receive: Receive) -> Caller:
    found: Caller | None = scope.get(CALLER)
    return found or _Heard(receive)


class _Heard:
    """The caller as any ASGI server tells of him."""

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
