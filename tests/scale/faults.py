"""Faults between a balancer and its replicas: a network that delays or drops everything, and a server that is no good replica."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

from tests import processes

CHUNK = 2**16


class Network:
    """Forwards TCP to the port of a replica, answers `delay_s` late; from `cut` to `heal` no byte passes and no connect ends."""

    def __init__(self, port: int, *, delay_s: float = 0.0) -> None:
        self._port, self.delay_s = port, delay_s
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=8)
        self._listener.setblocking(False)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._passes = asyncio.Event()
        self._passes.set()
        self._fillers: list[socket.socket] = []
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.heal()
        assert self._task is not None
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()
        self._listener.close()

    def cut(self) -> None:
        """Drop everything: once the queue of new connections is full, the kernel drops further ones without an answer."""
        self._loop.call_soon_threadsafe(self._passes.clear)
        processes.eventually(lambda: not self._can_connect(), "no connect gets an answer")

    def heal(self) -> None:
        while self._fillers:
            self._fillers.pop().close()
        self._loop.call_soon_threadsafe(self._passes.set)

    def _can_connect(self) -> bool:
        self._fillers.append(socket.socket())
        self._fillers[-1].settimeout(0.2)
        return self._fillers[-1].connect_ex(self._listener.getsockname()) == 0

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError), asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._task = asyncio.current_task()
        async with asyncio.TaskGroup() as links:
            while True:
                await self._passes.wait()
                caller, _ = await self._loop.sock_accept(self._listener)
                links.create_task(self._link(caller))

    async def _link(self, caller: socket.socket) -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            from_caller, to_caller = await asyncio.open_connection(sock=caller)
            stack.callback(to_caller.close)
            from_replica, to_replica = await asyncio.open_connection("127.0.0.1", self._port)
            stack.callback(to_replica.close)
            requests = asyncio.create_task(self._pump(from_caller, to_replica, lambda: 0.0))
            stack.callback(requests.cancel)
            answers = asyncio.create_task(self._pump(from_replica, to_caller, lambda: self.delay_s))
            stack.callback(answers.cancel)
            await asyncio.wait((requests, answers), return_when=asyncio.FIRST_COMPLETED)

    async def _pump(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, delay: Callable[[], float]
    ) -> None:
        """Pass each piece on some seconds after it came, until one side ends."""
        with contextlib.suppress(OSError):
            while data := await source.read(CHUNK):
                await self._passes.wait()
                self._loop.call_later(delay(), target.write, data)
        await asyncio.sleep(delay())


@contextlib.contextmanager
def stub(port: int, health: int, call: bytes) -> Iterator[list[dict[str, str]]]:
    """A server that calls itself our service, answers every GET with the status `health` and every POST with the bytes `call`.

    The list gets the headers of each POST to a layer, names in lower case.
    """
    posts: list[dict[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def version_string(self) -> str:
            return "attention-service/0"

        def do_GET(self) -> None:
            self.send_response(health)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            if self.path.startswith("/v1/layers/"):
                posts.append({name.lower(): value for name, value in self.headers.items()})
            self.wfile.write(call)
            self.close_connection = True

        def log_message(self, *_: object) -> None: ...

    class Server(ThreadingHTTPServer):
        allow_reuse_port = True  # as the service, whose connections still wait on the port

    server = Server(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield posts
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
