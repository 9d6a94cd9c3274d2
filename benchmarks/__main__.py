"""python -m benchmarks [--only PART,…] [--peers NAME,…] [--rounds N] [--seconds S] [--quick] [--out FILE]: measure.

Invariants: parts are measured one after another, and subjects of a part alternate within each round; every round is saved before
the next begins. Rounds of the same code on the same machine are added to those in the file. A quick run only shows that the
benchmark works: it has a file of its own and makes no claim.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import comparison
from benchmarks.bench import FAILURES, WARM_S, Bench
from benchmarks.machine import commit, first_line, hardware
from benchmarks.results import LATEST, Part, Sample, load, pooled, save
from benchmarks.subjects import PEERS, SERVICE, Subject
from benchmarks.sweeps import SWEEPS
from benchmarks.tables import performance

# Above this load average other programs were running when the measurement began.
QUIET_LOAD = 0.5
_PACKAGES = ("torch", "numpy", "uvicorn", "starlette", "fastapi", "safetensors")
QUICK = {"only": "w1,w2,w3,w2json,w2c1", "rounds": 1, "seconds": 1, "out": LATEST.with_name("quick.json")}


class Group(NamedTuple):
    """Parts that share the starts of servers; `measure` yields the samples of one round of a part."""

    parts: tuple[str, ...]
    measure: Callable[[Bench, str], Iterator[Sample]]
    rounds: int = 3
    seconds: float = 4


# The table has many and short rounds, so that what is compared is seconds apart.
GROUPS = (
    Group(("w1", "w2", "w3", "w2json", "w1c1", "w2c1"), comparison.measure, rounds=20, seconds=2),
    Group(("bfloat16", "w2bfloat16", "attention"), comparison.measure, rounds=20, seconds=2),
    Group(("memory",), comparison.measure_memory),
    *(Group((name,), measure) for name, measure in SWEEPS.items()),
)
PARTS = [name for group in GROUPS for name in group.parts]
ALIASES = {"all": PARTS, "table": [name for name in PARTS if name not in SWEEPS], "sweeps": list(SWEEPS)}


def main() -> int:
    given = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are ended
    began, about = time.monotonic(), environment()
    if about["load_before"] > QUIET_LOAD:
        print(f"load {about['load_before']}: other programs run here, figures will be low", file=sys.stderr)
    for group in GROUPS:
        if chosen := [name for name in group.parts if name in given.only]:
            rounds, seconds = given.rounds or group.rounds, given.seconds or group.seconds
            with (
                tempfile.TemporaryDirectory(prefix="bench-") as directory,
                Bench(Path(directory), seconds, given.peers) as bench,
            ):
                run(bench, group, {name: _part(name, bench, about) for name in chosen}, rounds, given.out)
    parts = load(given.out)
    print(performance(parts))
    print(f"{given.out}, {time.monotonic() - began:.0f} s", file=sys.stderr)
    return 1 if any("failed" in x for name in given.only for x in parts[name].samples) else 0


def run(bench: Bench, group: Group, parts: dict[str, Part], rounds: int, path: Path) -> None:
    """Measure and save the parts; an unexpected failure ends the round of its part and not the run."""
    others = load(path)
    for number in range(rounds):
        bench.begin_round(number)
        for name, part in parts.items():
            if sys.stderr.isatty():  # without a thread, which would disturb what is timed; the next line goes over it
                print(f"\x1b[K{name}: round {number + 1} of {rounds} …", end="\r", file=sys.stderr, flush=True)
            try:
                for sample in group.measure(bench, name):
                    part.samples.append(sample)
                    shown = (f"{key}={x:.4g}" if isinstance(x, float) else f"{key}={x}" for key, x in sample.items())
                    print(f"{name}:", *shown, file=sys.stderr, flush=True)
            except FAILURES as failure:
                failed = {"round": number, "subject": SERVICE, "workload": "", "failed": f"{failure!r}"[:300]}
                part.samples.append(failed)
                print(failed, file=sys.stderr)
        save(path, others | {name: pooled(others.get(name), part) for name, part in parts.items()})


def _part(name: str, bench: Bench, about: dict[str, Any]) -> Part:
    subjects = {x.name: {"settings": x.settings, "version": _package_version(x)} for x in bench.subjects()}
    now = dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return Part(name, now, commit(), about, {"seconds": bench.seconds, "warm_s": WARM_S}, subjects)


def environment() -> dict[str, Any]:
    """Return the hardware, the system, versions, and the load average before the measurement."""
    return hardware() | {
        "system": f"{platform.system()} {platform.release()}",
        "versions": {name: version(name) for name in _PACKAGES},
        "wrk": first_line("wrk", "-v"),
        "load_before": round(os.getloadavg()[0], 2),
    }


def _package_version(subject: Subject) -> str | None:
    """Return the version of a peer's package in its own environment."""
    program = f"import importlib.metadata as m; print(m.version({subject.package!r}))"
    return first_line(subject.command[0], "-c", program) if subject.package else None


def _arguments() -> argparse.Namespace:
    """Return the arguments, with `only` and `peers` as lists of names; the program ends if something is missing."""
    about = "Measure; the results are a JSON file."
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=about, allow_abbrev=False)
    parser.add_argument("--only", default="all", help=f"parts, of {', '.join([*PARTS, *ALIASES])} [all]")
    parser.add_argument("--peers", default="", help=f"of {', '.join(PEERS)}")
    parser.add_argument("--rounds", type=int, help="[20, of memory and sweeps 3]")
    parser.add_argument("--seconds", type=int, help="of each timed run [2, of memory and sweeps 4]")
    parser.add_argument("--out", type=Path, default=LATEST, help=f"results file [{LATEST.name}]")
    parser.add_argument("--quick", action="store_true", help=f"defaults: one round of one second, of {QUICK['only']}")
    if "--quick" in sys.argv:
        parser.set_defaults(**QUICK)
    given = parser.parse_args()
    given.only = [part for name in given.only.split(",") for part in ALIASES.get(name, [name])]
    given.peers = tuple(name for name in given.peers.split(",") if name)
    if unknown := {*given.only, *given.peers} - {*PARTS, *PEERS}:
        parser.error(f"unknown: {', '.join(unknown)}")
    if absent := [name for name in given.peers if not shutil.which(PEERS[name].command[0])]:
        parser.error(f"not installed: {', '.join(absent)}; `make install-peers` installs them")
    if shutil.which("wrk") is None:
        parser.error("wrk, the load generator, is missing: `apt-get install wrk`")
    return given


if __name__ == "__main__":
    sys.exit(main())
