"""The end of a process comes, whatever its steps run into."""

import asyncio
import socket

import pytest

from service.server import Drain, Server
from tests.unit.transport.wire import LIMITS


def test_a_process_that_cannot_say_that_it_leaves_leaves_all_the_same():
    def begin() -> None:
        raise OSError("the run directory is gone")

    async def story(server: Server) -> None:
        with pytest.raises(OSError, match="gone"):
            server.leave(4)

    with socket.socket() as bound:
        server = Server(None, bound, Drain(delay_s=0, grace_s=0, begin=begin), LIMITS)
        asyncio.run(story(server))
    assert server.should_exit
    assert server.exit_code == 4


def test_it_is_told_that_the_port_is_open_once_a_connection_finds_it_so():
    async def application(scope, receive, send) -> None:
        for part in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{part}.complete"})

    found: list[int] = []
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))

        def opened() -> None:
            with socket.socket() as client:
                found.append(client.connect_ex(bound.getsockname()))
            server.leave()

        server = Server(application, bound, Drain(delay_s=0, grace_s=0, begin=lambda: None), LIMITS, opened=opened)
        assert server.run_to_end() == 0
    assert found == [0]
