"""python -m benchmarks.scale [--rounds N] [--seconds S] [--out FILE]: replicas behind HAProxy; writes docs/scale.md.

Invariants: each set-up is started anew in each round and is alone on the machine, because processes share pages. Processor time
is that of the service and of the balancer, not of the load generator. Replicas share the cores of one machine: what they cost is
a figure for any number of machines, how many requests a second they answer is not.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import process_tree
from benchmarks.bench import Bench
from benchmarks.comparison import CONCURRENCY
from benchmarks.machine import ROOT
from benchmarks.page import FAILED, HEADS, Page, Row
from benchmarks.results import Sample
from benchmarks.server import Server
from benchmarks.subjects import LAYER, Subject, service
from benchmarks.tables import number
from benchmarks.wires import service_wires
from benchmarks.workloads import W1, W2, Workload

_HEADS = {
    **HEADS,
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


def memory(found: Mapping[tuple[str, str], Row], setup: str, _: str) -> str:
    row = found.get((setup, "memory"), {})
    return number(row["pss_mib"][0]) if "pss_mib" in row else FAILED


SCALE = Page("scale", [*SETUPS], _HEADS, ("memory a replica, MiB (PSS)", memory))


if __name__ == "__main__":
    SCALE.main("benchmarks.scale", measure, {name: setup._asdict() for name, setup in SETUPS.items()}, 2)
