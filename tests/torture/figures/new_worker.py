"""Figure 20: a worker is killed while kept-alive callers ask without a pause, and its replacement gets its part of them.

Invariants: what one process has is read from its sockets; from the moment when the replacement is ready no request fails; each
caller has to reconnect at most once; with shedding turned off by a planted fault the first check fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator

from tests.torture import process_tree
from tests.torture.figure import Form
from tests.torture.raw_connection import RawConnection, attend
from tests.torture.report import Row, at_least, fails, none_of
from tests.torture.subject import READY_S, Subject

CALLERS = 32
WORKERS = 2
# A heartbeat, and what the callers need to come again.
SPREAD_S = 5.0
REQUEST = attend([[0.5] * 16])


def plant() -> None:
    """No process makes room for another."""
    from service.worker.server import Server

    Server.rebalance = lambda self: None  # type: ignore[method-assign]


class Callers:
    """Kept-alive connections; each sends a request as soon as it has the last answer, until `end`."""

    def __init__(self, port: int) -> None:
        self.failed_at: list[tuple[float, str]] = []
        self.num_closed = [0] * CALLERS
        self._port = port
        self._is_over = False
        self._tasks = [asyncio.ensure_future(self._ask(number)) for number in range(CALLERS)]

    async def end(self) -> None:
        self._is_over = True
        await asyncio.gather(*self._tasks)

    async def _ask(self, number: int) -> None:
        connection = RawConnection(self._port)
        while not self._is_over:
            reply = await connection.outcome(REQUEST, reopen=False)
            if isinstance(reply, str):
                self.failed_at.append((time.monotonic(), reply))
                connection.close()
                continue
            self.num_closed[number] += reply.closes
            if reply.status != 200:
                self.failed_at.append((time.monotonic(), f"status {reply.status}"))
        connection.close()


def measure(form: Form) -> Iterator[Row]:
    with Subject(form.room("new-worker"), workers=WORKERS) as subject:
        share, callers, ready_at = asyncio.run(_replace(subject))
        yield at_least(20, "connections of a replacement, as a part of an even share", share, 50, " %")
        late = [told for at, told in callers.failed_at if at >= ready_at]
        yield none_of(20, "requests that failed after it was ready", late)
        often = [f"{num} times" for num in callers.num_closed if num > 1]
        yield none_of(20, f"of {CALLERS} callers, those asked to reconnect more than once", often)
        told = [line for line in subject.faults() if not line.startswith("worker_died")]
        yield none_of(20, "faults in the log", told)
    with Subject(form.room("nothing-shed"), plants={"modules": [__name__]}, workers=WORKERS) as subject:
        share, _, _ = asyncio.run(_replace(subject))
        yield fails(20, "a planted fault (no connection is shed) fails the first check", f"{share:.0f} %", share < 50)


async def _replace(subject: Subject) -> tuple[float, Callers, float]:
    """What part of an even share the replacement has, in per cent; its callers; when it was ready."""
    idle = min(map(process_tree.num_sockets, subject.pids))
    callers = Callers(subject.port)
    await asyncio.sleep(1)
    os.kill(subject.pids[0], signal.SIGKILL)
    pid = await _replacement(subject)
    ready_at = time.monotonic()
    share = 0.0
    while share < 100 and time.monotonic() < ready_at + SPREAD_S:
        await asyncio.sleep(0.1)
        share = max(share, 100 * (process_tree.num_sockets(pid) - idle) / (CALLERS / WORKERS))
    await callers.end()
    return share, callers, ready_at


async def _replacement(subject: Subject) -> int:
    """The pid of the process that was started for the killed one, once the service is ready again."""
    end = time.monotonic() + READY_S
    while time.monotonic() < end:
        await asyncio.sleep(0.05)
        with contextlib.suppress(OSError):
            new = set(process_tree.children(subject.process.pid)) - set(subject.pids)
            if new and (await asyncio.to_thread(subject.get, "/readyz"))[0] == 200:
                return new.pop()
    raise AssertionError("no replacement became ready")
