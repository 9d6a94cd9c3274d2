"""Listener: connections take a limited number of slots, and one that cannot be accepted now is accepted later."""

import asyncio
import contextlib
import errno
import socket
import ssl

import pytest

from service.http import listener as listening
from service.http.listener import MAX_OVERFLOW, ConnectionSlot, Listener
from service.supervisor.processes import bind


class Kept(asyncio.Protocol):
    """A protocol that sends nothing and frees its connection slot when it ends."""

    def __init__(self, slot: ConnectionSlot) -> None:
        self.slot = slot

    def connection_lost(self, exc):
        self.slot.leave()


class Failing(socket.socket):
    """A listening socket whose first `fails` accepts raise `code`."""

    fails = 0
    code = errno.EMFILE

    def accept(self):
        if self.fails:
            self.fails -= 1
            raise OSError(self.code, "this accept fails")
        return super().accept()


def num_slots(listener):
    return len(listener._kept) + len(listener._overflow)


def hall(story, most=2, bound=None, tls=None, handshake_timeout_s=5.0):
    """Run `story(listener, connect)` with an open listener; `connect` returns a client socket."""

    rests: list[OSError] = []

    async def main():
        sock = bound or bind("127.0.0.1", 0)
        listener = Listener(sock, most, Kept, tls, handshake_timeout_s, rests.append)
        listener.open()
        address = sock.getsockname()
        clients = []

        async def connect():
            client = socket.create_connection(address, 5)
            client.setblocking(False)
            clients.append(client)
            return client

        try:
            async with asyncio.timeout(20):
                await story(listener, connect)
        finally:
            connecting = listener.close()
            for client in clients:
                client.close()
            await asyncio.gather(*connecting)
            async with asyncio.timeout(20):
                await until(lambda: num_slots(listener) == 0)

    asyncio.run(main())
    return rests


async def until(condition):
    while not condition():  # noqa: ASYNC110 (what is waited for is state, not an event)
        await asyncio.sleep(0.001)


async def has_ended(client) -> bool:
    """Whether the server has closed; an open connection sends nothing."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.05):
            return not await asyncio.get_running_loop().sock_recv(client, 1)
    return False


def test_a_connection_above_the_limit_is_an_overflow_connection():
    async def story(listener, connect):
        for _ in range(3):
            await connect()
        await until(lambda: num_slots(listener) == 3)
        assert [slot.is_overflow for slot in [*listener._kept, *listener._overflow]] == [False, False, True]

    hall(story)


def test_a_freed_slot_goes_to_the_next_connection():
    async def story(listener, connect):
        first, _ = await connect(), await connect()
        await until(lambda: num_slots(listener) == 2)
        first.close()
        await until(lambda: num_slots(listener) == 1)
        await connect()
        await until(lambda: num_slots(listener) == 2)
        assert not listener._overflow

    hall(story)


def test_the_oldest_overflow_connection_is_evicted():
    async def story(listener, connect):
        (kept,) = [await connect()]
        await until(lambda: num_slots(listener) == 1)
        guests = [await connect() for _ in range(MAX_OVERFLOW)]
        await until(lambda: num_slots(listener) == 1 + MAX_OVERFLOW)
        last = await connect()
        assert await has_ended(guests[0])
        assert not await has_ended(guests[1])
        assert not await has_ended(last)
        assert not await has_ended(kept)
        assert num_slots(listener) == 1 + MAX_OVERFLOW

    hall(story, most=1)


def test_concurrent_connections_never_exceed_the_slots():
    async def story(listener, connect):
        for _ in range(5 * MAX_OVERFLOW):
            await connect()
            await asyncio.sleep(0)
            assert num_slots(listener) <= 2 + MAX_OVERFLOW
        await until(lambda: num_slots(listener) == 2 + MAX_OVERFLOW)

    hall(story)


def test_a_listener_that_cannot_accept_pauses_and_accepts_later(monkeypatch):
    monkeypatch.setattr(listening, "ACCEPT_PAUSE_S", 0.02)
    bound = Failing(socket.AF_INET, socket.SOCK_STREAM)
    bound.bind(("127.0.0.1", 0))
    bound.setblocking(False)
    bound.fails = 3

    async def story(listener, connect):
        await connect()
        loop = asyncio.get_running_loop()
        begun = loop.time()
        await until(lambda: num_slots(listener) == 1)
        assert loop.time() - begun >= 3 * 0.02  # one attempt per pause, not one per loop tick
        assert bound.fails == 0

    assert [rest.errno for rest in hall(story, bound=bound)] == [errno.EMFILE] * 3


@pytest.mark.parametrize(("code", "is_reported"), [(errno.EMFILE, True), (errno.ECONNABORTED, False)])
def test_closing_reports_why_waiting_connections_are_left_behind(code, is_reported):
    errors: list[OSError] = []

    async def story():
        bound = Failing(socket.AF_INET, socket.SOCK_STREAM)
        bound.bind(("127.0.0.1", 0))
        listener = Listener(bound, 2, Kept, None, 5.0, errors.append)
        listener.open()
        with socket.create_connection(bound.getsockname(), 5):
            bound.fails, bound.code = 1, code
            connecting = listener.close()
        assert len(connecting) == (not is_reported)
        await asyncio.gather(*connecting)
        await until(lambda: num_slots(listener) == 0)

    asyncio.run(story())
    assert [error.errno for error in errors] == [code] * is_reported


@pytest.mark.parametrize(
    "said", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01"], ids=["nothing", "clear", "half"]
)
def test_a_handshake_holds_a_slot_for_a_limited_time(said):
    async def story(listener, connect):
        client = await connect()
        await until(lambda: num_slots(listener) == 1)
        client.send(said)
        await until(lambda: num_slots(listener) == 0)

    hall(story, tls=ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), handshake_timeout_s=0.05)


def test_bytes_that_arrived_are_discarded_without_being_read():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        taken, _ = server.accept()
        with taken:
            slot = ConnectionSlot(taken, {}, is_overflow=False)
            with pytest.raises(BlockingIOError):
                slot.discard()
            client.sendall(b"x" * 1000)
            assert slot.discard() == 1000
            client.shutdown(socket.SHUT_WR)
            assert slot.discard() == 0


@pytest.fixture
def pair():
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as one:
        other, _ = listener.accept()
        with other:
            yield one, other


def test_a_peer_that_reads_nothing_has_not_acknowledged_all(pair):
    one, other = pair
    slot = ConnectionSlot(one, {}, is_overflow=False)
    other.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    assert slot.is_acknowledged
    one.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            one.send(b"x" * 2**16)
    assert not slot.is_acknowledged


def test_a_closed_connection_is_not_waited_for(pair):
    one, _ = pair
    one.close()
    assert ConnectionSlot(one, {}, is_overflow=False).is_acknowledged
