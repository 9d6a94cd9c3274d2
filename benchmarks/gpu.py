"""python -m benchmarks.gpu [--dry] [--commit HASH] [--out FILE]: run all parts of `make gpu`, write their JSON and the page.

Invariants: each part is a process of its own with a time limit; one that fails or is late is recorded and the others go on. The
file is written after each part, so a run that is cut off leaves what it has found. It takes less than eight minutes. A dry run
goes through the same parts on the CPU and writes another file and no page.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import gpu_page, process_tree
from benchmarks.machine import ROOT, commit, hardware

# Seconds of each part, in the order in which they run. What a part leaves over, the next ones may use.
LIMITS = {
    "machine": 25,
    "cudnn": 20,
    "meaning": 15,
    "bits": 40,
    "speed": 70,
    "launches": 25,
    "varlen": 25,
    "memory": 25,
    "lost": 15,
    "tests": 50,
    "serve-1": 30,
    "serve-2": 30,
    "serve-4": 35,
    "serve-8": 40,
}
# A machine without a GPU has few cores.
NOT_DRY = frozenset({"serve-4", "serve-8"})
# From SIGTERM to SIGKILL: as long as the service may take to end its workers.
END_S = 5.0


def main() -> int:
    given = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the part is ended
    results: dict[str, Any] = {
        "version": 1,
        "dry": given.dry,
        "commit": given.commit or commit(),
        "measured_at": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        **hardware(),
        "parts": {},
    }
    scale, until = "dry" if given.dry else "real", time.monotonic()
    for name, limit_s in LIMITS.items():
        until += limit_s
        if given.dry and name in NOT_DRY:
            continue
        command = [sys.executable, "-m", "benchmarks.gpu_part", name, scale]
        results["parts"][name] = part = run_part(command, until - time.monotonic())
        save(given.out, results)
        print(f"{name}: {part['seconds']:.0f} s, {len(part['rows'])} rows, {part['failed'] or 'ok'}", flush=True)
    if not given.dry:
        gpu_page.write(results)
    failed = [name for name, part in results["parts"].items() if part["failed"]]
    print(f"{given.out}:", f"failed: {', '.join(failed)}" if failed else "all parts ran")
    return 1 if failed else 0


def run_part(command: list[str], limit_s: float) -> dict[str, Any]:
    """Run a part; return its rows, how long it took, and why it failed (None if it did not)."""
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=errors, start_new_session=True)
        try:
            process.wait(limit_s)
            is_late = False
        except subprocess.TimeoutExpired:
            is_late = True
        finally:
            _end(process)
        out.seek(0)
        errors.seek(0)
        rows = [json.loads(line) for line in out.read().splitlines() if line.startswith("{") and line.endswith("}")]
        last = (errors.read().strip().splitlines() or ["no message"])[-1][:300]
    failed = next((row["failed"] for row in rows if "failed" in row), None)
    if is_late:
        failed = f"it was ended after {limit_s:.0f} s"
    elif process.returncode and failed is None:
        failed = f"exit code {process.returncode}: {last}"
    return {"seconds": round(time.monotonic() - began, 1), "failed": failed, "rows": rows}


def _end(process: subprocess.Popen[Any]) -> None:
    """End the part and what it started, which may have sessions of its own."""
    pids = process_tree.tree(process.pid)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    for pid in pids if process.poll() is None or len(pids) > 1 else ():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def save(path: Path, results: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", allow_abbrev=False)
    parser.add_argument("--dry", action="store_true", help="small counts, on the CPU")
    parser.add_argument("--commit", help="for a copy without git")
    parser.add_argument("--out", type=Path, help="results file")
    given = parser.parse_args()
    given.out = given.out or (gpu_page.RESULTS.with_name("gpu-dry.json") if given.dry else gpu_page.RESULTS)
    return given


if __name__ == "__main__":
    sys.exit(main())
