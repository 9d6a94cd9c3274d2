"""Faults on the path that most batches take: the event loop's own thread computes what likely ends within 15 ms.

Invariant: every test reads from the file of passes (`faulty_service.py`) that the event loop's thread began the pass in question,
or most of them; else it would prove nothing.
"""

import asyncio
import concurrent.futures
import signal
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import httpx2
import pytest

from service.batching.admission import WINDOW
from service.supervisor.supervisor import EXIT_ENGINE_DOWN
from tests.e2e.faulty_service import DEVICE, ENDS, RAISES, SLOW, STUCK, STUMBLES
from tests.e2e.test_faults import Faulty
from tests.torture import at_rest
from tests.torture.health import Health
from tests.torture.raw_connection import Cut, RawConnection, Reply, Silence, attend

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
MATES = [0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75]
BOTH = pytest.mark.parametrize("workers", [1, 2], ids=["one worker", "two workers"])
# Eight requests sent at once share a batch, and a full batch does not wait.
IN_COMPANY = dict(max_wait_ms=100, max_batch_requests=len(MATES) + 1)
LEAVER = 3.0
CUT_OFF = "cut off"


class Pass(NamedTuple):
    pid: int
    thread: str
    marks: list[float]

    @property
    def is_inline(self) -> bool:
        return self.thread == threading.main_thread().name


def wire(mark: float) -> bytes:
    return attend([[mark, *[0.25] * 15], [0.125] * 16])


def bits(reply: Reply) -> bytes:
    """The answer without the fields that differ from request to request."""
    return reply.body.partition(b',"batch":')[0]


async def _together(port: int, marks: list[float]) -> list[Reply | None]:
    connections = [RawConnection(port) for _ in marks]

    async def answer(connection: RawConnection, mark: float) -> Reply | None:
        try:
            await connection.send(wire(mark))
            return await connection.read(60)
        except (Cut, OSError):
            return None
        finally:
            connection.close()

    await asyncio.gather(*(connection.send(b"") for connection in connections))  # connected
    return await asyncio.gather(
        *(answer(connection, mark) for connection, mark in zip(connections, marks, strict=True))
    )


class Inline(Faulty):
    """A service that records which thread began each pass."""

    def __init__(self, directory, environment=None, **settings) -> None:
        self.file = directory.parent / "passes.txt"
        super().__init__(directory, environment={"FAULTY_PASSES": str(self.file), **(environment or {})}, **settings)

    def passes(self) -> list[Pass]:
        """The passes of requests, in order; a probe's mark is 0."""
        words = [line.split() for line in self.file.read_text(encoding="ascii").splitlines()]
        passes = [Pass(int(pid), thread, [float(mark) for mark in marks]) for pid, thread, *marks in words]
        return [found for found in passes if found.marks != [0.0]]

    def first(self, mark: float) -> Pass:
        """The first pass with this mark."""
        return next(found for found in self.passes() if mark in found.marks)

    def together(self, *marks: float) -> list[Reply | None]:
        """The answers to requests sent at once, each over a connection of its own; None: the connection was cut."""
        return asyncio.run(_together(self.port, list(marks)))

    def trust(self) -> None:
        """Returns when every process has computed two batches in a row inline."""

        def is_trusted() -> bool:
            self.together(*[0.5] * 8 * len(self.pids()))
            last = [[found.is_inline for found in self.passes() if found.pid == pid][-2:] for pid in self.pids()]
            return all(pair == [True, True] for pair in last)

        self.until(is_trusted, 60)

    def alone(self) -> dict[float, bytes]:
        """The bits of the answer to each of the mates, sent alone."""
        (replies,) = zip(*(self.together(mark) for mark in MATES), strict=True)
        return {mark: bits(reply) for mark, reply in zip(MATES, replies, strict=True) if reply is not None}

    def inline_share(self) -> float:
        found = self.passes()
        return sum(one.is_inline for one in found) / len(found)


@pytest.fixture
def serve(serve):
    def start(**settings):
        service = serve(kind=Inline, **settings)
        service.wait_ready()
        return service

    return start


def outcomes(replies: Sequence[Reply | None]) -> list[object]:
    """Status, or status and code, of each."""
    return [
        CUT_OFF if reply is None else 200 if reply.status == 200 else (reply.status, reply.json()["code"])
        for reply in replies
    ]


