"""Figure 4: a soak at 70 % of what the service can do: random shapes and forms, 10 % bad, 5 % that disconnect; nothing grows. And
the same check with a leak planted, which must fail it: a check that cannot fail proves nothing.

Invariants: capacity is measured first, with the same mixture; arrivals are open-loop; growth is the median of the last tenth of
the measurements less that of the first tenth after the warm-up.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Iterator

from tests.torture import answer_rules, at_rest, series
from tests.torture.figure import Form
from tests.torture.inputs import mutations, valid
from tests.torture.raw_connection import RawConnection
from tests.torture.report import Row, at_most, fails, none_of
from tests.torture.subject import Subject, Vitals

MIB = 2**20
LOAD = 0.7
BAD, LEAVING = 0.10, 0.05
MAX_ROWS = 48
NUM_CONNECTIONS = 32
CAPACITY_S = 4.0
WARM_UP_SHARE = 0.3
SAMPLE_S = 0.5
MAX_GROWTH_MIB = 16
# A leak that the check has to see: about twice what it allows, over the measured part of the form.
LEAK_MIB = 2.5 * MAX_GROWTH_MIB


def measure(form: Form) -> Iterator[Row]:
    with Subject(form.room("soak"), workers=1) as subject:
        soak = _Soak(subject, form)
        soak.run(form.soak_s)
        told = f"{form.soak_s:.0f} s at {LOAD:.0%} ({soak.per_second:.0f}/s)"
        yield none_of(4, f"soak of {told}: wrong answers, hangs", soak.wrong)
        yield at_most(4, "memory growth after the warm-up", soak.growth_mib, MAX_GROWTH_MIB, " MiB")
        yield none_of(4, "files and threads that grew, series that callers made", soak.grown)
        yield from at_rest.rows(4, subject, soak.before)
        per_second = soak.per_second
    seconds = min(form.soak_s, 600)
    leak_bytes = int(LEAK_MIB * MIB / (per_second * 0.85 * seconds * (1 - WARM_UP_SHARE)))
    with Subject(form.room("leak"), plants={"leak_bytes": leak_bytes, "leak_descriptors": True}, workers=1) as subject:
        soak = _Soak(subject, form, per_second)
        soak.run(seconds)
        is_found = soak.growth_mib > MAX_GROWTH_MIB and any("files" in told for told in soak.grown)
        told = f"{soak.growth_mib:.1f} MiB; {'; '.join(soak.grown)}"
        what = f"a planted leak of {leak_bytes:,} bytes a request and some descriptors fails the check"
        yield fails(4, what, told, is_found)


class _Soak:
    def __init__(self, subject: Subject, form: Form, per_second: float | None = None) -> None:
        self._subject = subject
        self._form = form
        self.wrong: list[str] = []
        self.before = subject.baseline()
        self._known = subject.samples().keys()
        self.per_second = per_second or LOAD * asyncio.run(self._capacity())
        self._vitals: list[Vitals] = []

    def run(self, seconds: float) -> None:
        asyncio.run(self._run(seconds))

    @property
    def _measured(self) -> list[Vitals]:
        return self._vitals[int(len(self._vitals) * WARM_UP_SHARE) :]

    @property
    def growth_mib(self) -> float:
        sizes = [vitals.resident_bytes for vitals in self._measured]
        tenth = max(1, len(sizes) // 10)
        return (statistics.median(sizes[-tenth:]) - statistics.median(sizes[:tenth])) / MIB

    @property
    def grown(self) -> list[str]:
        """What is counted, not weighed, must not grow at all; it comes and goes, so its least number counts.

        A status that a route had not answered with before is a new series, and no growth: there are only so many.
        """
        half = len(self._measured) // 2
        told = []
        for name in ("num_files", "num_threads"):
            first, last = (
                min(getattr(v, name) for v in part) for part in (self._measured[:half], self._measured[half:])
            )
            if last > first:
                told.append(f"{name.removeprefix('num_')}: {first} to {last}")
        late = self._subject.samples().keys() - self._known
        return told + [f"series: {name}" for name in series.made_by_callers(self._subject, late)]

    async def _capacity(self) -> float:
        """Answers a second with every connection always busy."""
        counted, end = itertools.count(), time.monotonic() + CAPACITY_S
        numbers = itertools.count(1_000_000)

        async def work() -> None:
            connection = RawConnection(self._subject.port)
            while time.monotonic() < end:
                await self._one(connection, next(numbers))
                next(counted)
            connection.close()

        await asyncio.gather(*(work() for _ in range(NUM_CONNECTIONS)))
        return next(counted) / CAPACITY_S

    async def _run(self, seconds: float) -> None:
        rng, free, tasks = (
            self._form.random("arrivals"),
            [RawConnection(self._subject.port) for _ in range(NUM_CONNECTIONS)],
            set(),
        )
        watching = asyncio.ensure_future(self._watch())
        due = start = time.monotonic()
        for number in itertools.count():
            due += rng.expovariate(self.per_second)
            if due > start + seconds:
                break
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            connection = free.pop() if free else RawConnection(self._subject.port)
            task = asyncio.ensure_future(self._lent(connection, number, free))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)
        watching.cancel()
        for connection in free:
            connection.close()

    async def _lent(self, connection: RawConnection, number: int, free: list[RawConnection]) -> None:
        await self._one(connection, number)
        if len(free) < NUM_CONNECTIONS:
            free.append(connection)
        else:
            connection.close()

    async def _one(self, connection: RawConnection, number: int) -> None:
        rng = self._form.random(f"soak {number}")
        kind = rng.random()
        given = mutations.draw(rng) if kind < BAD else valid.draw(rng, MAX_ROWS)
        if BAD <= kind < BAD + LEAVING:
            await self._leave(connection, given.wire(), rng)
            return
        reply = await connection.outcome(given.wire())
        if isinstance(reply, str):
            self.wrong.append(f"#{number} {reply}")
            return
        told = answer_rules.violation(reply, is_inference=given.is_inference, is_head=given.method == "HEAD")
        if told is None and kind >= BAD and reply.status != 200:
            told = f"a valid request got {reply.status} {reply.body[:120]!r}"
        if told is not None:
            self.wrong.append(f"#{number} {told}")

    async def _leave(self, connection: RawConnection, wire: bytes, rng: random.Random) -> None:
        await connection.send(wire[: rng.randint(1, len(wire))] if rng.random() < 0.5 else wire)
        await asyncio.sleep(rng.uniform(0, 0.01))
        connection.close()

    async def _watch(self) -> None:
        while True:
            self._vitals.append(await asyncio.to_thread(self._subject.vitals))
            await asyncio.sleep(SAMPLE_S)
