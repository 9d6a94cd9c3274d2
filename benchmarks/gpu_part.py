"""python -m benchmarks.gpu_part NAME real|dry: run one part of `make gpu` and print its rows, each as a line of JSON.

Invariants: it exits with 1 if a row has `failed`; SIGTERM ends it and the service that it started.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping

from benchmarks.gpu_checks import CHECKS, DRY, REAL, Row, Scale
from benchmarks.gpu_serve import serve, tests
from service.attention.heap import keep_freed

PARTS: Mapping[str, Callable[[Scale], Iterator[Row]]] = {
    **CHECKS,
    "tests": tests,
    **{f"serve-{num}": functools.partial(serve, workers=num) for num in (1, 2, 4, 8)},
}


def main(name: str, scale: str) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    keep_freed()  # as a worker of the service does
    has_failed = False
    for row in PARTS[name]({"real": REAL, "dry": DRY}[scale]):
        print(json.dumps(row), flush=True)
        has_failed = has_failed or "failed" in row
    return 1 if has_failed else 0


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    # At once: where the device is lost, torch may abort the process when it frees what it holds.
    os._exit(code)
