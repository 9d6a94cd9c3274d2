"""Figure 3: open-loop arrivals at 0.5, 0.8, 1, 2 and 5 times what the service can do, and afterwards.

Invariants: each request costs the engine a fixed time, so that peak is known and the generator is not the limit; on two cores the
service has one and the generators the other; callers have a deadline, which the service may use to refuse early; work that
an engine begins after its deadline is expired; the burst that begins an overload is admitted on purpose, so the times of admitted
requests count from SETTLED_S on.
"""

from __future__ import annotations

import dataclasses
import http.client
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from service.settings import usable_cores
from tests.torture import at_rest
from tests.torture.canary import quantile
from tests.torture.figure import Form
from tests.torture.health import Health
from tests.torture.open_loop import Arrivals, OpenLoop, Record
from tests.torture.planted import INLINE, LEAST_INLINE, inline_share
from tests.torture.report import Row, at_least, at_most, none_of
from tests.torture.subject import Subject

COST_S = 0.005
STEPS = (0.5, 0.8, 1.0, 2.0, 5.0)
LONGEST_STEP_S = {5.0: 120.0}
STEP_S = 30.0
WARM_UP_S, SETTLED_S = 3.0, 2.0
# The service counts from when it has read the body, the generator from when it wrote it: between them lies the lag of the
# loop, which the health routes show.
LEAST_LAG_S = 0.025
TIMEOUT_MS = 250
REFUSED = (429, 503)
LATE = 504
HEALTH = ("/healthz", "/readyz", "/metrics")


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """What one offered load came to; times in milliseconds."""

    times: float
    offered: float
    goodput: float
    admitted_p99: float
    refused_p99: float
    refused: int
    too_late: int
    failed: list[str]

    def row(self) -> Row:
        told = (
            f"{self.offered:.0f}/s offered, {self.goodput:.0f}/s good, p99 of admitted {self.admitted_p99:.0f} ms, "
            f"{self.refused} refused with p99 {self.refused_p99:.1f} ms, {self.too_late} answered 504 at their deadline"
        )
        return Row(3, f"{self.times:g}x of capacity", "", told, is_met=not self.failed)


def measure(form: Form) -> Iterator[Row]:
    is_wide = usable_cores() > 1
    served, loading = ({0}, {1}) if is_wide else (None, None)
    room = form.room("overload")
    executed, threads = room / "executed.txt", room / "threads.txt"
    plants = {"cost_s": COST_S, "executed": str(executed), "threads": str(threads)}
    with Subject(room, plants=plants, cpus=served, workers=1) as subject:
        _run(subject, Arrivals(subject.port, 0.5 / COST_S, WARM_UP_S, form.seed), loading)
        before = subject.baseline()
        first_mark, steps, late = 100_000, {}, list[float]()
        for times in STEPS:
            seconds = form.seconds(LONGEST_STEP_S.get(times, STEP_S), 5)
            arrivals = Arrivals(subject.port, times / COST_S, seconds, form.seed, TIMEOUT_MS, first_mark)
            with Health(subject.port, HEALTH, 0.02) as health:
                records = _run(subject, arrivals, loading)
            steps[times] = _step(times, records, seconds)
            yield steps[times].row()
            late += _expired(executed, records, max(LEAST_LAG_S, 2 * health.quantile_ms(0.99) / 1000))
            first_mark += len(records) + 1
        patient = Arrivals(
            subject.port, 5.0 / COST_S, form.seconds(LONGEST_STEP_S[5.0], 5), form.seed, None, first_mark
        )
        unbounded = _step(5.0, _run(subject, patient, loading), patient.seconds, late_s=None)
        yield dataclasses.replace(unbounded.row(), what="5x of capacity, callers without a deadline, the default queue")
        recovery_s = _recovery_s(
            subject, steps[0.8], Arrivals(subject.port, 0.8 / COST_S, 8.0, form.seed, TIMEOUT_MS), loading
        )
        yield from _targets(steps, health, late, recovery_s)
        peak = max(step.goodput for step in steps.values())
        yield at_least(3, "the same without a deadline: goodput, of peak", unbounded.goodput / peak * 100, 90, " %")
        ratio = unbounded.admitted_p99 / steps[0.8].admitted_p99
        yield at_most(3, "the same without a deadline: p99 of admitted, as a multiple of that at 0.8x", ratio, 3)
        yield at_most(3, "the same without a deadline: refusals p99", unbounded.refused_p99, 50, " ms")
        yield at_least(3, INLINE, inline_share(threads), LEAST_INLINE, " %")
        yield from at_rest.rows(3, subject, before)


