"""python -m benchmarks.ray_serve [--rounds N] [--seconds S]: replicas of Ray Serve beside `serve` with as many processes.

Invariants: in each round every set-up is started anew, in a random order, and is alone on the machine. A set-up's processor time
includes Ray's own processes. The table goes to docs/ray.md.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial

from benchmarks.bench import Bench
from benchmarks.comparison import CONCURRENCY
from benchmarks.machine import ROOT
from benchmarks.page import FAILED, HEADS, Page, Row
from benchmarks.results import Sample
from benchmarks.subjects import LAYER, Subject, service
from benchmarks.wires import service_wires
from benchmarks.workloads import W1, W2
from service.settings import usable_cores

PROGRAM = """
from ray import serve
from deploy.ray.app import Options, attention
serve.start(http_options=dict(host="127.0.0.1", port={port}))
serve.run(attention(Options(min_replicas=NUM, max_replicas=NUM)), blocking=True)
"""
SERVE, PROXY = "`serve`", "Ray, Python proxy"
FAST = {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}
HAPROXY = {"RAY_SERVE_ENABLE_HA_PROXY": "1"}
RAYS: Mapping[str, Mapping[str, str]] = {
    PROXY: {},
    "Ray, HAProxy": HAPROXY,
    "Ray, HAProxy, throughput-optimized": HAPROXY | FAST,
}


def subjects(directory: str) -> list[Subject]:
    """Return `serve` and the set-ups of Ray; the directory, whose name is short, is for Ray's sockets."""
    python, num = str(ROOT / ".venv-ray" / "bin" / "python"), usable_cores()
    common = {"ATTENTION_LAYERS_DIR": "{layers}", "RAY_TMPDIR": directory, "RAY_USAGE_STATS_ENABLED": "0"}
    command, wires = (python, "-c", PROGRAM.replace("NUM", str(num))), service_wires(LAYER)
    rays = [Subject(name, command, "/readyz", wires, {**common, **own}) for name, own in RAYS.items()]
    return [service(SERVE, workers=num), *rays]


def measure(bench: Bench, _: str) -> Iterator[Sample]:
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        found = subjects(directory)
        for subject in random.sample(found, len(found)):
            with bench.start(subject) as server:
                for work in (W2, W1):
                    yield bench.sample(subject.name, work.name, partial(bench.figures, server, work, CONCURRENCY))


def share(found: Mapping[tuple[str, str], Row], setup: str, work: str) -> str:
    row, whole = found.get((setup, work), {}), found.get((SERVE, work), {}).get("rps", [float("nan")])[0]
    return f"{row['rps'][0] / whole:.2f}" if "rps" in row else FAILED


RAY = Page("ray", [SERVE, *RAYS], HEADS | {"server_cores": "cores in use"}, ("of `serve`", share))


if __name__ == "__main__":
    RAY.main("benchmarks.ray_serve", measure, {name: {"settings": dict(x)} for name, x in RAYS.items()}, 4)
