"""Body loop: one large request over and over, in an open or a closed loop, by a process of its own.

Laws: every request has a connection of its own; it reads while it sends, and stops sending when it is answered; nothing is copied
on the way to the kernel, so that the generator is not the limit; in the open loop a request's time counts from when it was due.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.torture.line import HOST, Cut, Reply, read_reply

PATIENCE_S = 20.0


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """`per_second` requests, as they come, or `callers` of whom each has one under way."""

    port: int
    seconds: float
    per_second: float = 0.0
    callers: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """Status 0: none, and `how` says why."""

    status: int
    seconds: float
    retry_after_s: float | None = None
    how: str = ""


def offered(load: Load, wire: bytes) -> list[Answer]:
    """All answers, in the order in which they came."""
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(wire)
        command = [sys.executable, "-m", "tests.torture.body_loop", json.dumps(dataclasses.asdict(load)), file.name]
        told = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    return [Answer(*fields) for fields in json.loads(told)]


async def _run(load: Load, wire: bytes) -> list[Answer]:
    answers: list[Answer] = []

    async def ask(due: float) -> None:
        try:
            reply = await asyncio.wait_for(_ask(load.port, wire), PATIENCE_S)
        except (OSError, Cut) as error:  # a TimeoutError is an OSError
            answers.append(Answer(0, time.monotonic() - due, None, type(error).__name__))
            return
        retry_after_s = float(reply.headers["retry-after"]) if "retry-after" in reply.headers else None
        answers.append(Answer(reply.status, time.monotonic() - due, retry_after_s))

    async def call(end: float) -> None:
        while (now := time.monotonic()) < end:
            await ask(now)

    end = time.monotonic() + load.seconds
    if load.callers:
        await asyncio.gather(*(call(end) for _ in range(load.callers)))
        return answers
    arrivals, due, under_way = random.Random(12), time.monotonic(), set()
    while (due := due + arrivals.expovariate(load.per_second)) < end:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        under_way.add(task := asyncio.create_task(ask(due)))
        task.add_done_callback(under_way.discard)
    await asyncio.gather(*under_way)
    return answers


async def _ask(port: int, wire: bytes) -> Reply:
    """Raises OSError or Cut."""
    loop = asyncio.get_running_loop()
    with socket.socket() as line:
        line.setblocking(False)
        await loop.sock_connect(line, (HOST, port))
        reader = asyncio.StreamReader()
        both = [loop.create_task(loop.sock_sendall(line, memoryview(wire))), loop.create_task(_read(line, reader))]
        try:
            return await read_reply(reader)
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)


async def _read(line: socket.socket, reader: asyncio.StreamReader) -> None:
    loop = asyncio.get_running_loop()
    try:
        while data := await loop.sock_recv(line, 2**18):
            reader.feed_data(data)
    finally:
        reader.feed_eof()


if __name__ == "__main__":
    asked = Load(**json.loads(sys.argv[1]))
    found = asyncio.run(_run(asked, Path(sys.argv[2]).read_bytes()))
    sys.stdout.write(json.dumps([dataclasses.astuple(answer) for answer in found]))
