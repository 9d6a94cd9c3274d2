"""Stands in for the transport's Cycle where an application runs without it, as under an ASGI client in process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from service.http.asgi import CYCLE, Application, Message, Receive, Scope, Send


class ReceiveCycle:
    """What the application needs of a Cycle, by ASGI's `receive` alone; a task waits for the disconnect."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._on_bytes: Callable[[int], object] | None = None
        self._listener: asyncio.Task[None] | None = None

    async def receive(self) -> Message:
        message = await self._receive()
        if self._on_bytes is not None and message["type"] == "http.request":
            self._on_bytes(len(message.get("body", b"")))
        return message

    def take_body(self) -> None:
        return None

    def on_bytes(self, callback: Callable[[int], object] | None) -> None:
        self._on_bytes = callback

    def on_disconnect(self, callback: Callable[[], object] | None) -> None:
        if self._listener is not None:
            self._listener.cancel()
        self._listener = None if callback is None else asyncio.ensure_future(self._listen(callback))

    async def _listen(self, callback: Callable[[], object]) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        callback()


def without_transport(application: Application) -> Application:
    """Return the application for an ASGI client in process, which has no Cycle."""

    async def called(scope: Scope, receive: Receive, send: Send) -> None:
        await application({**scope, CYCLE: ReceiveCycle(receive)}, receive, send)

    return called