def assert_mates_have_their_bits(service: Inline, alone: dict[float, bytes], mates: list[Reply | None]) -> None:
    assert outcomes(mates) == [200] * len(MATES)
    assert {mark: bits(reply) for mark, reply in zip(MATES, mates, strict=True) if reply is not None} == alone
    assert not service.find(event="worker_died")


@pytest.mark.long
@BOTH
def test_an_exception_in_an_inline_batch_harms_neither_other_requests_nor_the_loop(serve, workers):
    service = serve(workers=workers, **IN_COMPANY)
    alone = service.alone()
    for mark in (RAISES, *ENDS):
        service.trust()
        culprit, *mates = service.together(mark, *MATES)
        assert service.first(mark).is_inline
        assert outcomes([culprit]) == [(500, "engine_failed")]
        assert b"secret" not in culprit.body
        assert_mates_have_their_bits(service, alone, mates)
    if workers == 1:
        assert all(len(service.first(mark).marks) > 1 for mark in (RAISES, *ENDS)), "it had company"
    assert httpx2.get(f"{service.url}/healthz").status_code == 200


@pytest.mark.long
def test_a_device_failure_in_an_inline_batch_fails_all_waiting_requests_and_its_process_is_replaced(serve):
    service = serve(workers=1, heartbeat_s=0.2, **IN_COMPANY)
    alone = service.alone()
    service.trust()
    (before,) = service.pids()
    replies = service.together(DEVICE, *MATES)
    assert service.first(DEVICE).is_inline
    assert len(service.first(DEVICE).marks) == len(replies)
    assert outcomes(replies) == [(503, "engine_down")] * len(replies)
    assert all(int(reply.headers["retry-after"]) >= 1 for reply in replies if reply is not None)
    assert service.line(event="worker_died", pid=before)["exit_code"] == EXIT_ENGINE_DOWN
    service.wait_ready()
    assert service.alone() == alone


@pytest.mark.long
@pytest.mark.parametrize("mark", [SLOW, STUMBLES], ids=["slow", "slow and out of memory, on that thread only"])
def test_a_pass_that_blocked_the_loop_sends_its_lane_to_the_thread_for_a_while(serve, mark):
    service = serve(workers=1, **IN_COMPANY)
    service.trust()
    assert set(outcomes(service.together(mark, *MATES))) == {200}
    assert service.first(mark).is_inline
    num_before = len(service.passes())
    with concurrent.futures.ThreadPoolExecutor() as pool:
        again = pool.submit(service.together, SLOW)
        service.until(lambda: len(service.passes()) > num_before)
        assert httpx2.get(f"{service.url}/healthz").status_code == 200
        assert not again.done(), "the loop did not wait for this one"
        assert outcomes(again.result()) == [200]
    for _ in range(WINDOW - 1):
        service.together(*MATES)
    assert [found.thread for found in service.passes()[num_before:][:WINDOW]] == ["compute_0"] * WINDOW
    service.trust()


@pytest.mark.long
@pytest.mark.slow
def test_an_inline_pass_that_never_ends_costs_only_its_own_process(serve):
    service = serve(workers=2, stuck_s=1, **IN_COMPANY)
    alone = service.alone()

    async def main() -> None:
        connections = [RawConnection(service.port) for _ in range(16)]
        by_pid: dict[int, list[RawConnection]] = {}
        for number, connection in enumerate(connections):
            reply = await connection.ask(wire(2.0 + number / 64), 60)
            # A connection that is closed for a process that has just joined would be opened again to either of them.
            if not reply.closes:
                by_pid.setdefault(service.first(2.0 + number / 64).pid, []).append(connection)
        victim = max(by_pid, key=lambda pid: len(by_pid[pid]))
        doomed, (others,) = by_pid.pop(victim), by_pid.values()
        assert len(doomed) > 1
        await asyncio.to_thread(service.trust)
        await doomed[0].send(wire(STUCK))
        await asyncio.to_thread(service.until, lambda: STUCK in service.passes()[-1].marks)
        assert service.first(STUCK).is_inline
        await asyncio.gather(*(connection.send(wire(0.5)) for connection in doomed[1:]))
        ends = [asyncio.ensure_future(connection.read(60)) for connection in doomed]
        while not all(end.done() for end in ends):
            assert bits(await others[0].ask(wire(0.5), 60)) == alone[0.5], "the other process serves on"
            await asyncio.sleep(0.01)
        assert all(isinstance(end.exception(), Cut) for end in ends), "cut off, never answered wrongly"
        died = service.line(event="worker_died")
        assert (died["pid"], died["signal"]) == (victim, "SIGKILL")
        for connection in connections:
            connection.close()
        await asyncio.sleep(0)  # a transport closes in a later turn

    asyncio.run(main())
    service.wait_ready()
    assert service.alone() == alone
    assert len(service.find(event="worker_died")) == 1


