"""Table: the workloads that have targets, every subject on every one of them, and the same in bfloat16.

Laws: subjects stay up and take turns, the bound among them: in a round each is timed once on each of its cells, in an order
drawn anew, so that what a ratio compares is seconds apart; on these machines a minute changes more than a tenth.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from benchmarks.bench import Bench
from benchmarks.results import Sample
from benchmarks.subjects import BOUND, SERVICE, Subject, service
from benchmarks.workloads import W1, W2, W2_LISTS, W3, Workload
from benchmarks.wrk import Load

CONCURRENCY = 32


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """A part of the results; `bound` names the bound's work, where there is one."""

    part: str
    work: Workload
    concurrency: int = CONCURRENCY
    bound: str | None = None


CELLS = {
    cell.part: cell
    for cell in (
        Cell("w1", W1, bound="w1"),
        Cell("w2", W2, bound="w2"),
        Cell("w3", W3, bound="w3"),
        Cell("w2json", W2_LISTS),
        Cell("w1c1", W1, 1, bound="w1/1"),
        Cell("w2c1", W2, 1, bound="w2/1"),
    )
}
BFLOAT16 = service(f"{SERVICE} bfloat16", dtype="bfloat16")


def measure(bench: Bench, parts: Sequence[str]) -> Iterator[tuple[str, Sample]]:
    """One round of these cells."""
    for cell in (CELLS[part] for part in parts):
        subjects = [subject for subject in bench.subjects() if cell.work.form in subject.forms]
        yield from _in_turn(bench, cell, subjects)


def measure_bfloat16(bench: Bench, _: Sequence[str]) -> Iterator[tuple[str, Sample]]:
    """Our own float32 beside it."""
    yield from _in_turn(bench, Cell("bfloat16", W1), [service(), BFLOAT16])


def _in_turn(bench: Bench, cell: Cell, subjects: Sequence[Subject]) -> Iterator[tuple[str, Sample]]:
    seconds = bench.options.seconds
    load = Load(cell.concurrency, seconds)
    timings: list[Callable[[], Sample]] = [
        partial(bench.sample_in_turn, subject, cell.work, load) for subject in subjects
    ]
    if cell.bound and BOUND in bench.options.subjects:
        timings.append(partial(bench.bound_sample, cell.bound, seconds))
    random.shuffle(timings)
    for timing in timings:
        yield cell.part, timing()
