"""GPU serve: the whole service with several workers on one device, under the loads W1 and W2; and the tests marked `gpu`.

Invariants: the same generators of rows as the checks; the service starts as users start it; answers are checked before anything
is timed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

from benchmarks import process_tree
from benchmarks.bench import Bench
from benchmarks.gpu_checks import Row, Scale, of_smi
from benchmarks.gpu_load import closed_loop
from benchmarks.subjects import ROOT, service
from benchmarks.workloads import W1, W2

# Callers of each worker: a batch on a GPU is as large as its queue is long.
CALLERS = 64
WARM_S = 1.0
_BYTES = re.compile(r"^attention_device_memory_bytes\{[^}]*\} (\S+)", re.MULTILINE)


def serve(scale: Scale, workers: int) -> Iterator[Row]:
    """Yield for each load: requests/s, times, host memory (PSS) of all processes, and what torch holds on the device."""
    seconds, callers, generators = (3.0, CALLERS * workers, 6) if scale.is_gpu else (0.5, 8, 2)
    subject = service(workers=workers, device=scale.device.type, log_level="warning")
    with tempfile.TemporaryDirectory(prefix="gpu-") as directory, Bench(Path(directory), seconds) as bench:
        server = bench.start(subject)
        with server:
            for work in (W2, W1):
                error = server.largest_error(work, 8)
                requests = bench.requests(subject, work)
                for duration in (min(WARM_S, seconds), seconds):
                    found = closed_loop(server.port, requests, callers, duration, generators)
                memory_mib = process_tree.memory_mib(server.pids, "Pss")
                held = sum(map(float, _BYTES.findall(server.ask("/metrics").text))) / 2**20
                row = {"workers": workers, "case": work.name, "callers": callers, **found, "max_abs_error": error}
                row |= {"memory_mib": memory_mib, "device_mib": held, "card_mib": of_smi("memory.used")}
                yield row | ({"failed": f"{found['broken']} connections broke"} if found["broken"] else {})


def marked_tests() -> list[Path]:
    """Return the files with such tests; to collect all of them takes packages that a machine with a GPU lacks."""
    return sorted(path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.gpu" in path.read_text("utf-8"))


def tests(scale: Scale) -> Iterator[Row]:
    """Yield the counts of the tests marked `gpu`, and each that failed; on a CPU all are skipped."""
    with tempfile.TemporaryDirectory(prefix="gpu-") as directory:
        report = Path(directory) / "report.xml"
        # Without the plugins of the machine's own packages.
        options = ["-q", "-m", "gpu", "-p", "no:cacheprovider", "-p", "pytest_timeout", f"--junitxml={report}"]
        command = [sys.executable, "-m", "pytest", *options, *map(str, marked_tests())]
        environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
        if not report.exists():
            yield {"failed": f"pytest: {done.stdout[-300:]}"}
            return
        cases = list(ET.parse(report).iter("testcase"))
    broken = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    num_skipped = sum(case.find("skipped") is not None for case in cases)
    num_passed = len(cases) - len(broken) - num_skipped
    row: Row = {"passed": num_passed, "failures": len(broken), "skipped": num_skipped}
    yield row | ({"failed": "no test ran"} if scale.is_gpu and not num_passed else {})
    for case in broken:
        found = case.find("failure") if case.find("failure") is not None else case.find("error")
        yield {"test": case.get("name"), "failed": "" if found is None else found.get("message", "")[:300]}
