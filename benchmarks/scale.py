"""python -m benchmarks.scale [--rounds N] [--seconds S] [--out FILE]: replicas behind HAProxy; writes docs/scale.md.

Invariants: each set-up is started anew in each round and is alone on the machine, because processes share pages. Processor time
is that of the service and of the balancer, not of the load generator. Replicas share the cores of one machine: what they cost is
a figure for any number of machines, how many requests a second they answer is not.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import random
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import process_tree
from benchmarks.__main__ import Group, environment, run
from benchmarks.bench import WARM_S, Bench
from benchmarks.comparison import CONCURRENCY
from benchmarks.machine import ROOT, commit
from benchmarks.report import with_section
from benchmarks.results import LATEST, Part, Sample, load
from benchmarks.server import Server
from benchmarks.subjects import LAYER, Subject, service
from benchmarks.summary import rows
from benchmarks.tables import number, table
from benchmarks.wires import service_wires
from benchmarks.workloads import W1, W2, Workload

RESULTS = LATEST.with_name("scale.json")
PAGE = ROOT / "docs" / "scale.md"
NOTHING = "Not measured yet: `make bench-scale` writes this section."
_TITLES = {"w2": "16 tokens", "w1": "8 to 256 tokens"}
_HEADS = {
    "rps": "requests/s",
    "p50_ms": "p50 ms",
    "p99_ms": "p99 ms",
    "refused": "refused",
    "server_cores": "cores in use",
    "rps_a_core": "requests/s a core",
    "hours_a_million": "processor hours a million requests",
}


class Setup(NamedTuple):
    replicas: int
    workers: int
    is_balanced: bool = True


SETUPS = {
    "one replica of 1 worker, no balancer": Setup(1, 1, is_balanced=False),
    "one replica of 2 workers, no balancer": Setup(1, 2, is_balanced=False),
    "HAProxy, 1 replica": Setup(1, 1),
    "HAProxy, 2 replicas": Setup(2, 1),
    "HAProxy, 3 replicas": Setup(3, 1),
}


class Balancer(Server):
    """HAProxy with the repository's configuration; the processes of the replicas behind it count as its own."""

    replicas: tuple[Server, ...] = ()

    @property
    def pids(self) -> list[int]:
        return [*super().pids, *(pid for replica in self.replicas for pid in replica.pids)]

    def close(self) -> None:
        self.replicas = ()  # they end by themselves
        super().close()


def balancer(directory: Path, replicas: list[Server]) -> Balancer:
    own = {
        "BALANCER_BIND": "127.0.0.1:{port}",
        "BALANCER_METRICS_BIND": "unix@{run}/metrics",
        "BALANCER_SOCKET": "{run}/socket",
    }
    addresses = {f"REPLICA_{n}": f"127.0.0.1:{replica.port}" for n, replica in enumerate(replicas, 1)}
    program = shutil.which("haproxy") or "/usr/sbin/haproxy"  # where Debian has it
    command = (program, "-db", "-f", str(ROOT / "deploy" / "haproxy" / "haproxy.cfg"))
    found = Subject("haproxy", command, "/readyz", service_wires(LAYER), own | addresses)
    started = Balancer(found, "binary", {"run": str(directory)}, directory / "haproxy.log")
    started.replicas = tuple(replicas)
    return started


def measure(bench: Bench, _: str) -> Iterator[Sample]:
    """Measure one round: both workloads on each set-up, and then its memory."""
    for name, setup in random.sample(list(SETUPS.items()), len(SETUPS)):
        with contextlib.ExitStack() as stack:
            one = service(workers=setup.workers)
            replicas = [stack.enter_context(bench.start(one)) for _ in range(setup.replicas)]
            front = replicas[0]
            if setup.is_balanced:
                directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="haproxy-")))
                front = stack.enter_context(balancer(directory, replicas))
            for work in (W2, W1):
                yield bench.sample(name, work.name, partial(costs, bench, front, work))
            pss_mib = process_tree.memory_mib([pid for replica in replicas for pid in replica.pids], "Pss")
            yield bench.sample(name, "memory", lambda: {"pss_mib": pss_mib / len(replicas)})  # noqa: B023 (called at once)


def costs(bench: Bench, front: Server, work: Workload) -> dict[str, Any]:
    found = bench.figures(front, work, CONCURRENCY)
    cores_a_request = found["server_cores"] / found["rps"]
    return {**found, "rps_a_core": 1 / cores_a_request, "hours_a_million": cores_a_request * 1e6 / 3600}


def section(parts: Mapping[str, Part]) -> str:
    """Return the section of docs/scale.md as Markdown."""
    if not parts:
        return NOTHING
    part = parts["scale"]
    found = {(row["subject"], row["workload"]): row for row in rows(part.samples)}
    blocks = [f"{part.origin}, {CONCURRENCY} callers, {part.rounds} rounds of {part.settings['seconds']} s, medians."]
    for work, title in _TITLES.items():
        lines = []
        for name in SETUPS:
            row, memory = found.get((name, work), {}), found.get((name, "memory"), {})
            cells = [number(row[figure][0]) if figure in row else "failed" for figure in _HEADS]
            lines.append([name, *cells, number(memory["pss_mib"][0]) if "pss_mib" in memory else "failed"])
        blocks.append(table([f"{title} a request", *_HEADS.values(), "memory a replica, MiB (PSS)"], lines))
    return "\n\n".join(blocks)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=2, help="of each timed run")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    now, settings = f"{dt.datetime.now(dt.UTC):%Y-%m-%d %H:%M} UTC", {"seconds": given.seconds, "warm_s": WARM_S}
    part = Part(
        "scale", now, commit(), environment(), settings, {name: setup._asdict() for name, setup in SETUPS.items()}
    )
    with tempfile.TemporaryDirectory(prefix="bench-") as directory, Bench(Path(directory), given.seconds) as bench:
        run(bench, Group(("scale",), measure), {"scale": part}, given.rounds, given.out)
    text = section(load(given.out))
    print(text)
    if given.out == RESULTS:
        PAGE.write_text(with_section(PAGE.read_text(encoding="utf-8"), "scale", text), encoding="utf-8")


if __name__ == "__main__":
    main()
