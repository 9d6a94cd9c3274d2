"""Caller: as our own transport reports it, and as any other ASGI server does."""

import asyncio

from service.api.request_body import caller_of
from service.http.asgi import CALLER, Message
from tests.doubles import turns


def test_our_own_transport_provides_the_caller():
    cycle = object()
    assert caller_of({CALLER: cycle}, asyncio.Queue[Message]().get) is cycle


def test_another_servers_disconnect_is_reported_once():
    async def story():
        messages = asyncio.Queue[Message]()
        caller = caller_of({}, messages.get)
        assert caller.take_body() is None
        gone = []
        caller.on_disconnect(lambda: gone.append("gone"))
        messages.put_nowait({"type": "http.request", "body": b"", "more_body": False})
        await turns()
        assert gone == []
        messages.put_nowait({"type": "http.disconnect"})
        await turns()
        assert gone == ["gone"]
        caller.on_disconnect(None)

    asyncio.run(story())


def test_bytes_from_another_server_are_counted_as_they_are_received():
    async def story():
        messages = asyncio.Queue[Message]()
        caller = caller_of({}, messages.get)
        come: list[int] = []
        caller.on_bytes(come.append)
        for body in (b"abc", b"", b"de"):
            messages.put_nowait({"type": "http.request", "body": body, "more_body": True})
            await caller.receive()
        messages.put_nowait({"type": "http.disconnect"})
        await caller.receive()
        assert come == [3, 0, 2]

    asyncio.run(story())


def test_a_stopped_watch_reports_no_disconnect():
    async def story():
        messages = asyncio.Queue[Message]()
        caller = caller_of({}, messages.get)
        gone = []
        caller.on_disconnect(lambda: gone.append("gone"))
        await turns()
        caller.on_disconnect(None)
        messages.put_nowait({"type": "http.disconnect"})
        await turns()
        assert gone == []

    asyncio.run(story())
