"""At rest: what must hold after every figure, whatever it did (rules 4 and 5).

Invariants: every request that came was answered or cancelled, exactly once; gauges, tasks, threads, descriptors and processes
are back within two seconds.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

from tests.torture.report import Row, at_most, none_of
from tests.torture.subject import REST_S, Subject, Vitals

MIB = 2**20
GAUGES = ("in_flight_requests", "queued_requests", "queued_bytes")


def total(samples: dict[str, float], name: str) -> float:
    """The sum of a series over its labels."""
    return sum(value for key, value in samples.items() if key.split("{")[0] == f"attention_{name}")


def unbalanced(samples: dict[str, float]) -> list[str]:
    """What rule 4 says must be equal and is not."""
    received, answered, cancelled = (total(samples, f"{n}_total") for n in ("received", "requests", "cancelled"))
    refused = sum(
        value
        for key, value in samples.items()
        if key.startswith("attention_requests_total{") and re.search('status="[45]', key)
    )
    rejected = total(samples, "rejected_total")
    found = [f"{name} is {value:g}" for name in GAUGES if (value := total(samples, name))]
    if received != answered + cancelled:
        found.append(f"{received:g} received, {answered:g} answered, {cancelled:g} cancelled")
    if rejected != refused:
        found.append(f"{refused:g} answers of 4xx and 5xx, {rejected:g} rejections counted")
    return found


def not_back(subject: Subject, before: Vitals) -> list[str]:
    """What rule 5 says must be back and is not after two seconds."""
    end = time.monotonic() + REST_S
    while True:
        now = subject.vitals()
        found = [] if now.pids == before.pids else ["a process died"]
        if now.descriptors.total() > before.descriptors.total():
            found.append(f"descriptors more than before: {dict(now.descriptors - before.descriptors)}")
        if now.num_threads > before.num_threads:
            found.append(f"threads: {before.num_threads} before, {now.num_threads} after")
        found += unbalanced(subject.samples())
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.1)


def _resident_at_rest(subject: Subject) -> int:
    """The least of the two seconds in which everything is to be back."""
    end, least = time.monotonic() + REST_S, subject.vitals().resident_bytes
    while time.monotonic() < end:
        time.sleep(0.1)
        least = min(least, subject.vitals().resident_bytes)
    return least


def rows(figure: int, subject: Subject, before: Vitals, max_growth_mib: float | None = None) -> Iterator[Row]:
    """The rows that every figure ends with."""
    yield none_of(
        figure,
        "at rest: counts that do not add up; gauges, tasks, threads, descriptors, processes that are not back",
        not_back(subject, before),
    )
    yield none_of(figure, "faults in the log", subject.faults())
    if max_growth_mib is not None:
        growth = (_resident_at_rest(subject) - before.resident_bytes) / MIB
        yield at_most(figure, "memory growth", growth, max_growth_mib, " MiB")
