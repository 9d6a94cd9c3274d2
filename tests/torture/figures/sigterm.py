"""Figure 2: SIGTERM under load, again and again; what was accepted is answered.

Invariants: accepted = sent whole on a connection that was established; a refused connection is not accepted; the answer is 200 or
503, never a reset or an end of the stream. Readiness is requested every few milliseconds on a connection of its own; no listener
is as good an answer as a 503. Every other round has a drain delay, in which service must go on unchanged.
"""

from __future__ import annotations

import http.client
import signal
import threading
import time
from collections.abc import Iterator

from tests.torture.canary import quantile
from tests.torture.figure import Form
from tests.torture.open_loop import Arrivals, OpenLoop, Record
from tests.torture.planted import INLINE, LEAST_INLINE, inline_share
from tests.torture.report import Row, at_least, at_most, none_of
from tests.torture.subject import Subject

ROUNDS = 50
COST_S = 0.005
LOAD = 0.8
LOADED_S = 1.0
GRACE_S = 10.0
DELAYS_S = (0.0, 0.3)
MAX_FLIP_MS = 100
NOT_ACCEPTED = "refused"


def measure(form: Form) -> Iterator[Row]:
    lost: list[str] = []
    flips_ms: list[float] = []
    ends_s: list[float] = []
    wrong: list[str] = []
    threads = form.room("sigterm") / "threads.txt"
    num_rounds = form.count(ROUNDS, 3)
    for number in range(num_rounds):
        delay_s = DELAYS_S[number % len(DELAYS_S)]
        room = form.room(f"sigterm-{number}")
        settings = dict(workers=2 if number % 2 else 1, drain_delay_s=delay_s, shutdown_grace_s=GRACE_S)
        with Subject(room, plants={"cost_s": COST_S, "threads": str(threads)}, **settings) as subject:
            records, flip_s, end_s, code = _round(subject, form.seed + number)
            lost += [f"round {number}: {told}" for told in map(_lost, records) if told]
            flips_ms.append(flip_s * 1000)
            ends_s.append(end_s - delay_s)
            wrong += [f"round {number}: exit code {code}"] if code else []
            wrong += [f"round {number}: {fault}" for fault in subject.faults()]
    yield none_of(2, f"{num_rounds} SIGTERMs at {LOAD:.0%} load: accepted requests lost", lost)
    yield at_most(2, "readiness turns off within (slowest)", max(flips_ms), MAX_FLIP_MS, " ms")
    yield at_most(2, "exit within the grace + 2 s (slowest)", max(ends_s), GRACE_S + 2, " s")
    yield Row(2, "exit (median)", "", f"{quantile(sorted(ends_s), 0.5):.2f} s", is_met=True)
    yield at_least(2, INLINE, inline_share(threads), LEAST_INLINE, " %")
    yield none_of(2, "exit codes other than 0, faults in the log", wrong)


def _round(subject: Subject, seed: int) -> tuple[list[Record], float, float, int]:
    """Load, a signal in the middle of it, the end: what became of the requests, and the times from the signal on."""
    per_second = LOAD * len(subject.pids) / COST_S
    load = OpenLoop(Arrivals(subject.port, per_second, LOADED_S + 2.0, seed))
    time.sleep(LOADED_S)
    flipped: list[float] = []
    asking = threading.Event()
    asker = threading.Thread(target=_ask_until_not_ready, args=(subject.port, asking, flipped))
    asker.start()
    asking.wait(5)
    told = time.monotonic()
    subject.process.send_signal(signal.SIGTERM)
    code = subject.process.wait(60)
    end_s = time.monotonic() - told
    asker.join()
    return load.records(), flipped[0] - told, end_s, code


def _ask_until_not_ready(port: int, asking: threading.Event, flipped: list[float]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    while True:
        try:
            connection.request("GET", "/readyz")
            answer = connection.getresponse()
            answer.read()
            is_ready = answer.status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            is_ready = False
        if not is_ready:
            flipped.append(time.monotonic())
            connection.close()
            return
        asking.set()
        time.sleep(0.003)


def _lost(record: Record) -> str | None:
    if record.status in (200, 503):
        return None
    return None if record.how.startswith(NOT_ACCEPTED) else f"{record.status} {record.how}"
