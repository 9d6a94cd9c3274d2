"""Table: the workloads that have targets, every subject on every one of them, and the same in bfloat16.

Laws: in a round each subject is started once and measured on all its cells; the bound runs in the same round, so that
ratios are of the same minutes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from benchmarks.bench import FAILURES, Bench
from benchmarks.results import Sample
from benchmarks.subjects import SERVICE, Subject, service
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
    cells = [CELLS[part] for part in parts]
    bounds = {cell.part: cell.bound for cell in cells if cell.bound}
    yield from bench.bound_samples(bounds, bench.options.seconds / 2)
    for subject in bench.subjects():
        for group in _starts(subject, [cell for cell in cells if cell.work.form in subject.forms]):
            yield from _served(bench, subject, group)


def measure_bfloat16(bench: Bench, _: Sequence[str]) -> Iterator[tuple[str, Sample]]:
    """Our own float32 beside it."""
    for subject in (service(), BFLOAT16):
        yield from _served(bench, subject, [Cell("bfloat16", W1)])


def _starts(subject: Subject, cells: list[Cell]) -> list[list[Cell]]:
    """The cells of each start: those whose form needs one of its own are apart."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.work.form if cell.work.form in subject.by_form else "", []).append(cell)
    return list(groups.values())


def _served(bench: Bench, subject: Subject, cells: list[Cell]) -> Iterator[tuple[str, Sample]]:
    if not cells:
        return
    try:
        with bench.started(subject, cells[0].work.form) as running:
            for cell in cells:
                load = Load(cell.concurrency, bench.options.seconds)
                yield cell.part, bench.sample(running, cell.work, load)
    except FAILURES as failure:
        for cell in cells:
            yield cell.part, bench.failed(failure, subject.name, cell.work.name)
