"""Figure 16: clients that end their own sending (FIN) behind a request, and wait, or leave, or reset the connection.

Invariants: every client whose last whole request says that it is the last is answered, and so is what it sent before; any other
FIN, and every reset, cancels: what an engine ran is read from what the planted engine wrote; with the old fault planted, that
every FIN cancels, the first check fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Awaitable, Iterator

from tests.torture import at_rest
from tests.torture.figure import Form
from tests.torture.health import Health
from tests.torture.planted import never_executed
from tests.torture.raw_connection import HANG_S, HOST, Cut, RawConnection, post, read_reply, reset_at_close, share_out
from tests.torture.report import Row, fails, none_of
from tests.torture.subject import Subject

CLIENTS = 400
# So that most clients end their sending, or leave, while they are queued.
COST_S = 0.02
NUM_CONNECTIONS = 24
# Other requests keep the engine at work, so that a client that leaves was queued.
NUM_BUSY = 4
# A reset is looked for every 50 ms; a FIN is news at once.
CHECK_S = 0.05
LEAST_NEWS_S = 0.01
FIRST_MARK = 1000
ROUTE = "/v1/layers/small/attend"
CLOSE = {"Connection": "close"}


def plant() -> None:
    """Every client that ends its sending is gone, but for one that is being refused."""
    from service.http.connection import Connection, Stage

    def is_refused(connection: Connection) -> bool:
        return connection._stage is Stage.DROP and connection.is_busy

    Connection._client_waits = is_refused  # type: ignore[method-assign, assignment]


def measure(form: Form) -> Iterator[Row]:
    room = form.room("half-close")
    executed = room / "executed.txt"
    num = form.count(CLIENTS, 72)
    with Subject(room, plants={"cost_s": COST_S, "executed": str(executed)}, workers=1, standing_wait_ms=0) as subject:
        before = subject.baseline()
        yield none_of(
            16,
            f"{num} half-closed clients whose request says that it is the last: not answered",
            _unanswered(subject, form, num),
        )
        with Health(subject.port) as health:
            ended, reset = asyncio.run(_leave_all(subject, form, num))
        lag_s = max(LEAST_NEWS_S, 2 * health.quantile_ms(0.99) / 1000)
        yield never_executed(16, "that half-closed behind a kept-alive request", executed, ended, lag_s)
        what = "that half-closed behind their last request and then reset"
        yield never_executed(16, what, executed, reset, CHECK_S + lag_s)
        yield from at_rest.rows(16, subject, before)
    plants = {"cost_s": COST_S, "modules": ["tests.torture.figures.half_close"]}
    with Subject(form.room("fin-cancels"), plants=plants, workers=1, standing_wait_ms=0) as subject:
        told = _unanswered(subject, form, num)
        yield fails(16, "a planted fault (every FIN cancels) fails the first check", f"{len(told)}", bool(told))


def _unanswered(subject: Subject, form: Form, num: int) -> list[str]:
    def ask(number: int) -> Awaitable[str | None]:
        return _ask(subject.port, form.random(f"half-closed {number}"))

    return asyncio.run(share_out(range(num), NUM_CONNECTIONS, ask))


async def _ask(port: int, rng: random.Random) -> str | None:
    """One client that sends all it has, ends its sending and waits; what it missed."""
    kind, last = rng.choice(list(_last_requests(rng).items()))
    num_before = rng.choice((0, 0, 1, 3))
    wire = b"".join(_request(rng.randint(1, 6)) for _ in range(num_before)) + last
    told = f"{kind} behind {num_before} others"
    reader, writer = await asyncio.open_connection(HOST, port, limit=2**20)
    try:
        async with asyncio.timeout(HANG_S):
            writer.write(wire)
            await asyncio.sleep(rng.choice((0, 0, rng.uniform(0, 0.05))))
            writer.write_eof()
            for _ in range(num_before + 1):
                reply = await read_reply(reader)
                if reply.status != 200:
                    return f"{told}: {reply.status}"
            return f"{told}: more than its answers" if await reader.read(1) else None
    except (TimeoutError, Cut, OSError) as error:
        return f"{told}: {type(error).__name__} {error}"
    finally:
        writer.transport.abort()


def _last_requests(rng: random.Random) -> dict[str, bytes]:
    """Requests that say that they are their client's last, in several forms."""
    body = _body(rng.randint(1, 6))
    step = rng.choice((1, 7, 100))
    chunks = b"".join(
        b"%x\r\n%b\r\n" % (len(body[i : i + step]), body[i : i + step]) for i in range(0, len(body), step)
    )
    expecting = {**CLOSE, "Expect": "100-continue"}
    chunked = post(ROUTE, b"", {**CLOSE, "Transfer-Encoding": "chunked"}).replace(b"Content-Length: 0\r\n", b"")
    return {
        "close": post(ROUTE, body, CLOSE),
        "HTTP/1.0": post(ROUTE, body).replace(b"HTTP/1.1", b"HTTP/1.0", 1),
        "100-continue": post(ROUTE, body, expecting),
        "chunked": chunked + chunks + b"0\r\n\r\n",
        "a line end behind it": post(ROUTE, body, CLOSE) + b"\r\n",
    }


async def _leave_all(subject: Subject, form: Form, num: int) -> tuple[dict[int, float], dict[int, float]]:
    """When the client with each mark ended its sending behind a kept-alive request; when it reset behind its last."""
    ended: dict[int, float] = {}
    reset: dict[int, float] = {}

    async def leave(mark: int) -> None:
        rng = form.random(f"leaver {mark}")
        found = ended if mark % 2 else reset
        with contextlib.suppress(OSError):
            found[mark] = await _leave(subject.port, mark, rng, resets=found is reset)

    async def keep_busy() -> None:
        with contextlib.closing(RawConnection(subject.port)) as connection:
            while True:
                await connection.outcome(_request(1))

    busy = [asyncio.ensure_future(keep_busy()) for _ in range(NUM_BUSY)]
    await share_out(range(FIRST_MARK, FIRST_MARK + 2 * num), NUM_CONNECTIONS, leave)
    for task in busy:
        task.cancel()
    await asyncio.wait(busy)
    return ended, reset


async def _leave(port: int, mark: int, rng: random.Random, *, resets: bool) -> float:
    _, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(_request(rng.randint(1, 6), mark, CLOSE if resets else {}))
        await asyncio.sleep(rng.uniform(0, 0.05))
        writer.write_eof()
        left_at = time.monotonic()
        if not resets:
            await asyncio.sleep(0.3)
            return left_at
        await asyncio.sleep(rng.uniform(0, 0.1))
        reset_at_close(writer.get_extra_info("socket"))
    finally:
        writer.transport.abort()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return time.monotonic()


def _body(rows: int, mark: float = 0.5) -> bytes:
    return json.dumps({"query": [[mark, *[0.5] * 15]] * rows}).encode()


def _request(rows: int, mark: float = 0.5, headers: dict[str, str] | None = None) -> bytes:
    return post(ROUTE, _body(rows, mark), headers)
