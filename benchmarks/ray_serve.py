"""python -m benchmarks.ray_serve [--rounds N] [--seconds S]: replicas of Ray Serve beside `serve` with as many processes.

Invariants: in each round every set-up is started anew, in a random order, and is alone on the machine. A set-up's processor time
includes Ray's own processes. The table goes to docs/ray.md.
"""

from __future__ import annotations

import argparse
import datetime as dt
import random
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from benchmarks.__main__ import Group, environment, run
from benchmarks.bench import WARM_S, Bench
from benchmarks.comparison import CONCURRENCY
from benchmarks.machine import ROOT, commit
from benchmarks.report import with_section
from benchmarks.results import LATEST, Part, Sample, load
from benchmarks.subjects import LAYER, Subject, service
from benchmarks.summary import rows
from benchmarks.tables import number, table
from benchmarks.wires import service_wires
from benchmarks.workloads import W1, W2
from service.settings import usable_cores

RESULTS = LATEST.with_name("ray.json")
PAGE = ROOT / "docs" / "ray.md"
NOTHING = "Not measured yet: `make bench-ray` writes this section."
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
_TITLES = {"w2": "16 tokens", "w1": "8 to 256 tokens"}
_HEADS = {"rps": "requests/s", "p50_ms": "p50 ms", "p99_ms": "p99 ms", "server_cores": "cores in use"}


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


def section(parts: Mapping[str, Part]) -> str:
    """Return the section of docs/ray.md as Markdown."""
    if not parts:
        return NOTHING
    part = parts["ray"]
    found = {(row["subject"], row["workload"]): row for row in rows(part.samples)}
    blocks = [f"{part.origin}, {CONCURRENCY} callers, {part.rounds} rounds of {part.settings['seconds']} s, medians."]
    for work, title in _TITLES.items():
        whole = found.get((SERVE, work), {}).get("rps", [float("nan")])[0]
        lines = []
        for name in (SERVE, *RAYS):
            row = found.get((name, work), {})
            cells = [number(row[figure][0]) if figure in row else "failed" for figure in _HEADS]
            lines.append([name, *cells, f"{row['rps'][0] / whole:.2f}" if "rps" in row else "failed"])
        blocks.append(table([f"{title} a request", *_HEADS.values(), "of `serve`"], lines))
    return "\n\n".join(blocks)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ray_serve", allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=4, help="of each timed run")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    now, settings = f"{dt.datetime.now(dt.UTC):%Y-%m-%d %H:%M} UTC", {"seconds": given.seconds, "warm_s": WARM_S}
    part = Part(
        "ray", now, commit(), environment(), settings, {name: {"settings": dict(x)} for name, x in RAYS.items()}
    )
    with tempfile.TemporaryDirectory(prefix="bench-") as directory, Bench(Path(directory), given.seconds) as bench:
        run(bench, Group(("ray",), measure), {"ray": part}, given.rounds, given.out)
    text = section(load(given.out))
    print(text)
    if given.out == RESULTS:
        PAGE.write_text(with_section(PAGE.read_text(encoding="utf-8"), "ray", text), encoding="utf-8")


if __name__ == "__main__":
    main()