def _targets(steps: dict[float, Step], health: Health, late: list[float], recovery_s: float) -> Iterator[Row]:
    worst, light = steps[5.0], steps[0.8]
    peak = max(step.goodput for step in steps.values())
    yield at_least(3, "goodput at 5x, of peak", worst.goodput / peak * 100, 90, " %")
    yield at_most(3, "p99 of admitted at 5x, as a multiple of that at 0.8x", worst.admitted_p99 / light.admitted_p99, 3)
    yield at_most(3, "refusals p99 at 5x (Q1)", worst.refused_p99, 50, " ms")
    yield at_most(3, "requests begun after their deadline (Q4)", len(late), 0)
    yield at_most(3, "seconds until normal again", recovery_s, 5, " s")
    for path in HEALTH:
        yield at_most(3, f"{path} p99 during 5x (Q10)", health.quantile_ms(0.99, path), 250, " ms")
    yield none_of(3, "health and metrics not answered with 200 during 5x (Q10)", health.wrong)
    yield none_of(3, "neither answered nor refused", [why for step in steps.values() for why in step.failed])


def _run(subject: Subject, arrivals: Arrivals, cpus: set[int] | None) -> list[Record]:
    assert subject.process.poll() is None
    return OpenLoop(arrivals, cpus).records()


def _step(times: float, records: list[Record], seconds: float, late_s: float | None = TIMEOUT_MS / 1000 + 0.05) -> Step:
    begun = min(record.due for record in records if record.due)
    good = sorted(
        record.seconds for record in records if record.status == http.HTTPStatus.OK and record.due >= begun + SETTLED_S
    )
    # A 504 that comes at once is a refusal; one at the deadline is a promise that was not kept.
    early_s = TIMEOUT_MS / 1000 * 0.9
    too_late = [record for record in records if record.status == LATE and record.seconds >= early_s]
    refused = sorted(
        record.seconds
        for record in records
        if record.status in REFUSED or (record.status == LATE and record.seconds < early_s)
    )
    # What is answered after the arrivals have ended is the queue's and says nothing of the rate.
    end = begun + seconds
    in_time = [
        record
        for record in records
        if record.status == http.HTTPStatus.OK
        and record.due + record.seconds <= end
        and (late_s is None or record.seconds <= late_s)
    ]
    failed = [
        f"{times:g}x: {record.status} {record.how}" for record in records if record.status not in (200, *REFUSED, LATE)
    ]
    return Step(
        times=times,
        offered=len(records) / seconds,
        goodput=len(in_time) / seconds,
        admitted_p99=quantile(good, 0.99) * 1000,
        refused_p99=quantile(refused, 0.99) * 1000 if refused else 0.0,
        refused=len(refused),
        too_late=len(too_late),
        failed=failed,
    )


def _expired(executed: Path, records: list[Record], lag_s: float) -> list[float]:
    """How late the engine began requests whose deadline had passed; the deadline counts from the complete body at the latest."""
    sent = {record.mark: record.sent for record in records}
    begun = (line.split() for line in executed.read_text(encoding="ascii").splitlines())
    answered_late = {record.mark for record in records if record.status not in (200, 0)}
    return [
        float(at) - sent[int(mark)]
        for mark, at in ((float(mark), at) for mark, at in begun)
        if int(mark) in answered_late and float(at) - sent[int(mark)] > TIMEOUT_MS / 1000 + lag_s
    ]


def _recovery_s(subject: Subject, normal: Step, arrivals: Arrivals, cpus: set[int] | None) -> float:
    """Seconds from the end of the overload until a second has a normal median and no refusals."""
    started = time.monotonic()
    records = sorted(_run(subject, arrivals, cpus), key=lambda record: record.due)
    for second in range(int(arrivals.seconds)):
        found = [record for record in records if second <= record.due - started < second + 1]
        is_served = found and all(record.status == http.HTTPStatus.OK for record in found)
        if is_served and statistics.median(record.seconds for record in found) * 1000 <= normal.admitted_p99:
            return float(second)
    return float("inf")
