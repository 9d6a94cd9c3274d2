"""Canary: a steady stream of valid requests beside whatever else goes on; each answer is checked to the last bit (rule 3).

Invariants: a process of its own, so that the noise of the generator is not in its times; requests are due at fixed times and a
late answer does not put off the next; what it saw it writes as one JSON object when its standard input ends.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator

from tests.torture.report import Row, none_of

TIMEOUT_S = 10.0
_HEADERS = {"Content-Type": "application/json"}
_BODIES = [
    json.dumps({"query": [[(i * 37 + j * 11) % 64 / 16 - 2 for j in range(16)] for i in range(rows)]}).encode()
    for rows in (1, 3, 8)
]


class Canary:
    """Sings from its start until `stop`, or until the end of `singing`.

    With `per_connection` it opens another connection after so many requests, which the kernel may give to another process.
    """

    def __init__(
        self, port: int, per_second: float = 50.0, cpus: set[int] | None = None, per_connection: int = 10**9
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.torture.canary", str(port), str(per_second), str(per_connection)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        if cpus:
            os.sched_setaffinity(self._process.pid, cpus)

    def stop(self) -> Song:
        return Song(**json.loads(self._process.communicate()[0]))


class Song:
    """What a canary saw: latencies in seconds of the right answers, and everything else in words."""

    def __init__(self, latencies: list[float], wrong: list[str]) -> None:
        self.latencies = sorted(latencies)
        self.wrong = wrong

    def quantile(self, q: float) -> float:
        return quantile(self.latencies, q)

    def row(self, figure: int, beside: str = "them") -> Row:
        return none_of(
            figure, f"the canary beside {beside}: answers that are not a 200 with the right bits", self.wrong
        )


def quantile(found: list[float], q: float) -> float:
    """Of a sorted list; NaN where nothing was seen, which meets no target."""
    return found[min(len(found) - 1, int(q * len(found)))] if found else float("nan")


@contextlib.contextmanager
def singing(port: int, songs: list[Song], **kwargs) -> Iterator[None]:
    """A canary beside the block; its song is added to `songs`."""
    canary = Canary(port, **kwargs)
    try:
        yield
    finally:
        songs.append(canary.stop())


def _sing(port: int, per_second: float, per_connection: int) -> dict:
    latencies: list[float] = []
    wrong: list[str] = []
    expected: dict[int, bytes] = {}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    due = time.monotonic()
    number = 0
    while not select.select([sys.stdin], [], [], max(0.0, due - time.monotonic()))[0]:
        which = number % len(_BODIES)
        try:
            status, answer = _ask(connection, _BODIES[which])
        except (OSError, http.client.HTTPException) as error:
            wrong.append(type(error).__name__)
            connection.close()
        else:
            if status != http.HTTPStatus.OK or expected.setdefault(which, answer) != answer:
                wrong.append(f"status {status}" if status != http.HTTPStatus.OK else "other bits")
            else:
                latencies.append(time.monotonic() - max(due, 0))
        number += 1
        if number % per_connection == 0:
            connection.close()
        due = max(due + 1 / per_second, time.monotonic() - 1)
    return {"latencies": latencies, "wrong": wrong}


def _ask(connection: http.client.HTTPConnection, body: bytes) -> tuple[int, bytes]:
    connection.request("POST", "/v1/layers/small/attend", body, _HEADERS)
    answer = connection.getresponse()
    return answer.status, answer.read().partition(b',"batch":')[0]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_sing(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))))
