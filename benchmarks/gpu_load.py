"""python -m benchmarks.gpu_load PORT DIRECTORY CONNECTIONS AT SECONDS: one process of a closed loop; `closed_loop` runs several.

Invariants: it needs no program besides Python, because wrk may be missing where the GPU is; 20,000 requests/s take several
processes. On each connection the next request is sent when the last is answered. Requests of a directory
(`wires.write_requests`) are sent in order. All processes begin at the same moment.
"""

from __future__ import annotations

import itertools
import json
import re
import select
import socket
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# Until all processes have started and connected.
BEGIN_S = 1.0
# An answer that takes longer is broken.
ANSWER_S = 30.0
_READ_BYTES = 2**20
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


class LoadFailed(Exception):
    """Nothing was answered with 2xx, or a process of the generator failed."""


def closed_loop(port: int, requests: Path, connections: int, seconds: float, processes: int) -> dict[str, float]:
    """Send on so many connections for so long.

    Returns rps (answered with 2xx), p50_ms and p99_ms of these, refused (a share of all answers), broken (connections), and
    generator_cores: near the number of processes the generator was the limit.
    """
    at = time.time() + BEGIN_S
    shares = [connections // processes + (i < connections % processes) for i in range(processes)]
    running = [_start(port, requests, share, at, seconds) for share in shares if share]
    try:
        outputs = [process.communicate(timeout=BEGIN_S + seconds + 2 * ANSWER_S) for process in running]
    finally:
        for process in running:
            process.kill()
    if failed := next((process for process in running if process.returncode), None):
        raise LoadFailed(outputs[running.index(failed)][1][-300:])
    return merged([json.loads(out) for out, _ in outputs])


def _start(port: int, requests: Path, share: int, at: float, seconds: float) -> subprocess.Popen[str]:
    arguments = [str(x) for x in (port, requests, share, at, seconds)]
    command = [sys.executable, "-m", "benchmarks.gpu_load", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def merged(found: list[dict[str, Any]]) -> dict[str, float]:
    """Return the figures of all processes together, from their `us` (microseconds of each answer), cpu_s and others."""
    times = sorted(itertools.chain.from_iterable(one["us"] for one in found))
    refused = sum(one["refused"] for one in found)
    if not times:
        raise LoadFailed(f"no answer of 2xx, {refused} others")
    return {
        "rps": sum(len(one["us"]) / one["seconds"] for one in found),
        "p50_ms": times[len(times) // 2] / 1e3,
        "p99_ms": times[len(times) * 99 // 100] / 1e3,
        "refused": refused / (refused + len(times)),
        "broken": sum(one["broken"] for one in found),
        "generator_cores": sum(one["cpu_s"] / one["seconds"] for one in found),
    }


class _Connection:
    __slots__ = ("head", "is_good", "missing", "sent_at", "socket")

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, request: bytes) -> None:
        self.head, self.missing, self.is_good, self.sent_at = b"", -1, False, time.perf_counter()
        self.socket.sendall(request)

    def read(self) -> bool:
        """Read what has come; return whether the answer is complete. Raises OSError if the connection ended."""
        data = self.socket.recv(_READ_BYTES)
        if not data:
            raise ConnectionResetError
        if self.missing >= 0:
            self.missing -= len(data)
            return self.missing == 0
        self.head += data
        end = self.head.find(b"\r\n\r\n")
        if end >= 0:
            length = _LENGTH.search(self.head, 0, end + 2)
            self.is_good = self.head[9:10] == b"2"
            self.missing = (int(length[1]) if length else 0) - (len(self.head) - end - 4)
        return self.missing == 0


def run(port: int, requests: Path, connections: int, at: float, seconds: float) -> dict[str, Any]:
    """Run one process's share; returns what `merged` takes."""
    files = sorted(requests.iterdir(), key=lambda file: int(file.name))
    bodies = itertools.cycle([file.read_bytes() for file in files])
    opened = deque(_Connection(port) for _ in range(connections))
    by_number, epoll = {one.socket.fileno(): one for one in opened}, select.epoll()
    for number in by_number:
        epoll.register(number, select.EPOLLIN)
    time.sleep(max(0.0, at - time.time()))
    began, cpu_s, us, refused, broken = time.perf_counter(), time.process_time(), list[int](), 0, 0
    for one in opened:
        one.send(next(bodies))
    while by_number and (events := epoll.poll(ANSWER_S)):
        for number, _ in events:
            one = by_number[number]
            try:
                if not one.read():
                    continue
                now = time.perf_counter()
                if one.is_good:
                    us.append(int((now - one.sent_at) * 1e6))
                else:
                    refused += 1
                if now < began + seconds:
                    one.send(next(bodies))
                    continue
            except OSError:
                broken += 1
            epoll.unregister(number)
            by_number.pop(number).socket.close()
    spent = {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu_s}
    return {"us": us, "refused": refused, "broken": broken + len(by_number), **spent}


if __name__ == "__main__":
    port_, directory, share_, at_, seconds_ = sys.argv[1:]
    print(json.dumps(run(int(port_), Path(directory), int(share_), float(at_), float(seconds_))))
