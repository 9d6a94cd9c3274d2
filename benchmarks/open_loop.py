"""Open loop: requests come when they come, however slowly they are answered; a closed loop hides what a queue does.

python -m benchmarks.open_loop JSON    prints one line of JSON; see Arrivals

Laws: a process of its own; arrivals are a Poisson process from a seed; latency counts from the moment a request was due,
so what the generator is late by is in it, and is told apart (`late_p99_ms`); so is the core that it takes (`generator_cores`).
It is Python and shares the machine: about 0.1 ms of a core a request of 16 tokens, several times that at 256.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import statistics
import sys
import time
from collections import deque
from pathlib import Path
from typing import cast

import uvloop

from benchmarks.bodies import Bodies

LATEST_S = 10.0
MAX_CONNECTIONS = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class Arrivals:
    port: int
    directory: str
    path: str
    num: int
    per_second: float
    seconds: float
    seed: int


class _Connection(asyncio.Protocol):
    """One request at a time; counts the bytes of its answer and looks at nothing but the head."""

    def __init__(self, generator: _Generator) -> None:
        self._generator = generator
        self._head = bytearray()
        self._left = 0
        self._status = 0
        self._due: float | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def send(self, due: float, request: bytes) -> None:
        assert self.transport is not None
        self._due = due
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        if self._left:
            self._left -= len(data)
        else:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self._head[:end]).lower()
            at = head.index(b"content-length:") + 15
            self._status = int(head[9:12])
            self._left = int(head[at:].split(b"\r\n", 1)[0]) - (len(self._head) - end - 4)
            self._head.clear()
        if self._left <= 0:
            self._left = 0
            self._settle(self._status)
            self._generator.free(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 (asyncio names it)
        self._settle(0)
        self._generator.lost(self)

    def _settle(self, status: int) -> None:
        if self._due is not None:
            self._generator.settled(status, time.monotonic() - self._due)
            self._due = None


class _Generator:
    def __init__(self, asked: Arrivals) -> None:
        self._asked = asked
        self._requests = [_as_bytes(Bodies(Path(asked.directory), asked.path, asked.num), i) for i in range(asked.num)]
        self._idle: list[_Connection] = []
        self._waiting: deque[tuple[float, bytes]] = deque()
        self._num_connections = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._open = 0
        self._good_s: list[float] = []
        self._late_s: list[float] = []
        self._refused = self._broken = 0

    async def run(self) -> dict[str, float]:
        rng, asked = random.Random(self._asked.seed), self._asked
        cpu, start = time.process_time(), time.monotonic()
        due, sent = start, 0
        while due < start + asked.seconds:
            if (wait := due - time.monotonic()) > 0:
                await asyncio.sleep(wait)
            elif sent % 16 == 0:
                await asyncio.sleep(0)  # late, but answers must be read
            self._late_s.append(max(0.0, time.monotonic() - due))
            self._arrive(due, self._requests[sent % len(self._requests)])
            sent += 1
            due += rng.expovariate(asked.per_second)
        in_time, cores = len(self._good_s), (time.process_time() - cpu) / (time.monotonic() - start)
        end = time.monotonic() + LATEST_S
        while self._open and time.monotonic() < end:  # noqa: ASYNC110 (its own loop serves nobody)
            await asyncio.sleep(0.01)
        return self._figures(sent, in_time, cores)

    def _figures(self, sent: int, in_time: int, cores: float) -> dict[str, float]:
        times = self._good_s if len(self._good_s) > 1 else [LATEST_S, LATEST_S]
        cuts = statistics.quantiles(times, n=1000, method="inclusive")
        return {
            "offered_rps": sent / self._asked.seconds,
            "rps": in_time / self._asked.seconds,
            "p50_ms": cuts[499] * 1e3,
            "p99_ms": cuts[989] * 1e3,
            "max_ms": max(times) * 1e3,
            "refused": self._refused / sent,
            "broken": self._broken + self._open,
            "late_p99_ms": sorted(self._late_s)[int(len(self._late_s) * 0.99)] * 1e3,
            "generator_cores": cores,
        }

    def _arrive(self, due: float, request: bytes) -> None:
        self._open += 1
        if self._idle:
            self._idle.pop().send(due, request)
            return
        self._waiting.append((due, request))
        if self._num_connections < MAX_CONNECTIONS:
            self._num_connections += 1
            task = asyncio.ensure_future(self._connect())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(lambda: _Connection(self), "127.0.0.1", self._asked.port)
        except OSError:
            self._num_connections -= 1
            if self._waiting:
                self.settled(0, time.monotonic() - self._waiting.popleft()[0])
        else:
            self.free(connection)

    def free(self, connection: _Connection) -> None:
        """The request that has waited longest takes it."""
        if connection.transport is None or connection.transport.is_closing():
            return
        if self._waiting:
            connection.send(*self._waiting.popleft())
        else:
            self._idle.append(connection)

    def lost(self, connection: _Connection) -> None:
        self._num_connections -= 1
        if connection in self._idle:
            self._idle.remove(connection)

    def settled(self, status: int, seconds: float) -> None:
        self._open -= 1
        if status == 200:
            self._good_s.append(seconds)
        elif status:
            self._refused += 1
        else:
            self._broken += 1


def _as_bytes(bodies: Bodies, i: int) -> bytes:
    headers, body = bodies.request(i)
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = f"POST {bodies.path} HTTP/1.1\r\nHost: bench\r\n{lines}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


if __name__ == "__main__":
    print(json.dumps(uvloop.run(_Generator(Arrivals(**json.loads(sys.argv[1]))).run())))
