"""A service in miniature, to watch the supervisor and the server at work without torch.

`python fake_worker.py serve OPTIONS` is the supervisor, which runs `python fake_worker.py worker OPTIONS` per slot. The
worker answers GET /readyz, /metrics and /pid (after `?sleep=seconds`, or `?until=close` when the listener closes; with
`?hang` never, nor anything else), and /stuck never; with `--refuse` it ends as one whose settings are wrong, with `--crash` as
one that falls over at once.
"""

import argparse
import asyncio
import contextlib
import os
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from service.supervisor.supervisor import EXIT_REFUSED, Plan, supervise


def options(arguments):
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("serve", "worker"))
    for name in ("slot", "port", "channel", "peers", "workers"):
        parser.add_argument(f"--{name}", type=int, default=0)
    for name in ("delay", "grace", "silence", "ready-after"):
        parser.add_argument(f"--{name}", type=float, default=0.0)
    parser.add_argument("--run-dir", type=Path)
    parser.add_argument("--refuse", action="store_true")
    parser.add_argument("--crash", action="store_true")
    return parser.parse_args(arguments)


def serve(options, arguments):
    return supervise(
        Plan(
            command=(sys.executable, __file__, "worker", *arguments[1:]),
            host="127.0.0.1",
            port=options.port,
            workers=options.workers,
            drain_s=options.delay + options.grace,
            watchdog_timeout_s=options.silence,
            run_dir=options.run_dir and str(options.run_dir),
        )
    )


class App:
    def __init__(self, channel, metrics, ready_after_s):
        self.channel = channel
        self.metrics = metrics
        self.ready_after_s = ready_after_s
        self.is_draining = False
        self.closing = asyncio.Event()
        self.settled = asyncio.Event()
        # What a server calls of a service.
        self.readiness = SimpleNamespace(port_opened=lambda: None)
        self.stop_admitting, self.settle, self.is_over = self.closing.set, self.settled.set, lambda: True

    def begin_drain(self):
        from service.supervisor.status import State

        self.is_draining = True
        self.channel.report(state=State.DRAINING)

    async def begin(self):
        from service.supervisor.status import State

        await asyncio.sleep(self.ready_after_s)
        if not self.is_draining:
            self.channel.report(state=State.READY)

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan":
            await self.lifespan(receive, send)
            return
        if scope["path"] == "/stuck":
            self.metrics.received.inc()
            self.metrics.in_flight.inc()
            while (await receive())["type"] != "http.disconnect":
                pass
            return
        status, body = await self.answer(scope)
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def answer(self, scope):
        if scope["path"] == "/readyz":
            reason = "draining" if self.is_draining else self.channel.service.why_not_ready
            return (503, reason.encode()) if reason else (200, b"ready")
        if scope["path"] == "/metrics":
            return 200, await asyncio.to_thread(self.metrics.render)
        self.metrics.received.inc()
        self.metrics.in_flight.inc()
        status = 200
        if scope["query_string"] == b"hang":
            stand_still()
        elif scope["query_string"] == b"until=close":
            await self.closing.wait()
        elif scope["query_string"].startswith(b"sleep="):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.settled.wait(), float(scope["query_string"][6:]))
                status = 503
        self.metrics.requests.labels("/pid", str(status)).inc()
        self.metrics.in_flight.inc(-1)
        return status, str(os.getpid()).encode()

    async def lifespan(self, receive, send):
        await receive()
        self.channel.open(lambda: None)
        task = asyncio.get_running_loop().create_task(self.begin())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        task.cancel()
        await send({"type": "lifespan.shutdown.complete"})


def stand_still():
    """The event loop with it."""
    time.sleep(3600)


def work(options):
    from service.http.connection import ConnectionLimits
    from service.http.request_parser import HeadLimits
    from service.observability.logs import configure_logs
    from service.observability.metrics import Metrics
    from service.supervisor.channel import MAX_SUPERVISOR_BYTES, Channel
    from service.supervisor.processes import bind
    from service.worker.control_channel import ControlChannel
    from service.worker.server import Server

    end = Channel(socket.socket(fileno=options.channel), MAX_SUPERVISOR_BYTES)
    channel = ControlChannel(end, has_peers=options.peers > 0)
    if options.refuse:
        channel.report(start_error="the layer directory is empty")
        return EXIT_REFUSED
    if options.crash:
        return 7
    configure_logs("info")
    metrics = Metrics(options.run_dir / "metrics", options.slot)
    app = App(channel, metrics, options.ready_after)
    limits = ConnectionLimits(
        head=HeadLimits(max_header_bytes=16384, max_target_bytes=8192, max_headers=100),
        header_timeout_s=10,
        write_timeout_s=30,
        max_connections=1000,
        max_read_ahead_bytes=2**24,
    )
    times = dict(delay_s=options.delay, grace_s=options.grace)
    server = Server(app, app, bind("127.0.0.1", options.port), limits, **times)  # type: ignore[arg-type]
    channel.ended = server.supervisor_ended
    server.run()
    return server.exit_code


if __name__ == "__main__":
    chosen = options(sys.argv[1:])
    sys.exit(serve(chosen, sys.argv[1:]) if chosen.role == "serve" else work(chosen))
