"""Server: a process ends even if a step of its shutdown fails, and sheds connections gradually."""

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from service.worker.server import SHED_PER_S, Server
from tests.unit.http.wire import LIMITS


def server_of(
    bound: socket.socket, application: Any = None, opened: Any = lambda: None, begin_drain: Any = lambda: None
) -> Server:
    service: Any = SimpleNamespace(
        readiness=SimpleNamespace(port_opened=opened),
        begin_drain=begin_drain,
        stop_admitting=lambda: None,
        settle=lambda: None,
        is_over=lambda: True,
    )
    return Server(application, service, bound, LIMITS, delay_s=0, grace_s=0)


def test_a_process_that_cannot_report_its_exit_exits():
    def begin() -> None:
        raise OSError("the run directory is gone")

    async def story(server: Server) -> None:
        with pytest.raises(OSError, match="gone"):
            server.leave(4)

    with socket.socket() as bound:
        server = server_of(bound, begin_drain=begin)
        asyncio.run(story(server))
    assert server.should_exit
    assert server.exit_code == 4


def test_the_port_counts_as_open_once_a_connection_succeeds():
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

        server = server_of(bound, application, opened)
        assert server.run_to_end() == 0
    assert found == [0]


def test_all_open_connections_are_shed_a_few_at_a_time_when_a_process_has_joined_D9(monkeypatch):
    class Shed:
        def __init__(self) -> None:
            self.is_shed = False

        def shed(self) -> None:
            self.is_shed = True

    async def story(server: Server) -> None:
        due: list[tuple[float, Any]] = []
        monkeypatch.setattr(asyncio.get_running_loop(), "call_later", lambda delay, call: due.append((delay, call)))
        connections = [Shed() for _ in range(2 * SHED_PER_S)]
        server.server_state.connections.update(connections)  # type: ignore[arg-type]
        server.rebalance()
        assert [delay for delay, _ in due] == pytest.approx([i / SHED_PER_S for i in range(len(connections))])
        for _, call in due:
            call()
        assert all(connection.is_shed for connection in connections)

    with socket.socket() as bound:
        server = server_of(bound)
        asyncio.run(story(server))
