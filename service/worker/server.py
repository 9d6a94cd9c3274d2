"""Server: runs uvicorn in one worker process, and drains it at its end.

Must not know: routes, batches, the supervisor's decisions.
Invariants: The first SIGTERM or SIGINT turns readiness off at once; requests are served as before for `delay_s`. Then the
listener closes. An idle kept-alive connection may send one more within LAST_REQUEST_S; its response says `connection: close`.
Accepted requests are answered within `grace_s`; `settle` refuses the rest, and ANSWER_S later all connections are cut. A second
signal, REPEAT_S after the first or later, ends the process at once, with 128 + its number. SIGHUP does nothing. The end of the
supervisor, or a fault, starts the drain without delay, ends a delay that runs, and counts as no signal. None of these ends
prints a traceback. When another process joins, each open connection ends with its next response (`rebalance`), never between
two requests, so that the new process gets its share.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.config import STARTUP_FAILURE

from service import __version__
from service.http.connection import Connection, ConnectionLimits, ConnectionSet
from service.http.cycle import ReadAhead, WriteCoalescer
from service.http.listener import ACCEPT_PAUSE_S, Listener
from service.observability.logs import finish_logs, get_logger
from service.supervisor.supervisor import ANSWER_S, CUT_S

if TYPE_CHECKING:
    from service.worker.service import Service

# Longer than the usual 60 s of load balancers, so that a worker never closes a connection that they are about to use.
KEEP_ALIVE_S = 75
LAST_REQUEST_S = 0.8
TLS_CHECK_S = 0.2
# Signals within this time count as one: systemd signals the workers, and the supervisor does so too, later on a busy machine.
REPEAT_S = 1.0
# Connections shed per second. Their clients connect again, over TLS with a handshake of 1 ms each.
SHED_PER_S = 500
# The grace of a process with a fault: it must be replaced soon, even if a body is still arriving.
FAULT_GRACE_S = 2.0


def _exit_at_once(exit_code: int) -> None:
    finish_logs()
    os._exit(exit_code)


class Server(uvicorn.Server):
    """`run` serves `application` on `listener` within `limits` to the end; then the process exits with `exit_code`.

    It calls `service` once the port is open and at each step of the drain. `tls` has the files of the certificate and of
    its private key, in PEM; without the second the key is in the first too, and without both there is no TLS.
    """

    def __init__(
        self,
        application: Any,
        service: Service,
        listener: socket.socket,
        limits: ConnectionLimits,
        *,
        delay_s: float,
        grace_s: float,
        tls: tuple[Path | None, Path | None] = (None, None),
    ) -> None:
        config = uvicorn.Config(
            application,
            loop="uvloop",
            http=Connection,
            ws="none",
            lifespan="on",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            headers=[("server", f"attention-service/{__version__.partition('.')[0]}")],
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            ssl_certfile=tls[0],
            ssl_keyfile=tls[1],
        )
        super().__init__(config)
        self.exit_code = 0
        self._service = service
        self._bound = listener
        self._limits = limits
        self._delay_s = delay_s
        self._grace_s = grace_s
        self._log = get_logger()
        self._signalled_at: float | None = None
        self._leave = asyncio.Event()
        self._connections = ConnectionSet()
        self.server_state.connections = self._connections  # type: ignore[assignment]
        self._tasks = self.server_state.tasks

    def rebalance(self) -> None:
        """Shed all open connections: the kernel gives the new process only its share of the clients that connect again."""
        connections = list(self._connections)
        if not connections:
            return
        self._log.info("rebalancing", connections=len(connections))
        loop = asyncio.get_running_loop()
        for number, connection in enumerate(connections):
            loop.call_later(number / SHED_PER_S, connection.shed)

    def leave(self, exit_code: int = 0, *, delay_s: float = 0.0) -> None:
        """Begin the drain, on the loop. A second call can end the delay of the first, and changes nothing after it."""
        if self.should_exit:
            return
        self.exit_code = exit_code
        if delay_s > 0:
            asyncio.get_running_loop().call_later(delay_s, self._close)
        else:
            # Set it first: the loop acts on it after this step, whatever the service does.
            self._close()
        self._service.begin_drain()

    def _close(self) -> None:
        self.should_exit = True
        self._leave.set()

    def _signalled(self, signum: int) -> None:
        now = time.monotonic()
        if self._signalled_at is None:
            self._signalled_at = now
            delay_s = 0.0 if self.should_exit else self._delay_s
            self._log.info("draining", signal=signal.Signals(signum).name, delay_s=delay_s)
            self.leave(delay_s=delay_s)
        elif now - self._signalled_at >= REPEAT_S:
            self._log.warning("forced", signal=signal.Signals(signum).name)
            _exit_at_once(128 + signum)

    def supervisor_ended(self) -> None:
        """Begin the drain without delay, because no supervisor would replace this process."""
        self._log.error("supervisor_gone")
        self.leave()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Like uvicorn's, but signals arrive on the loop and are not raised again at the end."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._signalled, signum)
        loop.add_signal_handler(signal.SIGHUP, lambda: None)
        await self._serve(sockets)
        self._log.info("left", exit_code=self.exit_code)
        if not self._service.is_over():
            # An endless forward pass, or a slow check or file read: no request waits for its result any more.
            self._log.warning("thread_abandoned")
            _exit_at_once(self.exit_code)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: ARG002 (uvicorn's; there are none)
        """Like uvicorn's, but with this service's Listener."""
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(STARTUP_FAILURE)
        state, limits = self.lifespan.state, self._limits
        shared = WriteCoalescer(), ReadAhead(limits.max_read_ahead_bytes)
        self._listener = Listener(
            self._bound,
            limits.max_connections,
            functools.partial(Connection, self.config, self.server_state, state, limits, *shared),
            self.config.ssl,
            limits.header_timeout_s,
            lambda error: self._log.error("connections_not_taken", reason=error.strerror, pause_s=ACCEPT_PAUSE_S),
        )
        self._listener.open()
        self.started = True
        host, port = self._bound.getsockname()[:2]
        scheme = "https" if self.config.is_ssl else "http"
        address = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        self._log.info("listening", address=address, pid=os.getpid())
        self._service.readiness.port_opened()

    async def main_loop(self) -> None:
        """Sleep until the drain, and renew the date header once a second; uvicorn's wakes ten times a second."""
        while not self.should_exit:
            await self.on_tick(0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._leave.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: ARG002 (uvicorn's; there are none)
        """Drain. uvicorn's own shutdown closes idle connections that clients are about to use, and cancels late requests."""
        loop = asyncio.get_running_loop()
        end = loop.time() + (min(self._grace_s, FAULT_GRACE_S) if self.exit_code else self._grace_s)
        settling = loop.call_at(end, self._settle)
        self._service.stop_admitting()
        connecting = self._listener.close()
        # From here on every response says that it is the last of its connection.
        self.server_state.default_headers = [*self.server_state.default_headers, (b"connection", b"close")]
        if connecting:
            _, late = await asyncio.wait(connecting, timeout=LAST_REQUEST_S)
            for task in late:  # the TLS handshake of a peer, which may never come
                task.cancel()
        for connection in list(self._connections):
            if connection.cycle is not None and not connection.cycle.response_complete:  # it is not idle
                connection.shutdown()
        await self._all_closed(min(LAST_REQUEST_S, end + ANSWER_S - loop.time()))
        for connection in list(self._connections):
            connection.shutdown()
        await self._closed_by(end + ANSWER_S)
        settling.cancel()
        for connection in list(self._connections):
            connection.transport.abort()
        await self._all_closed(CUT_S)
        self._service.settle()  # what still runs, such as the probe of a layer, has no caller
        await self.lifespan.shutdown()

    def _settle(self) -> None:
        """Refuse the requests that the grace was too short for."""
        if self._connections or self._tasks:
            self._log.warning("grace_over", requests=len(self._tasks), connections=len(self._connections))
            self._service.settle()

    async def _closed_by(self, end: float) -> None:
        """Like `_all_closed`, until `end`. Cut closing TLS connections whose bytes have arrived: an idle peer sends no close."""
        while (left_s := end - asyncio.get_running_loop().time()) > 0:
            if await self._all_closed(left_s if self.config.ssl is None else min(TLS_CHECK_S, left_s)):
                return
            for connection in list(self._connections):
                if connection.transport.is_closing() and connection.is_acknowledged:
                    connection.transport.abort()

    async def _all_closed(self, timeout_s: float) -> bool:
        """Return whether all connections and requests ended within `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._connections or self._tasks:
                    if self._connections:
                        self._connections.emptied.clear()
                        await self._connections.emptied.wait()
                    if self._tasks:
                        await asyncio.wait(self._tasks)
        return not (self._connections or self._tasks)
