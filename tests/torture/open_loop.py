"""Open loop: requests that arrive when they arrive, however slowly they are answered; a closed loop hides an overload.

Invariants: a process of its own; arrivals are a Poisson process from a seed; each request takes an idle kept-alive connection or
opens one; latency counts from the moment a request was due; one record a request, in the order of
Record's fields.
A request's mark is the first number of its query, which shows what an engine ran.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import cast

HOST = "127.0.0.1"
LATEST_S = 15.0
MARK_WIDTH = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Arrivals:
    """`timeout_ms` goes with each request as its deadline, and `headers`, whole lines; marks count from `first_mark`."""

    port: int
    per_second: float
    seconds: float
    seed: int = 0
    timeout_ms: int | None = None
    first_mark: int = 1
    rows: int = 1
    headers: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """Times are monotonic, `sent` when the request was whole; status 0: no answer, and `how` says what instead."""

    due: float
    sent: float
    status: int
    seconds: float
    mark: int
    how: str


class OpenLoop:
    """Runs in the background until `records`."""

    def __init__(self, arrivals: Arrivals, cpus: set[int] | None = None) -> None:
        # A file: megabytes of records do not fit into a pipe that is read only at the end.
        self._records = tempfile.NamedTemporaryFile(suffix=".json")  # noqa: SIM115 (open until the records are read)
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.torture.open_loop",
                json.dumps(dataclasses.asdict(arrivals)),
                self._records.name,
            ]
        )
        if cpus:
            os.sched_setaffinity(self._process.pid, cpus)

    def records(self) -> list[Record]:
        """When all are answered, or have failed to be."""
        code = self._process.wait()
        assert code == 0, f"the generator ended with {code}. This is a bug."
        with self._records as file:
            return [Record(*fields) for fields in json.load(file)]


class _Connection(asyncio.Protocol):
    """One request at a time; `busy` is the one that it owes an answer to."""

    def __init__(self, generator: _Generator) -> None:
        self._generator = generator
        self._got = bytearray()
        self.busy: tuple[float, float, int] | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def send(self, due: float, mark: int, request: bytes) -> None:
        assert self.transport is not None
        self.busy = (due, time.monotonic(), mark)
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._got += data
        end = self._got.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._got[:end]).lower()
        at = head.find(b"content-length:")
        length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if len(self._got) < end + 4 + length:
            return
        status, is_last = int(head[9:12]), b"connection: close" in head
        self._got.clear()
        self._settle(status, "")
        if is_last:
            self._generator.forget(self)
            if self.transport is not None:
                self.transport.close()
        else:
            self._generator.idle.append(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._generator.forget(self)
        how = "end of stream" if exc is None else type(exc).__name__
        self._settle(0, f"{how} within an answer" if self._got else how)

    def _settle(self, status: int, how: str) -> None:
        if self.busy is not None:
            (due, sent, mark), self.busy = self.busy, None
            self._generator.settled(Record(due, sent, status, time.monotonic() - due, mark, how))


class _Generator:
    def __init__(self, arrivals: Arrivals) -> None:
        self.idle: list[_Connection] = []
        self._arrivals = arrivals
        self._records: list[Record] = []
        self._open = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> list[Record]:
        asked, rng = self._arrivals, random.Random(self._arrivals.seed)
        start = due = time.monotonic()
        mark = asked.first_mark
        while due < start + asked.seconds:
            if (wait := due - time.monotonic()) > 0:
                await asyncio.sleep(wait)
            self._arrive(due, mark)
            due += rng.expovariate(asked.per_second)
            mark += 1
        end = time.monotonic() + LATEST_S
        while self._open and time.monotonic() < end:
            await asyncio.sleep(0.01)
        return self._records + [Record(0.0, 0.0, 0, LATEST_S, 0, "no answer")] * self._open

    def _arrive(self, due: float, mark: int) -> None:
        self._open += 1
        while self.idle:
            connection = self.idle.pop()
            if connection.transport is not None and not connection.transport.is_closing():
                connection.send(due, mark, self._request(mark))
                return
        task = asyncio.ensure_future(self._connect(due, mark))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, due: float, mark: int) -> None:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(lambda: _Connection(self), HOST, self._arrivals.port)
        except OSError as error:
            self.settled(Record(due, 0.0, 0, time.monotonic() - due, mark, f"refused: {type(error).__name__}"))
        else:
            connection.send(due, mark, self._request(mark))

    def _request(self, mark: int) -> bytes:
        row = f"[{','.join([str(mark), *['0.5'] * (MARK_WIDTH - 1)])}]"
        body = f'{{"query":[{",".join([row] * self._arrivals.rows)}]}}'
        timeout_ms = self._arrivals.timeout_ms
        deadline = "" if timeout_ms is None else f"X-Request-Timeout-Ms: {timeout_ms}\r\n"
        return (
            f"POST /v1/layers/small/attend HTTP/1.1\r\nHost: torture\r\nContent-Type: application/json\r\n{deadline}"
            f"{self._arrivals.headers}Content-Length: {len(body)}\r\n\r\n{body}"
        ).encode()

    def settled(self, record: Record) -> None:
        self._open -= 1
        self._records.append(record)

    def forget(self, connection: _Connection) -> None:
        if connection in self.idle:
            self.idle.remove(connection)


if __name__ == "__main__":
    import uvloop

    given = Arrivals(**json.loads(sys.argv[1]))
    told = [dataclasses.astuple(record) for record in uvloop.run(_Generator(given).run())]
    Path(sys.argv[2]).write_text(json.dumps(told), encoding="ascii")
