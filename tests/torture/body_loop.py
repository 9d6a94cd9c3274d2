"""Body loop: one large request over and over, in an open or a closed loop, by a process of its own.

Invariants: every request has a connection of its own; it reads while it sends, and stops sending when it is answered; nothing
is copied on the way to the kernel and one loop of system calls drives all connections, so that the generator costs little of
the cores that it shares with the service; in the open loop a request's time counts from when it was due, however late the
generator sent it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.torture.raw_connection import HOST

PATIENCE_S = 20.0
READ_BYTES = 2**20
END_OF_HEAD, END_OF_CHUNKS = b"\r\n\r\n", b"\r\n0\r\n\r\n"


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """An open loop of `per_second` requests, or `callers`, each of which has one request in progress."""

    port: int
    seconds: float
    per_second: float = 0.0
    callers: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """Status 0: none, and `how` says why. `due_s` counts from the first request; `late_s` is the part of `seconds` before the
    generator opened the connection.
    """

    status: int
    seconds: float
    due_s: float
    late_s: float
    retry_after_s: float | None = None
    how: str = ""


def offered(load: Load, wire: bytes) -> list[Answer]:
    """All answers, in the order in which they came."""
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(wire)
        command = [sys.executable, "-m", "tests.torture.body_loop", json.dumps(dataclasses.asdict(load)), file.name]
        told = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    return [Answer(*fields) for fields in json.loads(told)]


class _Exchange:
    """One request on a connection of its own, from when it was due to its whole answer."""

    def __init__(self, start: float, due: float, wire: memoryview, port: int) -> None:
        self._start, self._due, self.opened = start, due, time.monotonic()
        self.socket = socket.socket()
        self.socket.setblocking(False)
        self._unsent = wire
        self._head = b""
        self._left = -1  # bytes of the answer's body to come; -1: unknown
        self._tail = b""
        with contextlib.suppress(BlockingIOError):
            self.socket.connect((HOST, port))

    @property
    def has_sent(self) -> bool:
        return not self._unsent

    def send(self) -> None:
        """As much as the kernel takes now. Raises OSError."""
        with contextlib.suppress(BlockingIOError):
            self._unsent = self._unsent[self.socket.send(self._unsent) :]

    def read(self) -> bool:
        """What has arrived; whether the answer is whole. Raises OSError, EOFError where it ends early."""
        try:
            data = self.socket.recv(READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            raise EOFError
        if END_OF_HEAD not in self._head:
            head, end, data = (self._head + data).partition(END_OF_HEAD)
            self._head = head + end
            length = self.field(b"content-length")
            self._left = -1 if length is None else int(length)
            if not end:
                return False
        if self._left >= 0:
            self._left -= len(data)
            return self._left == 0
        self._tail = (self._tail + data)[-len(END_OF_CHUNKS) :]
        return self._tail == END_OF_CHUNKS

    def field(self, name: bytes) -> bytes | None:
        _, found, rest = self._head.lower().partition(b"\r\n" + name + b": ")
        return rest.partition(b"\r\n")[0] if found else None

    def answer(self) -> Answer:
        retry_after, status = self.field(b"retry-after"), int(self._head[9:12])
        return self._told(status, None if retry_after is None else float(retry_after))

    def failure(self, how: str) -> Answer:
        return self._told(0, None, how)

    def _told(self, status: int, retry_after_s: float | None, how: str = "") -> Answer:
        seconds, due_s = time.monotonic() - self._due, self._due - self._start
        return Answer(status, seconds, due_s, self.opened - self._due, retry_after_s, how)


class _Loop:
    def __init__(self, load: Load, wire: bytes) -> None:
        self._load, self._wire = load, memoryview(wire)
        self._epoll = select.epoll()
        self._open: dict[int, _Exchange] = {}
        self._answers: list[Answer] = []
        self._start = time.monotonic()

    def run(self) -> list[Answer]:
        end = self._start + self._load.seconds
        dues = self._dues(end)
        due = next(dues, None)
        while due is not None or self._open:
            while due is not None and due <= time.monotonic():
                self._begin(due)
                due = next(dues, None)
            wait_s = 0.1 if due is None else min(0.1, max(0.0, due - time.monotonic()))
            for descriptor, events in self._epoll.poll(wait_s):
                if self._step(self._open[descriptor], events) and self._load.callers and time.monotonic() < end:
                    self._begin(time.monotonic())
            self._give_up()
        return self._answers

    def _dues(self, end: float) -> Iterator[float]:
        if self._load.callers:
            yield from [self._start] * self._load.callers
            return
        arrivals, due = random.Random(12), self._start
        while (due := due + arrivals.expovariate(self._load.per_second)) < end:
            yield due

    def _begin(self, due: float) -> None:
        try:
            exchange = _Exchange(self._start, due, self._wire, self._load.port)
        except OSError as error:  # out of descriptors: so many are unanswered
            late_s = time.monotonic() - due
            self._answers.append(Answer(0, late_s, due - self._start, late_s, None, type(error).__name__))
            return
        descriptor = exchange.socket.fileno()
        self._open[descriptor] = exchange
        self._epoll.register(descriptor, select.EPOLLIN | select.EPOLLOUT)

    def _step(self, exchange: _Exchange, events: int) -> bool:
        """Whether the exchange has ended."""
        try:
            if events & (select.EPOLLIN | select.EPOLLERR | select.EPOLLHUP) and exchange.read():
                self._end(exchange, exchange.answer())
                return True
            if events & select.EPOLLOUT:
                exchange.send()
                if exchange.has_sent:
                    self._epoll.modify(exchange.socket, select.EPOLLIN)
        except (OSError, EOFError) as error:
            self._end(exchange, exchange.failure(type(error).__name__))
            return True
        return False

    def _give_up(self) -> None:
        before = time.monotonic() - PATIENCE_S
        while self._open and (oldest := next(iter(self._open.values()))).opened < before:
            self._end(oldest, oldest.failure("TimeoutError"))

    def _end(self, exchange: _Exchange, answer: Answer) -> None:
        del self._open[exchange.socket.fileno()]
        exchange.socket.close()
        self._answers.append(answer)


if __name__ == "__main__":
    asked = Load(**json.loads(sys.argv[1]))
    found = _Loop(asked, Path(sys.argv[2]).read_bytes()).run()
    sys.stdout.write(json.dumps([dataclasses.astuple(answer) for answer in found]))