@pytest.mark.long
def test_a_signal_during_an_endless_inline_pass_ends_the_service_within_the_grace_and_two_seconds(serve):
    service = serve(workers=1, shutdown_grace_s=1)
    service.trust()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        asked = pool.submit(service.together, STUCK)
        service.until(lambda: STUCK in service.passes()[-1].marks)
        assert service.first(STUCK).is_inline
        service.process.send_signal(signal.SIGTERM)
        service.process.wait(30)
        assert outcomes(asked.result()) == [CUT_OFF]
    assert service.find(event="workers_killed")


class Callers:
    """So many, each over one connection and with the next request as soon as it has its answer, in a thread of their own until
    `with` ends or the service says that this was the last; what they heard, and whose request had no answer.
    """

    def __init__(self, service: Inline, num: int) -> None:
        self.statuses: list[int] = []
        self.lost: list[str] = []
        self._is_over = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._all(service.port, num)))

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.join()

    async def _all(self, port: int, num: int) -> None:
        await asyncio.gather(*(self._one(RawConnection(port), MATES[number % len(MATES)]) for number in range(num)))

    async def _one(self, connection: RawConnection, mark: float) -> None:
        is_last = False
        while not (self._is_over or is_last):
            try:
                await connection.send(wire(mark))
                reply = await connection.read(30)
            except (Cut, Silence, OSError) as error:
                self.lost.append(f"{type(error).__name__} {error}")
                return
            is_last = reply.closes
            self.statuses.append(reply.status)
        connection.close()


BUSY = dict(environment={"FAULTY_FORWARD_S": "0.002"})


@pytest.mark.long
def test_disconnects_during_an_inline_pass_harm_no_other_request(serve):
    service = serve(workers=1, **IN_COMPANY)
    alone = service.alone()
    service.trust()

    async def main() -> None:
        marks = [SLOW, *MATES[:3], *[LEAVER] * 4]
        connections = [RawConnection(service.port) for _ in marks]
        await asyncio.gather(*(connection.send(b"") for connection in connections))
        await asyncio.gather(
            *(connection.send(wire(mark)) for connection, mark in zip(connections, marks, strict=True))
        )
        await asyncio.to_thread(service.until, lambda: SLOW in service.passes()[-1].marks)
        for number, connection in enumerate(connections[4:]):
            (connection.reset if number % 2 else connection.close)()
        replies = [await connection.read(30) for connection in connections[:4]]
        assert outcomes(replies) == [200] * 4
        assert [bits(reply) for reply in replies[1:]] == [alone[mark] for mark in MATES[:3]]
        for connection in connections:
            connection.close()
        await asyncio.sleep(0)

    asyncio.run(main())
    assert service.first(SLOW).is_inline
    assert service.first(SLOW).marks.count(LEAVER) == 4
    service.until(lambda: not at_rest.unbalanced(service.samples()), 10)
    assert set(outcomes(service.together(*MATES))) == {200}


@pytest.mark.long
@BOTH
def test_l4_a_signal_under_load_of_inline_batches_loses_no_accepted_request(serve, workers):
    service = serve(workers=workers, shutdown_grace_s=10, **BUSY)
    service.trust()
    with Callers(service, 16 * workers) as callers:
        service.until(lambda: len(callers.statuses) > 200 and service.passes()[-1].is_inline)
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(30) == 0, "by itself, in the grace"
    assert callers.lost == []
    assert set(callers.statuses) <= {200, 503}


@pytest.mark.timed
@BOTH
def test_32_clients_of_small_requests_do_not_delay_a_health_check(serve, workers):
    service = serve(workers=workers)
    service.trust()
    with Callers(service, 32) as callers, Health(service.port) as health:
        time.sleep(5)
    assert callers.lost == health.wrong == []
    assert set(callers.statuses) == {200}
    assert service.inline_share() > 0.5
    assert health.quantile_ms(0.99) <= 100
