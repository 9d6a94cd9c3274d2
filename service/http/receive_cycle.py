"""ReceiveCycle: what a request needs of its transport, from ASGI's `receive` alone, under servers other than ours."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from service.http.asgi import Message, Receive


class ReceiveCycle:
    """A RequestCycle of one request; while a disconnect is to be reported, a task waits for it."""

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
