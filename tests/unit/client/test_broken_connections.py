"""Broken connections: one may end, fall silent or bring a proxy's answer at any moment, and the call is sent again."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Iterator

import httpx2
import numpy as np
import pytest
import stamina

from attention_client import Client, ConnectionFailed, errors
from tests.unit.client.answering import Answering, echo
from tests.unit.client.conftest import AsyncFace

X = np.arange(6, dtype=np.float32).reshape(3, 2)
LARGE = np.zeros((4096, 256), np.float32)  # 4 MiB, more than the buffers of a connection hold
TENSORS = "application/vnd.safetensors"
SILENCE = b"silence"
RESET = b"reset"


class TinyServer:
    """Answers over real sockets. `script` has the bytes of the first answers, each of which ends its connection; then it echoes.

    An answer may end in SILENCE (the connection stays, and nothing more is read or sent) or in RESET. Scripted answers are sent
    without reading the body unless `reads_body`.
    """

    def __init__(self, *script: bytes, closes: bool = False, reads_body: bool = True) -> None:
        self.script, self.closes, self.reads_body = list(script), closes, reads_body
        self.num_requests = 0
        self.connections: list[socket.socket] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def stop(self) -> None:
        for connected in [self._socket, *self.connections]:
            with contextlib.suppress(OSError):  # this side, or the client, has closed it
                connected.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for connected in [self._socket, *self.connections]:
            connected.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connected, _ = self._socket.accept()
                self.connections.append(connected)
                self._threads.append(threading.Thread(target=self._serve, args=(connected,)))
                self._threads[-1].start()

    def _serve(self, connected: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                request = _read(connected, reads_body=self.reads_body or not self.script)
                self.num_requests += 1
                if self.script:
                    _fail(connected, self.script.pop(0))
                    return
                content = echo(request).content
                fields = f"Content-Type: {TENSORS}\r\nContent-Length: {len(content)}\r\n"
                fields += "Connection: close\r\n" if self.closes else ""
                connected.sendall(f"HTTP/1.1 200 OK\r\n{fields}\r\n".encode() + content)
                if self.closes:
                    connected.shutdown(socket.SHUT_RDWR)


def _read(connected: socket.socket, *, reads_body: bool) -> httpx2.Request:
    def more() -> bytes:
        if not (data := connected.recv(2**16)):
            raise EOFError
        return data

    data = b""
    while b"\r\n\r\n" not in data:
        data += more()
    head, body = data.split(b"\r\n\r\n", 1)
    names = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    while reads_body and len(body) < int(names[b"content-length"]):
        body += more()
    return httpx2.Request("POST", "http://x", content=body)


def _fail(connected: socket.socket, answer: bytes) -> None:
    connected.sendall(answer.removesuffix(SILENCE).removesuffix(RESET))
    if answer.endswith(RESET):
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if not answer.endswith(SILENCE):
        connected.close()


@contextlib.contextmanager
def serving(*script: bytes, **kwargs: bool) -> Iterator[TinyServer]:
    server = TinyServer(*script, **kwargs)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(params=[Client, AsyncFace], ids=["sync", "async"])
def client(request):
    """`client(server, **options)` returns a client of either kind that is connected to this server."""
    with contextlib.ExitStack() as stack, stamina.set_testing(True, attempts=5, cap=True):
        yield lambda server, **options: stack.enter_context(request.param(url=server.url, **options))


def answer(status: str, body: bytes = b"", *, length: int | None = None, kind: str = "text/html") -> bytes:
    length = len(body) if length is None else length
    fields = f"Content-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n"
    return f"HTTP/1.1 {status}\r\n{fields}\r\n".encode() + body


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"
# As HAProxy 2.6 and Ray Serve's proxies write them.
PAGE = b"<html><body><h1>504 Gateway Time-out</h1>\nThe server didn't respond in time.\n</body></html>\n"
BROKEN = {
    "closed without an answer": b"",
    "reset without an answer": RESET,
    "closed in the head": b"HTTP/1.1 200 OK\r\nContent-Le",
    "closed in the body": answer("200 OK", b"half", length=400, kind=TENSORS),
    "reset in the body": answer("200 OK", b"half", length=400, kind=TENSORS) + RESET,
    "closed between chunks": CHUNKED,
    "no HTTP": b"SSH-2.0-OpenSSH_9.2\r\n",
    "500 of a proxy": answer("500 Internal Server Error", b"Internal Server Error", kind="text/plain"),
    "502 of a proxy": answer("502 Bad Gateway", b""),
    "503 of a proxy": answer("503 Service Unavailable", PAGE),
    "504 of a proxy": answer("504 Gateway Time-out", PAGE),
    "504 of HTTP/1.0": b"HTTP/1.0 504 Gateway Time-out\r\nConnection: close\r\n\r\n" + PAGE,
    "a proxy's error cut short": answer("502 Bad Gateway", PAGE, length=4000),
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_a_call_is_sent_again_until_a_replica_answers_it(client, broken):
    with serving(broken, broken) as server:
        assert (client(server).attend("small", X).output == X).all()
        assert server.num_requests == 3


@pytest.mark.parametrize(
    "broken", [b"", RESET, answer("503 Service Unavailable", PAGE), answer("504 Gateway Time-out", PAGE)]
)
def test_a_body_too_large_for_a_balancer_is_sent_again_whole(client, broken):
    """A balancer may answer, or lose its replica, before it has read the body; it keeps no copy of a large one."""
    with serving(broken, broken, reads_body=False) as server:
        assert client(server).attend("small", LARGE).output.shape == LARGE.shape
        assert server.num_requests == 3


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_a_service_that_stays_broken_is_one_typed_error_after_the_last_attempt(client, broken):
    with serving(*[broken] * 9) as server:
        with pytest.raises((ConnectionFailed, errors.Refused)) as raised:
            client(server, attempts=3).attend("small", X)
        assert server.num_requests == 3
        assert raised.value.request_id


def test_a_silent_connection_is_left_after_the_read_timeout(client):
    """A frozen replica acknowledges each packet, so only time tells it from a slow one."""
    with serving(SILENCE, answer("200 OK", b"half", length=400, kind=TENSORS) + SILENCE) as server:
        assert (client(server, read_timeout_s=0.05).attend("small", X).output == X).all()
        assert len(server.connections) == 3


def test_a_peer_that_reads_no_more_of_a_large_body_is_left_after_the_read_timeout(client):
    with serving(SILENCE, reads_body=False) as server:
        assert client(server, read_timeout_s=0.2).attend("small", LARGE).output.shape == LARGE.shape


def test_without_a_read_timeout_the_deadline_ends_the_call_and_the_next_one_uses_another_connection(client):
    with serving(SILENCE) as server:
        asking = client(server)
        with pytest.raises(errors.DeadlineExceeded):
            asking.attend("small", X, timeout_s=0.1)
        assert (asking.attend("small", X).output == X).all()
        assert len(server.connections) == 2


def test_a_deadline_of_the_service_is_not_retried(client):
    body = {"code": "deadline_exceeded", "detail": "not computed in time", "title": "x", "status": 504, "type": "x"}
    late = answer("504 Gateway Timeout", json.dumps(body).encode(), kind="application/problem+json")
    with serving(late) as server:
        with pytest.raises(errors.DeadlineExceeded, match="in time"):
            client(server).attend("small", X)
        assert server.num_requests == 1


def test_a_page_with_status_200_is_reported_and_not_retried(client):
    with serving(answer("200 OK", b"<html>Log in</html>")) as server:
        with pytest.raises(errors.BadAnswer, match="is this the address of an attention service"):
            client(server).attend("small", X)
        assert server.num_requests == 1


def test_a_connection_that_each_answer_closes_costs_no_attempt(client):
    with serving(closes=True) as server:
        asking = client(server, attempts=1)
        assert all((asking.attend("small", X).output == X).all() for _ in range(20))
        assert len(server.connections) == 20


@pytest.mark.parametrize("odd", [0, -1, "3", float("nan")])
def test_an_impossible_read_timeout_is_refused(odd):
    with pytest.raises(errors.InvalidInput, match="read_timeout_s must be a number above 0"):
        Client(transport=Answering().transport, read_timeout_s=odd)
