"""wrk: the closed-loop load generator, one thread of C, because one in Python would eat the cores that are measured.

Laws: it sends prepared bodies in turn; requests a second are those answered with 2xx; quantiles are over all answers.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.bodies import Bodies

SCRIPT = Path(__file__).with_name("wrk.lua")
MISSING = "wrk, the load generator, is missing: `apt-get install wrk` (or your system's package of that name)"


class WrkFailed(Exception):
    """It said something else than figures."""


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """So many connections that each send their next request when the last is answered, for so long."""

    concurrency: int
    seconds: float


def require_wrk() -> None:
    """Ends the program where wrk is not installed."""
    if shutil.which("wrk") is None:
        raise SystemExit(MISSING)


def run_wrk(port: int, bodies: Bodies, load: Load) -> dict[str, float]:
    """rps, p50_ms, p90_ms, p99_ms, max_ms, mean_ms, refused (a share of all answers), broken (connections)."""
    seconds = max(1, math.ceil(load.seconds))  # wrk takes whole seconds
    command = ["wrk", "-t1", f"-c{load.concurrency}", f"-d{seconds}s", "--timeout", "30s", "-s", str(SCRIPT)]
    target = f"http://127.0.0.1:{port}{bodies.path}"
    told = subprocess.run(
        [*command, target, "--", str(bodies.directory), str(bodies.num)],
        capture_output=True,
        text=True,
        timeout=seconds + 60,
        check=False,
    )
    for line in told.stdout.splitlines():
        if line.startswith("JSON{"):
            return _figures(json.loads(line.removeprefix("JSON")))
    raise WrkFailed((told.stderr or told.stdout)[-300:])


def _figures(told: dict[str, Any]) -> dict[str, float]:
    seconds = told["duration_us"] / 1e6
    if told["requests"] == 0:
        raise WrkFailed(f"no answer in {seconds:.1f} s")
    good = told["requests"] - told["refused"]
    times = {f"{name}_ms": told[f"{name}_us"] / 1e3 for name in ("p50", "p90", "p99", "max", "mean")}
    refused = told["refused"] / max(1, told["requests"])
    return {"rps": good / seconds, **times, "refused": refused, "broken": told["broken"]}
