"""Health: the times of the routes for operators while something else goes on, measured by a process of its own.

Invariants: one kept-alive connection, one request after another; a failed request is reported, not timed; what was seen is
written as one JSON object when standard input ends: milliseconds by path, and `wrong`.
"""

from __future__ import annotations

import http.client
import json
import select
import subprocess
import sys
import time
from typing import Self

from tests.torture.canary import quantile


class Health:
    """Requests `paths` until `stop`, and then has the times and the failures."""

    def __init__(self, port: int, paths: tuple[str, ...] = ("/healthz",), pause_s: float = 0.002) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.torture.health", str(port), str(pause_s), *paths],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.wrong: list[str] = []
        self._taken_ms: dict[str, list[float]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        told = json.loads(self._process.communicate()[0])
        self.wrong = told.pop("wrong")
        self._taken_ms = {path: sorted(taken) for path, taken in told.items()}

    def quantile_ms(self, q: float, path: str = "/healthz") -> float:
        return quantile(self._taken_ms[path], q)


def _ask(port: int, pause_s: float, paths: list[str]) -> dict[str, list]:
    taken: dict[str, list] = {**{path: [] for path in paths}, "wrong": []}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    while not select.select([sys.stdin], [], [], pause_s)[0]:
        for path in paths:
            started = time.monotonic()
            try:
                connection.request("GET", path)
                answer = connection.getresponse()
                answer.read()
            except (OSError, http.client.HTTPException) as error:
                taken["wrong"].append(f"{path} {type(error).__name__}")
                connection.close()
                continue
            taken[path].append((time.monotonic() - started) * 1000)
            if answer.status != http.HTTPStatus.OK:
                taken["wrong"].append(f"{path} {answer.status}")
    return taken


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_ask(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])))
