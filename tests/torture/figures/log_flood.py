"""Figure 21: a flood of bad requests of several kinds writes little, hides no other line, and each request is counted. The same
check without a limit must fail.

Invariants: the flood is as fast as the service (requests are pipelined, answers only counted). How many lines are allowed
follows from the rule: a hundred of a kind at its start, then one a second. Valid requests and refusals of another kind go
beside it, slowly.
"""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Callable, Iterator

from tests.torture import at_rest
from tests.torture.at_rest import total
from tests.torture.figure import Form
from tests.torture.raw_connection import HOST, RawConnection, attend, post
from tests.torture.report import Row, at_most, fails, none_of
from tests.torture.subject import Subject

REQUESTS, LEAST_REQUESTS = 100_000, 8000
NUM_CONNECTIONS = 8
PATIENCE_S = 120.0
MOST_MIB = 1.0
# A process that stands still for a second lets a flood begin anew; that may happen a few times.
MOST_BEGINNINGS = 3
PATH = "/v1/layers/small/attend"
# No two requests of a kind have the same bytes.
BAD: dict[str, Callable[[int], bytes]] = {
    "layer_not_found": lambda number: attend([[0.5]], layer=f"none-{number}"),
    "bad_json": lambda number: post(PATH, b'{"query": %d,}' % number, {"X-Request-ID": f"flood-{number}"}),
    "not_found": lambda number: post(f"/nothing/{number}", b"{}"),
    "bad_shape": lambda number: attend([[float(number)] * 3]),
}
VALID = attend([[0.5] * 16])
OTHER, OTHER_CODE = attend([[0.5] * 16], Accept="text/none"), "not_acceptable"
PAUSE_S = 0.02


def plant() -> None:
    """Every refusal has its line."""
    from service.observability import logs

    logs.REFUSAL_LINES = 10**9


def measure(form: Form) -> Iterator[Row]:
    num = form.count(REQUESTS, LEAST_REQUESTS)
    with Subject(form.room("flood"), workers=1) as subject:
        before = subject.baseline()
        flood = _Flood(subject, num)
        yield at_most(21, f"{num:,} bad requests in {flood.took_s:.0f} s write", flood.written_mib, MOST_MIB, " MiB")
        yield none_of(21, "kinds with more than a hundred lines and one sum a second", flood.too_many)
        yield none_of(21, "kinds for which requests, lines with sums, and metric differ in number", flood.miscounted)
        yield none_of(21, "other requests beside them whose line is missing", flood.hidden)
        yield from at_rest.rows(21, subject, before)
    with Subject(form.room("no-limit"), plants={"modules": [__name__]}, workers=1) as subject:
        flood = _Flood(subject, LEAST_REQUESTS)
        yield fails(21, "the same check without a limit", "; ".join(flood.too_many[:2]), bool(flood.too_many))


class _Flood:
    """What the log holds after so many bad requests, and the others beside them."""

    def __init__(self, subject: Subject, num: int) -> None:
        self._sent: collections.Counter[str] = collections.Counter()
        size, counted, num_lines = _log_bytes(subject), subject.samples(), sum(1 for _ in subject.lines())
        started = time.monotonic()
        asyncio.run(self._run(subject.port, num // len(BAD) // NUM_CONNECTIONS))
        self.took_s = time.monotonic() - started
        time.sleep(2)  # the last second is summed up at its end
        self.written_mib = (_log_bytes(subject) - size) / at_rest.MIB
        lines = list(subject.lines())[num_lines:]
        self._lines = collections.Counter(line.get("code", "none") for line in lines if line["event"] == "request")
        sums = [line for line in lines if line["event"] == "refusals_suppressed"]
        self._num_sums = collections.Counter(line["code"] for line in sums)
        self._summed = {code: sum(line["count"] for line in sums if line["code"] == code) for code in BAD}
        now = subject.samples()
        self._counted = {code: _rejected(now, code) - _rejected(counted, code) for code in BAD}
        self._received = total(now, "received_total") - total(counted, "received_total")

    @property
    def too_many(self) -> list[str]:
        return [
            f"{code}: {self._lines[code]} lines, {self._num_sums[code]} sums"
            for code in BAD
            if self._lines[code] > 100 * MOST_BEGINNINGS or self._num_sums[code] > self.took_s + MOST_BEGINNINGS
        ]

    @property
    def miscounted(self) -> list[str]:
        numbers = {
            code: (self._sent[code], self._lines[code] + self._summed[code], self._counted[code]) for code in BAD
        }
        found = [f"{code}: {told}" for code, told in numbers.items() if len(set(told)) > 1]
        num = self._sent.total()
        return found + ([] if self._received == num else [f"{num} sent, {self._received:g} received"])

    @property
    def hidden(self) -> list[str]:
        return [
            f"{code}: {self._sent[code]} sent, {self._lines[code]} lines"
            for code in ("none", OTHER_CODE)
            if self._sent[code] != self._lines[code]
        ]

    async def _run(self, port: int, each: int) -> None:
        is_over = asyncio.Event()
        beside = asyncio.ensure_future(self._ask_beside(port, is_over))
        numbers = iter(range(10**9))
        for code, wire in BAD.items():
            await asyncio.gather(
                *(_pour(port, [wire(next(numbers)) for _ in range(each)]) for _ in range(NUM_CONNECTIONS))
            )
            self._sent[code] += each * NUM_CONNECTIONS
        is_over.set()
        await beside

    async def _ask_beside(self, port: int, is_over: asyncio.Event) -> None:
        connection = RawConnection(port)
        while not is_over.is_set():
            for code, wire in ("none", VALID), (OTHER_CODE, OTHER):
                await asyncio.sleep(PAUSE_S)
                await connection.ask(wire, PATIENCE_S)
                self._sent[code] += 1
        connection.close()


async def _pour(port: int, wires: list[bytes]) -> None:
    """Sends all at once, then waits for as many refusals."""
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(b"".join(wires))
    num, rest = 0, b""
    async with asyncio.timeout(PATIENCE_S):
        while num < len(wires) and (data := await reader.read(2**16)):
            found = rest + data
            num += found.count(b"HTTP/1.1 4")
            rest = found[-9:]
    assert num == len(wires), f"{num} of {len(wires)} answers"
    writer.transport.abort()


def _log_bytes(subject: Subject) -> int:
    return (subject.directory / "out.log").stat().st_size


def _rejected(samples: dict[str, float], code: str) -> float:
    return samples.get(f'attention_rejected_total{{reason="{code}"}}', 0.0)
