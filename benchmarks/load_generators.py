"""Load generators: a closed loop of callers that wait for answers (wrk), and an open loop whose arrivals do not.

Invariants: both send the requests of a directory (`wires.write_requests`) in order. The closed loop is one thread of C: Python
would take the cores that are measured. A closed loop hides what a queue does; in the open loop arrivals are a Poisson process
from a seed, and latency counts from the moment a request is due, so it includes how late the generator is.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import re
import statistics
import subprocess
import time
from pathlib import Path

import uvloop

from benchmarks.subjects import SubjectFailed

SCRIPT = Path(__file__).with_name("wrk.lua")
# Requests of the open loop that are unanswered so long after the last arrival are broken.
DRAIN_S = 10.0
MAX_CONNECTIONS = 1024
_STREAM_BYTES = 2**21  # buffered by a connection, more than an answer
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def closed_loop(port: int, requests: Path, concurrency: int, seconds: float) -> dict[str, float]:
    """Send on `concurrency` connections, on each the next request when the last is answered.

    Returns rps (answered with 2xx), p50_ms and p99_ms of all answers, refused (a share) and broken (connections). Raises
    SubjectFailed if nothing is answered with 2xx.
    """
    whole_s = max(1, math.ceil(seconds))  # wrk takes whole seconds
    options = ["-t1", f"-c{concurrency}", f"-d{whole_s}s", "--timeout", "30s", "-s", str(SCRIPT)]
    command = ["wrk", *options, f"http://127.0.0.1:{port}/", "--", str(requests)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=whole_s + 60, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith("JSON{")), None)
    if line is None:
        raise SubjectFailed((done.stderr or done.stdout)[-300:])
    counts = json.loads(line.removeprefix("JSON"))
    elapsed_s, num = counts["duration_us"] / 1e6, counts["requests"]
    if num == counts["refused"]:
        raise SubjectFailed(f"no answer of 2xx in {elapsed_s:.1f} s, {num} others")
    times = {f"{name}_ms": counts[f"{name}_us"] / 1e3 for name in ("p50", "p99")}
    rps = (num - counts["refused"]) / elapsed_s
    return {"rps": rps, **times, "refused": counts["refused"] / num, "broken": counts["broken"]}


def open_loop(port: int, requests: Path, per_second: float, seconds: float, seed: int) -> dict[str, float]:
    """Send for so long; runs in a process of its own (`bench.run_apart`).

    Returns offered_rps, rps (answered with 200 before the last arrival), p50_ms, p99_ms and max_ms of all answers with 200,
    refused (a share), broken (a number), late_p99_ms and generator_cores, because it is Python and shares the machine.
    """
    return uvloop.run(_OpenLoop(port, requests).run(per_second, seconds, random.Random(seed)))


class _OpenLoop:
    def __init__(self, port: int, requests: Path) -> None:
        self._port = port
        files = sorted(requests.iterdir(), key=lambda file: int(file.name))
        self._requests = itertools.cycle([file.read_bytes() for file in files])
        self._opened: list[asyncio.StreamWriter] = []
        self._idle: list[_Connection] = []
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)
        self._good_s: list[float] = []
        self._refused = self._broken = 0

    async def run(self, per_second: float, seconds: float, rng: random.Random) -> dict[str, float]:
        late_s, tasks = list[float](), list[asyncio.Task[None]]()
        cpu, start = time.process_time(), time.monotonic()
        due = start
        while due < start + seconds:
            # A generator that is late must read answers too.
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            late_s.append(max(0.0, time.monotonic() - due))
            tasks.append(asyncio.create_task(self._send(due, next(self._requests))))
            due += rng.expovariate(per_second)
        rps, cores = len(self._good_s) / seconds, (time.process_time() - cpu) / (time.monotonic() - start)
        pending = (await asyncio.wait(tasks, timeout=DRAIN_S))[1]
        for writer in self._opened:
            writer.close()
        times = self._good_s if len(self._good_s) > 1 else [DRAIN_S, DRAIN_S]
        cuts = statistics.quantiles(times, n=100, method="inclusive")
        return {
            "offered_rps": len(late_s) / seconds,
            "rps": rps,
            "p50_ms": cuts[49] * 1e3,
            "p99_ms": cuts[98] * 1e3,
            "max_ms": max(times) * 1e3,
            "refused": self._refused / len(late_s),
            "broken": self._broken + len(pending),
            "late_p99_ms": sorted(late_s)[int(len(late_s) * 0.99)] * 1e3,
            "generator_cores": cores,
        }

    async def _send(self, due: float, request: bytes) -> None:
        try:
            async with self._slots:
                reader, writer = connection = await self._connection()
                writer.write(request)
                head = await reader.readuntil(b"\r\n\r\n")
                length = _LENGTH.search(head)
                await reader.readexactly(int(length[1]) if length else 0)
                self._idle.append(connection)
        except (OSError, asyncio.IncompleteReadError):
            self._broken += 1
        else:
            if head[9:12] == b"200":
                self._good_s.append(time.monotonic() - due)
            else:
                self._refused += 1

    async def _connection(self) -> _Connection:
        """Return an idle connection that the server has not closed, or a new one."""
        while self._idle:
            if not (connection := self._idle.pop())[0].at_eof():
                return connection
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=_STREAM_BYTES)
        self._opened.append(writer)
        return reader, writer
