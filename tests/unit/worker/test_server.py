"""Server: a process ends in time even if a step of its shutdown fails or hangs, and sheds connections gradually."""

import asyncio
import selectors
import signal
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from service.supervisor.supervisor import ANSWER_S, CLOSE_S, CUT_S, EXIT_S, FORCE_S
from service.worker import server as server_module
from service.worker.server import LAST_REQUEST_S, REPEAT_S, SHED_PER_S, Server
from tests.doubles import ManualClock
from tests.unit.http.wire import LIMITS


def server_of(
    bound: socket.socket,
    application: Any = None,
    opened: Any = lambda: None,
    begin_drain: Any = lambda: None,
    grace_s: float = 0,
) -> Server:
    service: Any = SimpleNamespace(
        readiness=SimpleNamespace(port_opened=opened),
        begin_drain=begin_drain,
        stop_admitting=lambda: None,
        settle=lambda: None,
        is_over=lambda: True,
    )
    return Server(application, service, bound, LIMITS, delay_s=0, grace_s=grace_s)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock moves to the next timer instead of waiting for it."""

    class Selector(selectors.DefaultSelector):
        now = 1000.0

        def select(self, timeout: float | None = None) -> Any:
            assert timeout is not None, "nothing is due"
            self.now += max(0.0, timeout)
            return super().select(0)

    def __init__(self) -> None:
        self._virtual = self.Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


class Held:
    """A connection that stays open, with a request in flight or idle; it records when it is shut down and cut."""

    def __init__(self, *, is_idle: bool) -> None:
        self.cycle = None if is_idle else SimpleNamespace(response_complete=False)
        self.transport = SimpleNamespace(abort=lambda: self._note("cut"), is_closing=lambda: False)
        self.times: dict[str, float] = {}

    def shutdown(self) -> None:
        self._note("shut")

    def _note(self, what: str) -> None:
        self.times.setdefault(what, asyncio.get_running_loop().time())


@pytest.mark.parametrize("has_handshakes", [False, True])
@pytest.mark.parametrize("grace_s", [0, 0.3, 1, 30])
def test_the_shutdown_takes_at_most_the_grace_and_the_time_of_the_supervisor(grace_s, has_handshakes):
    """Whatever hangs: TLS handshakes, a request, an idle connection, even a cut connection."""
    busy, idle = Held(is_idle=False), Held(is_idle=True)
    connections: Any = [busy, idle]
    times: dict[str, float] = {}

    async def story(server: Server) -> None:
        now = asyncio.get_running_loop().time
        connecting = {asyncio.ensure_future(asyncio.sleep(3600))} if has_handshakes else set()

        async def lifespan_shutdown() -> None:
            times["end"] = now()

        lifespan: Any = SimpleNamespace(shutdown=lifespan_shutdown)
        listener: Any = SimpleNamespace(close=lambda: connecting)
        service: Any = server._service
        server.lifespan, server._listener = lifespan, listener
        service.settle = lambda: times.setdefault("settle", now())
        server.server_state.connections.update(connections)
        times["begin"] = now()
        await server.shutdown()
        assert all(task.cancelled() for task in connecting)

    with socket.socket() as bound, asyncio.Runner(loop_factory=VirtualLoop) as runner:
        server = server_of(bound, grace_s=grace_s)
        server.config.ssl = None
        runner.run(story(server))
    begin = times["begin"]
    assert times["settle"] - begin == pytest.approx(grace_s)
    assert times["settle"] + ANSWER_S <= busy.times["cut"] + 1e-6
    assert min(idle.times.values()) - begin >= LAST_REQUEST_S - 1e-6
    assert times["end"] - begin <= grace_s + ANSWER_S + CUT_S + 1e-6
    assert LAST_REQUEST_S <= ANSWER_S, "else the handshakes may take longer"
    assert pytest.approx(ANSWER_S + CUT_S + CLOSE_S + EXIT_S) == FORCE_S
    assert FORCE_S == 2, "the documents promise it"


def test_work_without_a_caller_does_not_delay_the_end():
    """The probe of a layer may hang; it is no connection's request."""
    calls: list[str] = []

    async def lifespan_shutdown() -> None:
        calls.append("lifespan")

    async def story(server: Server) -> None:
        lifespan: Any = SimpleNamespace(shutdown=lifespan_shutdown)
        listener: Any = SimpleNamespace(close=list)
        service: Any = server._service
        server.lifespan, server._listener = lifespan, listener
        service.settle = lambda: calls.append("settle")
        await server.shutdown()

    with socket.socket() as bound, asyncio.Runner(loop_factory=VirtualLoop) as runner:
        server = server_of(bound, grace_s=30)
        server.config.ssl = None
        runner.run(story(server))
    assert calls == ["settle", "lifespan"]


@pytest.fixture
def forced(monkeypatch):
    """The clock of the signals, and the codes with which they have forced the exit."""
    clock, codes = ManualClock(), list[int]()
    monkeypatch.setattr(server_module, "_exit_at_once", codes.append)
    monkeypatch.setattr(server_module, "time", SimpleNamespace(monotonic=clock.now))
    return clock, codes


@pytest.mark.parametrize("begin", ["leave", "supervisor_ended"])
def test_the_first_signal_does_not_force_the_end_of_a_drain_that_began_without_one(begin, forced):
    """systemd sends SIGTERM to the workers just after their supervisor died."""
    clock, codes = forced
    with socket.socket() as bound:
        server = server_of(bound)
        getattr(server, begin)()
        server._signalled(signal.SIGTERM)
        assert codes == []
        assert server.should_exit
        clock.advance(REPEAT_S)
        server._signalled(signal.SIGTERM)
        assert codes == [128 + signal.SIGTERM]


@pytest.mark.parametrize("exit_code", [0, 4])
def test_a_fault_or_the_end_of_the_supervisor_ends_the_delay_of_a_drain(exit_code):
    async def story(server: Server) -> None:
        server._delay_s = 3600
        server._signalled(signal.SIGTERM)
        is_closed = [server.should_exit]
        server.leave(exit_code)
        assert [*is_closed, server.should_exit] == [False, True]
        server.leave(1)
        assert server.exit_code == exit_code

    with socket.socket() as bound:
        asyncio.run(story(server_of(bound)))


@pytest.mark.parametrize("copy", [signal.SIGTERM, signal.SIGINT])
def test_signals_within_the_time_of_a_copy_count_as_one(copy, forced):
    """One of systemd, and one of the supervisor, which systemd signalled too."""
    clock, codes = forced
    with socket.socket() as bound:
        server = server_of(bound)
        server._signalled(copy)
        clock.advance(REPEAT_S - 0.01)
        server._signalled(signal.SIGTERM)
        assert codes == []
        clock.advance(0.02)
        server._signalled(signal.SIGTERM)
        assert codes == [128 + signal.SIGTERM]


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
        server.run()
    assert server.exit_code == 0
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
