"""Figure 13: stdout and stderr are one unread pipe. Requests, health, a replacement and the end go on, and each
line is read later or counted. The same check with streams that block must fail.

Invariants: more lines are written than the pipe and the memory of the processes take; lines are compared with requests only
where no process was killed in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator

from tests.torture import process_tree
from tests.torture.at_rest import total, unbalanced
from tests.torture.figure import Form
from tests.torture.health import Health
from tests.torture.raw_connection import RawConnection, attend
from tests.torture.report import Row, at_least, at_most, fails, none_of
from tests.torture.subject import Subject

REQUESTS, LEAST_REQUESTS = 20_000, 4000
NUM_CONNECTIONS = 16
GRACE_S = 5.0
REPLACED_S = 28.0
REPORTED_S = 10.0
REQUEST = attend([[0.5] * 16])
DROPPED = "log_lines_dropped_total"


def plant() -> None:
    """Lets the streams block again, for all processes: they share them."""
    os.set_blocking(1, True)
    os.set_blocking(2, True)


def measure(form: Form) -> Iterator[Row]:
    num = form.count(REQUESTS, LEAST_REQUESTS)
    with Subject(form.room("unread"), piped=True, workers=2, shutdown_grace_s=GRACE_S) as subject:
        with Health(subject.port) as health:
            wrong = asyncio.run(_ask_all(subject.port, num))
        yield none_of(13, f"{num:,} requests while nothing reads the log: not answered with 200", wrong)
        yield none_of(13, "/healthz beside them: not answered with 200", health.wrong)
        yield from _read_again(subject, num)
        wrong = asyncio.run(_ask_all(subject.port, LEAST_REQUESTS))
        yield none_of(13, "requests while again nothing reads the log: not answered with 200", wrong)
        yield at_most(13, "a killed worker is replaced within", _replaced_s(subject), REPLACED_S, " s")
        yield none_of(13, "counts that do not add up", unbalanced(subject.samples()))
        yield from _ends(subject)
    with Subject(form.room("blocking"), plants={"modules": [__name__]}, piped=True, workers=2) as subject:
        wrong = asyncio.run(_ask_all(subject.port, LEAST_REQUESTS))
        told = f"{len(wrong)}: {', '.join(wrong[:2])}"
        yield fails(13, "the same check with streams that block", told, bool(wrong))


async def _ask_all(port: int, num: int) -> list[str]:
    """What was wrong with so many requests; after one without an answer its connection sends no more."""
    wrong: list[str] = []
    numbers = iter(range(num))

    async def ask_on(_: int) -> None:
        with contextlib.closing(RawConnection(port)) as connection:
            for _ in numbers:
                reply = await connection.outcome(REQUEST)
                if isinstance(reply, str):
                    wrong.append(reply)
                    return
                wrong.extend([f"status {reply.status}"] * (reply.status != 200))

    await asyncio.gather(*map(ask_on, range(NUM_CONNECTIONS)))
    return wrong


def _read_again(subject: Subject, num: int) -> Iterator[Row]:
    end = time.monotonic() + REPORTED_S
    while True:
        lines = list(subject.lines())
        num_read = sum(line["event"] == "request" for line in lines)
        reports = [line["lines"] for line in lines if line["event"] == "log_lines_dropped"]
        num_counted = total(subject.samples(), DROPPED)
        if num_read + sum(reports) == num or time.monotonic() > end:
            break
        time.sleep(0.05)
    yield at_least(13, "log lines that found no reader, by the metric", num_counted, num / 2)
    yield none_of(
        13,
        "requests whose line was neither read nor reported, once the log is read again",
        [f"{num} sent, {num_read} read, {sum(reports)} reported"] * (num_read + sum(reports) != num),
    )
    yield none_of(
        13,
        "lines that the metric and the reports count differently",
        [f"{num_counted:g} and {reports}"] * (num_counted != sum(reports)),
    )
    yield at_most(13, "reports of dropped lines, one for each worker", len(reports), 2)


def _replaced_s(subject: Subject) -> float:
    before = process_tree.children(subject.process.pid)
    os.kill(before[0], signal.SIGKILL)
    started = time.monotonic()
    while time.monotonic() - started < 2 * REPLACED_S:
        now = process_tree.children(subject.process.pid)
        if before[0] not in now and len(now) == len(before) and subject.get("/readyz")[0] == 200:
            break
        time.sleep(0.05)
    return time.monotonic() - started


def _ends(subject: Subject) -> Iterator[Row]:
    started = time.monotonic()
    subject.process.send_signal(signal.SIGTERM)
    try:
        code: int | None = subject.process.wait(2 * GRACE_S + 2)
    except subprocess.TimeoutExpired:
        code = None
    yield at_most(13, "shutdown, while nothing reads the log, takes", time.monotonic() - started, GRACE_S + 2, " s")
    yield none_of(13, "exit codes other than 0", [] if code == 0 else [str(code)])
