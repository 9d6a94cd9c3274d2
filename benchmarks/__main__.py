"""python -m benchmarks [--only PART,…] [--peers NAME,…] [--rounds N] [--seconds S] [--quick] [--resume]: measure.

Laws: one machine, one run; parts are measured one after another, subjects of a part take turns round by round; each whole
round is written before the next begins. A quick run shows that the instrument works: it is written beside, never as a claim.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks import machine, memory, table
from benchmarks.bench import FAILURES, Bench, Options
from benchmarks.report import printed
from benchmarks.results import LATEST, Part, Results, Sample
from benchmarks.subjects import ECHO, SERVICE, echo, peers, service
from benchmarks.sweeps import SWEEPS
from benchmarks.wrk import require_wrk

QUICK = LATEST.with_name("quick.json")
QUICK_OPTIONS = Options(rounds=1, seconds=1, sweep_rounds=1, sweep_seconds=1, warm_s=1)
QUICK_PARTS = "w1,w2,w3,w2json,w2c1"
Measure = Callable[[Bench, Sequence[str]], Iterator[tuple[str, Sample]]]
# Parts that share a start of each subject are measured together.
GROUPS: tuple[tuple[tuple[str, ...], Measure], ...] = (
    (tuple(table.CELLS), table.measure),
    (("bfloat16",), table.measure_bfloat16),
    (("memory",), memory.measure),
    *(((name,), measure) for name, measure in SWEEPS.items()),
)
IN_TURNS = (*table.CELLS, "bfloat16")  # the others have few and long rounds
PARTS = [name for names, _ in GROUPS for name in names]
ALIASES = {"table": [*IN_TURNS, "memory"], "sweeps": list(SWEEPS), "all": PARTS}


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    require_wrk()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are ended
    options = _options(given)
    results = Results(given.out or (QUICK if given.quick else LATEST))
    began = time.monotonic()
    wanted = _chosen(given.only or (QUICK_PARTS if given.quick else "all"))
    for names, measure in GROUPS:
        chosen = [name for name in names if name in wanted]
        if chosen:
            with (
                tempfile.TemporaryDirectory(prefix="bench-") as directory,
                Bench(Path(directory), options) as bench,
            ):
                _measure(bench, results, chosen, measure, resume=given.resume)
    print(printed(results.parts))
    print(f"{results.path}, {time.monotonic() - began:.0f} s", file=sys.stderr)
    return 1 if any("failed" in x for part in results.parts.values() for x in part.samples) else 0


def _measure(bench: Bench, results: Results, names: list[str], measure: Measure, *, resume: bool) -> None:
    """All rounds of parts that are measured together."""
    options = bench.options
    rounds = options.rounds if names[0] in IN_TURNS else options.sweep_rounds
    about, commit = machine.described(), machine.commit()
    if about["load_before"] > machine.QUIET_LOAD:
        print(f"load {about['load_before']}: this machine is not quiet, figures will be low", file=sys.stderr)
    first = min(results.begin(_part(name, bench, about, commit), resume=resume) for name in names)
    for number in range(first, rounds):
        bench.begin_round(number)
        try:
            for name, sample in measure(bench, names):
                _keep(results, name, sample)
        except FAILURES as failure:  # what a measurement did not expect ends its round and not the run
            _keep(results, names[0], bench.failed(failure, SERVICE, ""))
        results.end_round()
    results.end()


def _keep(results: Results, name: str, sample: Sample) -> None:
    results.add(name, sample)
    print(_line(name, sample), file=sys.stderr, flush=True)


def _part(name: str, bench: Bench, about: dict[str, object], commit: str) -> Part:
    options = bench.options
    seconds = options.seconds if name in IN_TURNS else options.sweep_seconds
    settings = {"seconds": seconds, "warm_s": options.warm_s}
    ours = {name: subject for name, subject in ((SERVICE, service()), (ECHO, echo())) if name in options.subjects}
    subjects = {**ours, **{peer: peers()[peer] for peer in options.peers}}
    told = {n: {"settings": s.settings, "version": machine.package_version(s)} for n, s in subjects.items()}
    now = dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return Part(name, now, commit, dict(about), settings, told)


def _line(name: str, sample: Sample) -> str:
    shown = {key: f"{x:.4g}" if isinstance(x, float) else x for key, x in sample.items()}
    return f"{name}: " + " ".join(f"{key}={value}" for key, value in shown.items())


def _chosen(only: str) -> list[str]:
    found: list[str] = []
    for name in only.split(","):
        if name not in PARTS and name not in ALIASES:
            raise SystemExit(f"there is no part {name!r}: {', '.join([*PARTS, *ALIASES])}")
        found += ALIASES.get(name, [name])
    return found


def _options(given: argparse.Namespace) -> Options:
    options = QUICK_OPTIONS if given.quick else Options()
    chosen = tuple(name for name in given.peers.split(",") if name)
    subjects = tuple(given.subjects.split(","))
    if unknown := set(subjects) - set(Options().subjects):
        raise SystemExit(f"there is no subject {', '.join(unknown)}: {', '.join(Options().subjects)}")
    if unknown := set(chosen) - set(peers()):
        raise SystemExit(f"there is no peer {', '.join(unknown)}: {', '.join(peers())}")
    absent = [name for name in chosen if not Path(peers()[name].python).exists()]
    if absent:
        raise SystemExit(f"not installed: {', '.join(absent)}; `make install-peers` makes their environments")
    rounds = {} if given.rounds is None else {"rounds": given.rounds, "sweep_rounds": given.rounds}
    seconds = {} if given.seconds is None else {"seconds": given.seconds, "sweep_seconds": given.seconds}
    return dataclasses.replace(options, subjects=subjects, peers=chosen, **rounds, **seconds)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure; the results are a JSON file.")
    parser.add_argument("--only", help=f"parts, of {', '.join(PARTS)}; or {', '.join(ALIASES)} [all]")
    parser.add_argument("--subjects", default=",".join(Options().subjects), help="of ours [%(default)s]")
    parser.add_argument("--peers", default="", help=f"beside bound, service and echo: {', '.join(peers())}")
    parser.add_argument("--rounds", type=int, help="interleaved repeats [20, of memory and sweeps 3]")
    parser.add_argument("--seconds", type=float, help="of each timed run, whole ones [2, of memory and sweeps 4]")
    parser.add_argument(
        "--quick", action="store_true", help=f"one round of a second each, of {QUICK_PARTS}, to quick.json"
    )
    parser.add_argument("--resume", action="store_true", help="go on with a run of the same commit and settings")
    parser.add_argument("--out", type=Path, help=f"results file [{LATEST.name}]")
    return parser


if __name__ == "__main__":
    sys.exit(main())
