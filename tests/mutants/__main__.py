"""Plants each fault of `faults.txt` in a copy of the repository and runs the tests that should notice (`make mutants`).

First the same tests run without a fault: they must pass. A fault whose tests all pass survives; `--search` then runs all unit
and integration tests. Exit status: 0 if every fault is killed, 1 if one survives, 2 if the list or a test is broken.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path

from tests.mutants.plant import FAULTS, ROOT, Fault, files_without_fault

PYTEST = (
    "-m",
    "pytest",
    "-x",
    "-q",
    "-p",
    "no:cacheprovider",
    "--timeout=60",
    "--timeout-method=thread",
    "--no-header",
)
EVERYWHERE = ("tests/unit", "tests/integration")
# pytest's exit status when all tests pass, and those when a test fails or a file cannot be imported.
PASSED, FAILED = 0, (1, 2)


def copied(into: Path) -> Path:
    """Copy what git knows or would add: neither environments nor caches."""
    listed = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, into / name)
    return into


def status_of(tests: Sequence[str], copy: Path) -> int:
    """Run these tests in the copy; return pytest's exit status, and print the end of its output if none ran."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, *PYTEST, *tests], cwd=copy, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode not in (PASSED, *FAILED):
        print(done.stdout[-2000:], done.stderr[-2000:], sep="\n")
    return done.returncode


def tried(fault: Fault, copy: Path, *, search: bool) -> tuple[str, float]:
    """Plant a fault in the copy, run its tests, and take it out again; return the verdict and the seconds."""
    path, started = fault.file(copy), time.monotonic()
    sound = path.read_text()
    path.write_text(fault.planted_in(sound))
    try:
        status = status_of([f"tests/{test}" for test in fault.tests], copy)
        verdict = "survived" if status == PASSED else "killed" if status in FAILED else "error"
        if search and verdict == "survived" and status_of(EVERYWHERE, copy) in FAILED:
            verdict = "killed elsewhere"
    finally:
        path.write_text(sound)
    return verdict, time.monotonic() - started


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", nargs="+", default=["*"], help="names or files, with * and ?: 'wire/*' ignore-*")
    parser.add_argument("--jobs", type=int, default=1, help="copies in which faults are tried at once")
    parser.add_argument("--search", action="store_true", help="try a survivor against all unit and integration tests")
    options = parser.parse_args()
    chosen = [f for f in FAULTS if any(fnmatch(f.name, one) or fnmatch(f.path, one) for one in options.only)]
    try:
        for fault in FAULTS:
            fault.planted_in(fault.file().read_text())
    except (ValueError, OSError) as error:
        print(error)
        return 2
    with tempfile.TemporaryDirectory(prefix="mutants-") as parent:
        copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(options.jobs):
            copies.put(copied(Path(parent) / str(number)))
        tests = sorted({f"tests/{test}" for fault in chosen for test in fault.tests})
        first = copies.get()
        if status_of(tests, first) != PASSED:
            print("the tests fail without a fault; run them:", *tests)
            return 2
        copies.put(first)

        def run(fault: Fault) -> str:
            copy = copies.get()
            try:
                verdict, seconds = tried(fault, copy, search=options.search)
            finally:
                copies.put(copy)
            print(f"{verdict:16} {seconds:5.1f} s  {fault.path:32} {fault.name}: {fault.breaks}", flush=True)
            return verdict

        with ThreadPoolExecutor(options.jobs) as pool:
            verdicts = list(pool.map(run, chosen))
    print(", ".join(f"{verdicts.count(one)} {one}" for one in sorted(set(verdicts))))
    if missing := files_without_fault():
        print("no fault is planted in", ", ".join(missing))
    return 2 if "error" in verdicts else 1 if "survived" in verdicts else 0


if __name__ == "__main__":
    raise SystemExit(main())
